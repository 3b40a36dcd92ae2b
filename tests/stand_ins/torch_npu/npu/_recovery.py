# SPDX-License-Identifier: Apache-2.0
"""The flag belongs to the storage, so to all its views; these functions read and write it, and nothing else does."""

import functools

import torch

allocator = None
_checking = False


def simulate(memory):
    """All of torch on this process's simulated device: which tensors are on it, and pinned memory that is not."""
    global allocator
    allocator = memory
    torch.Tensor.is_npu = property(memory.is_device)
    empty = torch.empty

    @functools.wraps(empty)
    def empty_or_pinned(*size, pin_memory=False, **options):
        tensor = empty(*size, **options)
        if pin_memory:
            memory.register_host(tensor)
        return tensor

    torch.empty = empty_or_pinned


def _of(value):
    if not isinstance(value, torch.Tensor):
        raise RuntimeError(f"param type should be Tensor, could not be {type(value)}")
    return value


def check_npu_tensor_is_safe(tensor):
    return not allocator.is_unsafe(_of(tensor))


def update_npu_tensor_to_safe(tensor):
    allocator.mark_safe(_of(tensor))  # the bytes stay as they are


def mark_all_npu_tensor_unsafe(device):
    return allocator.mark_all()


def set_npu_tensor_unsafe_check_flag(flag):
    global _checking
    _checking = flag


def get_npu_tensor_unsafe_check_flag():
    return _checking
