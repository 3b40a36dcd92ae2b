# SPDX-License-Identifier: Apache-2.0
"""Pretrain a GPT with mixture-of-experts layers through the stock ``megatron.training.pretrain()``.

A plain Megatron script: model provider, dataset provider, forward step. The import of mindspeed_recovery is the one line
that the plugin needs; ``--enable-recovery-safe-globals`` switches it on. The text is the English documentation that comes
with Python (``pydoc_data.topics``), read byte by byte.

Here it runs on a CPU, behind the simulated device of `cpu_device`, with megatron-core 0.18 or 0.19:

    torchrun --nproc-per-node 2 examples/pretrain_gpt.py --tensorboard-dir runs/gpt --enable-recovery-safe-globals \\
        --use-distributed-optimizer --overlap-grad-reduce --overlap-param-gather --fault uce@rank=1,step=4,at=router
"""

from __future__ import annotations

import functools
import shlex
import sys
from collections.abc import Iterator
from pydoc_data import topics
from typing import Any

import cpu_device
import torch
from torch.utils.data import Dataset

import mindspeed_recovery  # noqa: F401  registers the flag in Megatron's parser

# isort: split
from megatron.core.enums import ModelType
from megatron.core.models.gpt import GPTModel, gpt_layer_specs
from megatron.training import get_args, pretrain
from megatron.training.argument_utils import pretrain_cfg_container_from_args
from megatron.training.arguments import core_transformer_config_from_args, parse_and_validate_args

ARGUMENTS = shlex.split("""
    --num-layers 2 --hidden-size 32 --ffn-hidden-size 64 --num-attention-heads 4 --swiglu --disable-bias-linear
    --position-embedding-type rope --normalization RMSNorm --untie-embeddings-and-output-weights
    --seq-length 32 --max-position-embeddings 32 --tokenizer-type NullTokenizer --vocab-size 255
    --make-vocab-size-divisible-by 1 --hidden-dropout 0.1 --attention-dropout 0.1
    --num-experts 4 --moe-router-topk 2 --moe-ffn-hidden-size 64 --moe-token-dispatcher-type alltoall
    --moe-router-load-balancing-type aux_loss --moe-aux-loss-coeff 1e-2 --moe-z-loss-coeff 1e-3
    --moe-router-score-function sigmoid --moe-router-enable-expert-bias --moe-router-bias-update-rate 1e-3
    --moe-shared-expert-intermediate-size 32 --moe-per-layer-logging --mtp-num-layers 1 --mtp-loss-scaling-factor 0.1
    --micro-batch-size 2 --global-batch-size 12 --train-iters 6 --lr 1e-3 --min-lr 1e-4 --lr-decay-style cosine
    --lr-warmup-iters 2 --weight-decay 0.01 --clip-grad 1.0 --eval-interval 3 --eval-iters 2
    --log-interval 1 --tensorboard-log-interval 1 --seed 1234
""")
"""A small model; what the user writes on the command line comes after it and wins."""


class Text(Dataset):
    """Samples of the documentation of Python, as bytes. ``part``: which share of the text, from 0 to 1."""

    def __init__(self, part: tuple[float, float], samples: int, length: int) -> None:
        text = "\n".join(topics.topics[name] for name in sorted(topics.topics)).encode()
        self._text = text[int(part[0] * len(text)) : int(part[1] * len(text))]
        self._samples, self._length = samples, length

    def __len__(self) -> int:
        return self._samples

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        start = index * 7919 * self._length % (len(self._text) - self._length - 1)  # a prime stride visits all of it
        tokens = torch.tensor(list(self._text[start : start + self._length + 1]))
        return {
            "tokens": tokens[:-1],
            "labels": tokens[1:],
            "loss_mask": torch.ones(self._length),
            "position_ids": torch.arange(self._length),
        }


def model_provider(pre_process: bool = True, post_process: bool = True, **options: Any) -> GPTModel:
    args = get_args()
    config = core_transformer_config_from_args(args)
    layers = gpt_layer_specs.get_gpt_decoder_block_spec(config, use_transformer_engine=False)
    mtp = None
    if args.mtp_num_layers:
        mtp = gpt_layer_specs.get_gpt_mtp_block_spec(config, layers, use_transformer_engine=False)
    return GPTModel(
        config=config,
        transformer_layer_spec=layers,
        vocab_size=args.padded_vocab_size,
        max_sequence_length=args.max_position_embeddings,
        pre_process=pre_process,
        post_process=post_process,
        position_embedding_type=args.position_embedding_type,
        share_embeddings_and_output_weights=not args.untie_embeddings_and_output_weights,
        mtp_block_spec=mtp,
    )


def datasets_provider(samples: tuple[int, int, int]) -> tuple[Text, ...]:
    parts = ((0.0, 0.8), (0.8, 0.9), (0.9, 1.0))
    return tuple(Text(part, max(number, 1), get_args().seq_length) for part, number in zip(parts, samples))


def forward_step(device: cpu_device.Device, data: Iterator[dict[str, torch.Tensor]], model: Any) -> Any:
    device.at("forward" if model.training else "eval", None if model.training else get_args().curr_iteration + 1)
    batch = {name: tensor.cuda(non_blocking=True) for name, tensor in next(data).items()}
    output = model(batch["tokens"], batch["position_ids"], None, labels=batch["labels"], loss_mask=batch["loss_mask"])
    return output, functools.partial(loss, batch["loss_mask"])


def loss(mask: torch.Tensor, output: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, dict[str, torch.Tensor]]:
    total, tokens = (output.float() * mask).sum(), mask.sum().to(torch.int)
    return total, tokens, {"lm loss": torch.stack([total.detach(), tokens])}


def main(store: torch.distributed.Store | None = None) -> int:
    """Train as ``sys.argv`` says. ``store``: to meet the other ranks in; by default the one of torchrun."""
    cpu_device.prepare(sys.argv)
    sys.argv[1:1] = ARGUMENTS
    args = parse_and_validate_args(extra_args_provider=cpu_device.add_arguments)
    with cpu_device.run(args, cpu_device.join(store)) as device:
        pretrain(
            pretrain_cfg_container_from_args(args),
            train_valid_test_dataset_provider=datasets_provider,
            model_provider=model_provider,
            model_type=ModelType.encoder_or_decoder,
            forward_step_func=functools.partial(forward_step, device),
        )
    torch.distributed.destroy_process_group()
    return 0


if __name__ == "__main__":
    sys.exit(main())
