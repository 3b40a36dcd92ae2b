#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# A mixture-of-experts model with MindSpeed-LLM on Ascend NPUs, with MindIO TFT and the plugin. Run it in a checkout of
# MindSpeed-LLM (Megatron-core 0.12.1). Nothing there is edited: the plugin comes in through the launcher, and the five
# lines of RECOVERY_ARGS are all that differs from a training script without recovery.
#
# Replicas are what a device is repaired from: the data parallel size, of dense and of expert layers, must be at least 2.
set -euo pipefail

export CUDA_DEVICE_MAX_CONNECTIONS=1
export PYTORCH_NPU_ALLOC_CONF=expandable_segments:True
export HCCL_CONNECT_TIMEOUT=3600
export HCCL_EXEC_TIMEOUT=3600

DATA_PATH=${DATA_PATH:?prefix of the tokenised data}
TOKENIZER_PATH=${TOKENIZER_PATH:?folder of the tokenizer}
CHECKPOINTS=${CHECKPOINTS:?folder to save checkpoints in}
TENSORBOARD=${TENSORBOARD:-$CHECKPOINTS/tensorboard}

DISTRIBUTED_ARGS=(
    --nproc_per_node "${NPUS_PER_NODE:-8}"
    --nnodes "${NNODES:-4}"
    --node_rank "${NODE_RANK:-0}"
    --master_addr "${MASTER_ADDR:-localhost}"
    --master_port "${MASTER_PORT:-6000}"
)

RECOVERY_ARGS=(
    --enable-high-availability          # MindIO TFT: last-words checkpoints
    --enable-hbmfault-repair            # MindIO TFT: repair in place after a memory fault
    --enable-recovery-safe-globals      # the plugin: global state survives the repair
    --recovery-max-retries 3
    # --recovery-patches my_states.toml # states of your own code
)

MODEL_ARGS=(
    --use-mcore-models
    --transformer-impl local
    --num-layers 48
    --hidden-size 2048
    --ffn-hidden-size 6144
    --num-attention-heads 32
    --group-query-attention
    --num-query-groups 4
    --kv-channels 128
    --qk-layernorm
    --seq-length 4096
    --max-position-embeddings 4096
    --position-embedding-type rope
    --rotary-base 1000000
    --normalization RMSNorm
    --norm-epsilon 1e-6
    --swiglu
    --disable-bias-linear
    --untie-embeddings-and-output-weights
    --attention-dropout 0.0
    --hidden-dropout 0.0
    --make-vocab-size-divisible-by 1
    --tokenizer-type PretrainedFromHF
    --tokenizer-name-or-path "$TOKENIZER_PATH"
)

MOE_ARGS=(
    --num-experts 128
    --moe-router-topk 8
    --moe-ffn-hidden-size 768
    --moe-router-load-balancing-type aux_loss
    --moe-aux-loss-coeff 1e-3
    --moe-z-loss-coeff 1e-3
    --moe-grouped-gemm
    --moe-token-dispatcher-type alltoall
    --moe-permutation-async-comm
)

PARALLEL_ARGS=(
    --tensor-model-parallel-size 1
    --pipeline-model-parallel-size 2
    --expert-model-parallel-size 8
    --use-distributed-optimizer
    --overlap-grad-reduce
    --distributed-backend nccl
)

FUSION_ARGS=(
    --use-flash-attn
    --use-fused-rmsnorm
    --use-fused-swiglu
    --use-fused-rotary-pos-emb
    --no-masked-softmax-fusion
    --no-gradient-accumulation-fusion
    --attention-softmax-in-fp32
)

TRAINING_ARGS=(
    --bf16
    --micro-batch-size 1
    --global-batch-size 256
    --train-iters 2000
    --lr 1.25e-6
    --min-lr 1.25e-7
    --lr-decay-style cosine
    --lr-warmup-fraction 0.01
    --weight-decay 0.1
    --clip-grad 1.0
    --adam-beta1 0.9
    --adam-beta2 0.95
    --init-method-std 0.01
    --seed 42
)

DATA_AND_OUTPUT_ARGS=(
    --data-path "$DATA_PATH"
    --split 949,50,1
    --save "$CHECKPOINTS"
    --save-interval 500
    --ckpt-format torch                 # high availability refuses distributed checkpoints
    --eval-interval 500
    --eval-iters 10
    --log-interval 1
    --tensorboard-dir "$TENSORBOARD"
)

torchrun "${DISTRIBUTED_ARGS[@]}" -m mindspeed_recovery.run pretrain_gpt.py \
    "${RECOVERY_ARGS[@]}" \
    "${MODEL_ARGS[@]}" \
    "${MOE_ARGS[@]}" \
    "${PARALLEL_ARGS[@]}" \
    "${FUSION_ARGS[@]}" \
    "${TRAINING_ARGS[@]}" \
    "${DATA_AND_OUTPUT_ARGS[@]}"
