#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# A mixture-of-experts model with Megatron-LM and MindSpeed on Ascend NPUs, with the plugin. Run it in a checkout of
# Megatron-LM (core_v0.12.1) whose pretrain_gpt.py imports mindspeed.megatron_adaptor, as MindSpeed asks for.
#
# Megatron-LM has no switch of its own for MindIO TFT. Its train() is put under TFT as MindIO's manual says, in
# pretrain_gpt.py; the plugin finds TFT there. Where it is missing, the plugin says in one WARNING that nobody recovers.
set -euo pipefail

export CUDA_DEVICE_MAX_CONNECTIONS=1
export PYTORCH_NPU_ALLOC_CONF=expandable_segments:True
export HCCL_CONNECT_TIMEOUT=3600
export HCCL_EXEC_TIMEOUT=3600
export HIGH_AVAILABILITY=retry          # MindIO TFT: repair in place after a memory fault

DATA_PATH=${DATA_PATH:?prefix of the tokenised data}
TOKENIZER_MODEL=${TOKENIZER_MODEL:?file of the tokenizer}
CHECKPOINTS=${CHECKPOINTS:?folder to save checkpoints in}
TENSORBOARD=${TENSORBOARD:-$CHECKPOINTS/tensorboard}

DISTRIBUTED_ARGS=(
    --nproc_per_node "${NPUS_PER_NODE:-8}"
    --nnodes "${NNODES:-1}"
    --node_rank "${NODE_RANK:-0}"
    --master_addr "${MASTER_ADDR:-localhost}"
    --master_port "${MASTER_PORT:-6000}"
)

RECOVERY_ARGS=(
    --enable-recovery-safe-globals      # the plugin: global state survives the repair
    --recovery-max-retries 3
)

MODEL_ARGS=(
    --transformer-impl local
    --num-layers 16
    --hidden-size 2048
    --ffn-hidden-size 5632
    --num-attention-heads 16
    --group-query-attention
    --num-query-groups 4
    --seq-length 4096
    --max-position-embeddings 4096
    --position-embedding-type rope
    --normalization RMSNorm
    --swiglu
    --disable-bias-linear
    --untie-embeddings-and-output-weights
    --tokenizer-type Llama2Tokenizer
    --tokenizer-model "$TOKENIZER_MODEL"
)

MOE_ARGS=(
    --num-experts 8
    --moe-router-topk 2
    --moe-router-load-balancing-type aux_loss
    --moe-aux-loss-coeff 1e-2
    --moe-z-loss-coeff 1e-3
    --moe-token-dispatcher-type alltoall
)

PARALLEL_ARGS=(
    --tensor-model-parallel-size 1
    --pipeline-model-parallel-size 1
    --expert-model-parallel-size 4
    --use-distributed-optimizer
    --overlap-grad-reduce
    --overlap-param-gather
    --distributed-backend nccl
)

FUSION_ARGS=(
    --use-flash-attn
    --no-masked-softmax-fusion
    --no-gradient-accumulation-fusion
    --no-bias-dropout-fusion
    --attention-softmax-in-fp32
)

TRAINING_ARGS=(
    --bf16
    --micro-batch-size 1
    --global-batch-size 64
    --train-iters 2000
    --lr 1e-4
    --min-lr 1e-5
    --lr-decay-style cosine
    --lr-warmup-fraction 0.01
    --weight-decay 0.1
    --clip-grad 1.0
    --seed 42
)

DATA_AND_OUTPUT_ARGS=(
    --data-path "$DATA_PATH"
    --split 949,50,1
    --save "$CHECKPOINTS"
    --save-interval 500
    --ckpt-format torch
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
