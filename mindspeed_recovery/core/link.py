# SPDX-License-Identifier: Apache-2.0
"""Messages and bytes between this rank and one other, over a process group that exists already.

Every wait ends, with what was awaited or by its timeout: that the other rank has died, gloo often does not say. After a
failed wait the whole group is unusable, as gloo has it, which `RepairError.broken` says. No group is made, and no object
collective used.
"""

from __future__ import annotations

import time
import zlib
from collections import deque
from collections.abc import Sequence
from datetime import timedelta
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from mindspeed_recovery.core import memory
from mindspeed_recovery.core.wire import HEADER_BYTES, Message, Packed, Part, chunks
from mindspeed_recovery.errors import RepairError

_TAG = 0x5250
_IN_FLIGHT = 3
_POLL_SECONDS = 0.001
_ROW_BYTES = 1024

T = TypeVar("T", bound=Message)


class Link:
    """``peer``: global rank; ``timeout``: seconds that one wait may last. A group whose backend is not gloo is a device's:
    what goes over it goes through device memory, a chunk at a time. Not thread-safe."""

    def __init__(self, peer: int, group: Any, timeout: float) -> None:
        if peer not in dist.get_process_group_ranks(group):
            raise RepairError(f"rank {peer} is not in the group {dist.get_process_group_ranks(group)}")
        self.peer, self._group, self._timeout = peer, group, timeout
        self._on_host = dist.get_backend(group) == "gloo"

    # ---- messages

    def send(self, message: Message) -> None:
        """Raises WireError, and sends nothing, for a message that is too large."""
        body = message.encode()
        header = message.header(body)
        self._run(dist.isend, _as_tensor(header))
        self._run(dist.isend, _as_tensor(body))

    def recv(self, kind: type[T]) -> T:
        """Raises WireError for anything else. Allocates no more than a message may have."""
        header = torch.empty(HEADER_BYTES, dtype=torch.uint8)
        self._run(dist.irecv, header)
        length, checksum = kind.read_header(_as_bytes(header))
        body = torch.empty(length, dtype=torch.uint8)
        self._run(dist.irecv, body)
        return kind.decode(_as_bytes(body), checksum)

    # ---- bytes

    def send_bytes(self, storages: Sequence[Tensor]) -> list[int | None]:
        """Send storages (uint8, on the host). Returns the checksum of each chunk, None for one that could not be read: its
        bytes are sent as something else, for the receiver waits for them."""
        checksums: list[int | None] = []
        flying: deque[tuple[Any, Tensor]] = deque()
        for chunk in chunks([storage.numel() for storage in storages]):
            try:
                data = _gather(chunk, storages)
                readable = True
            except Exception:
                data, readable = torch.zeros(chunk.nbytes, dtype=torch.uint8), False
            moving = data if self._on_host else data.to(memory.current_device())
            flying.append((self._start(dist.isend, moving), moving))
            checksums.append(checksum_of(data) if readable else None)
            if len(flying) == _IN_FLIGHT:
                self._wait(flying.popleft()[0])
        while flying:
            self._wait(flying.popleft()[0])
        return checksums

    def recv_bytes(self, sizes: Sequence[int], large: dict[int, Tensor]) -> tuple[list[Tensor], list[int]]:
        """Receive storages of these sizes. ``large``: where those go that are cut into parts (uint8, on the host), by
        number. Returns the storages, and the checksum of each chunk as it arrived."""
        storages = [
            large[n] if n in large else _NOTHING if size else torch.empty_like(_NOTHING) for n, size in enumerate(sizes)
        ]
        plan = list(chunks(sizes))
        flying: deque[tuple[Any, Tensor, Tensor]] = deque()
        checksums = []
        for number in range(len(plan) + _IN_FLIGHT):
            if number < len(plan):
                chunk = plan[number]
                if isinstance(chunk, Part):
                    data = large[chunk.storage][chunk.start : chunk.stop]
                else:
                    data = torch.empty(chunk.nbytes, dtype=torch.uint8)
                    for storage, view in zip(chunk.storages, data.split([sizes[i] for i in chunk.storages])):
                        storages[storage] = view
                moving = data if self._on_host else torch.empty_like(data, device=memory.current_device())
                flying.append((self._start(dist.irecv, moving), moving, data))
            if flying and number >= _IN_FLIGHT - 1:
                work, moving, data = flying.popleft()
                self._wait(work)
                if moving is not data:
                    data.copy_(moving)
                checksums.append(checksum_of(data))
        return storages, checksums

    # ---- waits

    def _run(self, operation: Any, data: Tensor) -> None:
        moving = data if self._on_host else data.to(memory.current_device())
        self._wait(self._start(operation, moving))
        if moving is not data and operation is dist.irecv:
            data.copy_(moving)

    def _start(self, operation: Any, data: Tensor) -> Any:
        try:
            return operation(data, self.peer, group=self._group, tag=_TAG)
        except RuntimeError as error:
            raise self._broken(error) from None

    def _wait(self, work: Any) -> None:
        try:
            if self._on_host:
                work.wait(timedelta(seconds=self._timeout))
                return
            deadline = time.monotonic() + self._timeout
            while not work.is_completed():  # wait() of a device's group does not wait
                if time.monotonic() > deadline:
                    raise RuntimeError(f"nothing arrived within {self._timeout:g} s")
                time.sleep(_POLL_SECONDS)
            work.wait()
        except RuntimeError as error:
            raise self._broken(error) from None

    def _broken(self, error: RuntimeError) -> RepairError:
        text = str(error).splitlines()[0] if str(error) else type(error).__name__
        return RepairError(f"the connection to rank {self.peer} failed: {text:.300}", broken=True)


def checksum_of(data: Tensor) -> int:
    """Of bytes (uint8, on the host). Many times faster than a CRC of the bytes: one of the sums of their rows, which any
    single changed word changes."""
    whole = data.numel() // _ROW_BYTES * _ROW_BYTES
    if data.storage_offset() % 8:
        data = data.clone()
    rows = data[:whole].view(torch.int64).view(-1, _ROW_BYTES // 8).sum(1)
    return zlib.crc32(memory.host_view(data[whole:]), zlib.crc32(memory.host_view(rows)))


def _gather(chunk: Packed | Part, storages: Sequence[Tensor]) -> Tensor:
    if isinstance(chunk, Part):
        return storages[chunk.storage][chunk.start : chunk.stop]
    return torch.cat([storages[number] for number in chunk.storages])


def _as_tensor(data: bytes) -> Tensor:
    return torch.frombuffer(bytearray(data), dtype=torch.uint8)


def _as_bytes(data: Tensor) -> bytes:
    return data.numpy().tobytes()


_NOTHING = torch.empty(0, dtype=torch.uint8)
