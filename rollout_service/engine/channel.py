"""Frames between the frontend and the engine process, over a socket pair.

A frame is a JSON header and the raw bytes of its tensors. No pickle, and the bytes of a tensor go from its memory
to the socket, and from the socket to their place, without a copy of ours.
"""

from __future__ import annotations

import asyncio
import json
import math
import socket
import struct
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from rollout_service.tensors import from_bytes, tensor_bytes

_PREFIX = struct.Struct("<IQ")  # bytes of the header, bytes of the payload


@dataclass(frozen=True)
class RawTensor:
    """A tensor as bytes: row-major, little-endian."""

    dtype: torch.dtype
    shape: tuple[int, ...]
    data: memoryview

    @property
    def tensor(self) -> Tensor:
        """The tensor, sharing the memory."""
        return from_bytes(self.data, self.dtype, self.shape)

    def row(self, index: int) -> RawTensor:
        """Row ``index`` along the first dimension, sharing the memory."""
        size = math.prod(self.shape[1:]) * self.dtype.itemsize
        return RawTensor(self.dtype, self.shape[1:], self.data[index * size : (index + 1) * size])


@dataclass(frozen=True)
class Frame:
    """One message: what it is, its JSON-ready fields, and its tensors."""

    kind: str
    fields: dict[str, Any] = field(default_factory=dict)
    tensors: tuple[RawTensor, ...] = ()

    @property
    def nbytes(self) -> int:
        """Bytes of the tensors."""
        return sum(len(tensor.data) for tensor in self.tensors)


def _encode(kind: str, fields: dict[str, Any], tensors: Sequence[Tensor]) -> list[bytes | memoryview]:
    buffers = [tensor_bytes(tensor) for tensor in tensors]
    layout = [(str(tensor.dtype).removeprefix("torch."), list(tensor.shape)) for tensor in tensors]
    header = json.dumps([kind, fields, layout], separators=(",", ":")).encode()
    return [_PREFIX.pack(len(header), sum(map(len, buffers))) + header, *buffers]


def _decode(header: bytes | bytearray, payload: bytearray) -> Frame:
    kind, fields, layout = json.loads(header)
    tensors, offset, view = [], 0, memoryview(payload)
    for name, shape in layout:
        dtype: torch.dtype = getattr(torch, name)
        size = math.prod(shape) * dtype.itemsize
        tensors.append(RawTensor(dtype, tuple(shape), view[offset : offset + size]))
        offset += size
    return Frame(kind, fields, tuple(tensors))


class Channel:
    """The engine's end: blocking; one thread sends, one receives."""

    def __init__(self, sock: socket.socket) -> None:
        self._socket = sock
        sock.setblocking(True)

    def send(self, kind: str, fields: dict[str, Any], tensors: Sequence[Tensor] = ()) -> None:
        """Send one frame. Raises OSError if the frontend is gone."""
        for buffer in _encode(kind, fields, tensors):
            self._socket.sendall(buffer)

    def receive(self) -> Frame | None:
        """The next frame, or None if the frontend is gone."""
        prefix = self._read(_PREFIX.size)
        if prefix is None:
            return None
        header_size, payload_size = _PREFIX.unpack(prefix)
        header, payload = self._read(header_size), self._read(payload_size)
        return None if header is None or payload is None else _decode(header, payload)

    def _read(self, size: int) -> bytearray | None:
        data = bytearray(size)
        view = memoryview(data)
        while view:
            try:
                count = self._socket.recv_into(view)
            except OSError:
                return None
            if not count:
                return None
            view = view[count:]
        return data


class AsyncChannel:
    """The frontend's end, on an asyncio loop. Sending never waits and cannot be interrupted within a frame: a task of
    the channel's own writes what has been handed over.
    """

    def __init__(self, sock: socket.socket) -> None:
        self._socket = sock
        sock.setblocking(False)
        self._outgoing: asyncio.Queue[list[bytes | memoryview]] = asyncio.Queue()
        self._writer = asyncio.create_task(self._write(), name="engine-channel-writer")

    def send(self, kind: str, fields: dict[str, Any], tensors: Sequence[Tensor] = ()) -> None:
        """Hand over one frame; lost if the engine is gone, which ``receive`` tells."""
        self._outgoing.put_nowait(_encode(kind, fields, tensors))

    async def _write(self) -> None:
        loop = asyncio.get_running_loop()
        try:
            while True:
                for buffer in await self._outgoing.get():
                    await loop.sock_sendall(self._socket, buffer)
        except OSError:
            return

    async def receive(self) -> Frame | None:
        """The next frame, or None if the engine is gone."""
        prefix = await self._read(_PREFIX.size)
        if prefix is None:
            return None
        header_size, payload_size = _PREFIX.unpack(prefix)
        header, payload = await self._read(header_size), await self._read(payload_size)
        return None if header is None or payload is None else _decode(header, payload)

    async def _read(self, size: int) -> bytearray | None:
        data = bytearray(size)
        view = memoryview(data)
        while view:
            try:
                count = await asyncio.get_running_loop().sock_recv_into(self._socket, view)
            except OSError:
                return None
            if not count:
                return None
            view = view[count:]
        return data

    async def close(self) -> None:
        """Close this end; the engine sees it and exits."""
        self._writer.cancel()
        await asyncio.gather(self._writer, return_exceptions=True)
        self._socket.close()
