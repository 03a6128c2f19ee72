"""Tensors to and from protocol messages, without a copy more than needed."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from diffusion_rollout.v1 import tensor_pb2
from torch import Tensor

TORCH_DTYPES: dict[int, torch.dtype] = {
    tensor_pb2.DATA_TYPE_FLOAT32: torch.float32,
    tensor_pb2.DATA_TYPE_BFLOAT16: torch.bfloat16,
    tensor_pb2.DATA_TYPE_FLOAT16: torch.float16,
    tensor_pb2.DATA_TYPE_UINT8: torch.uint8,
    tensor_pb2.DATA_TYPE_INT32: torch.int32,
    tensor_pb2.DATA_TYPE_INT64: torch.int64,
    tensor_pb2.DATA_TYPE_BOOL: torch.bool,
    tensor_pb2.DATA_TYPE_FLOAT64: torch.float64,
}
DATA_TYPES: dict[torch.dtype, Any] = {dtype: number for number, dtype in TORCH_DTYPES.items()}


def tensor_bytes(tensor: Tensor) -> memoryview:
    """The row-major little-endian bytes of a CPU tensor: a view of its memory where it is contiguous."""
    flat = tensor.detach().contiguous().reshape(-1)
    if flat.numel() == 1:
        flat = flat.as_strided((1,), (1,))  # an expanded single element counts as contiguous, with stride 0
    view: Any = flat.view(torch.uint8).numpy() if flat.numel() else b""
    return memoryview(view)


def from_bytes(data: bytes | bytearray | memoryview, dtype: torch.dtype, shape: Sequence[int]) -> Tensor:
    """A tensor over ``data``: shares its memory, so treat it as read-only unless ``data`` is a bytearray.

    Raises:
        ValueError: the number of bytes does not fit dtype and shape.
    """
    expected = math.prod(shape) * dtype.itemsize
    if len(data) != expected:
        raise ValueError(f"{len(data)} bytes given for {dtype} {list(shape)}, which has {expected}")
    if not expected:
        return torch.empty(tuple(shape), dtype=dtype)
    return torch.frombuffer(data, dtype=dtype).reshape(tuple(shape))


def to_message(tensor: Tensor) -> tensor_pb2.Tensor:
    """A CPU tensor, whole, as one message.

    Raises:
        ValueError: its dtype cannot be sent.
    """
    if tensor.dtype not in DATA_TYPES:
        raise ValueError(f"{tensor.dtype} cannot be sent; pass one of {', '.join(map(str, DATA_TYPES))}")
    return tensor_pb2.Tensor(dtype=DATA_TYPES[tensor.dtype], shape=tensor.shape, data=bytes(tensor_bytes(tensor)))


def from_message(message: tensor_pb2.Tensor) -> Tensor:
    """The tensor of a message that holds a whole one; a copy, so that it can be written to.

    Raises:
        ValueError: an unknown dtype, a part, or a number of bytes that does not fit.
    """
    if message.dtype not in TORCH_DTYPES:
        raise ValueError(f"dtype: {message.dtype} is not a known data type; pass one of DataType")
    if message.offset:
        raise ValueError(f"offset: {message.offset} given for a whole tensor; pass 0")
    return from_bytes(bytearray(message.data), TORCH_DTYPES[message.dtype], message.shape)
