"""Tensors to messages and back, bit for bit."""

from __future__ import annotations

import math
import sys

import pytest
import torch
from diffusion_rollout.v1 import tensor_pb2
from torch import Tensor

from rollout_service.tensors import DATA_TYPES, TORCH_DTYPES, from_bytes, from_message, tensor_bytes, to_message

#: (DataType, the bytes of 1 and of 0 or false), from the comments of tensor.proto.
WIRE = {
    torch.float32: (tensor_pb2.DATA_TYPE_FLOAT32, b"\0\0\x80\x3f"),
    torch.bfloat16: (tensor_pb2.DATA_TYPE_BFLOAT16, b"\x80\x3f"),
    torch.float16: (tensor_pb2.DATA_TYPE_FLOAT16, b"\0\x3c"),
    torch.uint8: (tensor_pb2.DATA_TYPE_UINT8, b"\1"),
    torch.int32: (tensor_pb2.DATA_TYPE_INT32, b"\1\0\0\0"),
    torch.int64: (tensor_pb2.DATA_TYPE_INT64, b"\1\0\0\0\0\0\0\0"),
    torch.bool: (tensor_pb2.DATA_TYPE_BOOL, b"\1"),
    torch.float64: (tensor_pb2.DATA_TYPE_FLOAT64, b"\0\0\0\0\0\0\xf0\x3f"),
}
DTYPES = list(WIRE)
SHAPES = [(), (1,), (5,), (2, 3), (16, 8, 6), (1, 1, 1, 2), (0,), (3, 0, 2)]


def example(dtype: torch.dtype, shape: tuple[int, ...]) -> Tensor:
    """A tensor of random bits (of random booleans)."""
    generator = torch.Generator().manual_seed(0)
    if dtype is torch.bool:
        return torch.randint(0, 2, shape, generator=generator).bool()
    bits = torch.randint(0, 256, (math.prod(shape) * dtype.itemsize,), dtype=torch.uint8, generator=generator)
    return bits.view(dtype).reshape(shape)


def same_bits(one: Tensor, two: Tensor) -> bool:
    """Whether two tensors agree in dtype, shape and every bit (NaNs too)."""
    return (one.dtype, one.shape) == (two.dtype, two.shape) and bytes(tensor_bytes(one)) == bytes(tensor_bytes(two))


def test_every_data_type_has_a_dtype() -> None:
    assert set(TORCH_DTYPES) == set(tensor_pb2.DataType.values()) - {tensor_pb2.DATA_TYPE_UNSPECIFIED}
    assert set(DATA_TYPES) == set(WIRE)
    assert {DATA_TYPES[dtype]: dtype for dtype in DATA_TYPES} == TORCH_DTYPES


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_round_trip(dtype: torch.dtype, shape: tuple[int, ...]) -> None:
    tensor = example(dtype, shape)
    message = to_message(tensor)
    assert (message.dtype, tuple(message.shape), message.offset) == (WIRE[dtype][0], shape, 0)
    assert len(message.data) == math.prod(shape) * dtype.itemsize
    arrived = from_message(tensor_pb2.Tensor.FromString(message.SerializeToString()))
    assert same_bits(arrived, tensor)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_bytes_are_little_endian(dtype: torch.dtype) -> None:
    assert sys.byteorder == "little"  # what the module relies on
    number, one = WIRE[dtype]
    message = to_message(torch.tensor([1, 0]).to(dtype))
    assert (message.dtype, message.data) == (number, one + bytes(len(one)))
    assert from_message(tensor_pb2.Tensor(dtype=number, shape=[], data=one)).item() == 1


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(
    "view",
    [
        lambda t: t.transpose(0, 2),
        lambda t: t[:, ::2],
        lambda t: t[1:, 1:, 1:],
        lambda t: t[:1].expand(5, -1, -1),
        lambda t: t.unflatten(0, (2, -1)).permute(3, 1, 0, 2),
        lambda t: t.flip(0),
    ],
    ids=["transposed", "strided", "sliced", "expanded", "permuted", "flipped"],
)
def test_views_arrive_row_by_row(dtype: torch.dtype, view: object) -> None:
    tensor = view(example(dtype, (4, 6, 8)))  # type: ignore[operator]
    arrived = from_message(to_message(tensor))
    assert arrived.is_contiguous()
    assert same_bits(arrived, tensor.clone(memory_format=torch.contiguous_format))


def test_values_that_are_not_finite_keep_their_bits() -> None:
    for dtype in (torch.float32, torch.bfloat16, torch.float16, torch.float64):
        tensor = torch.tensor([float("nan"), float("inf"), -float("inf"), -0.0], dtype=dtype)
        assert same_bits(from_message(to_message(tensor)), tensor)


def test_a_tensor_with_gradients_can_be_sent() -> None:
    tensor = torch.ones(2, requires_grad=True)
    arrived = from_message(to_message(tensor * 2))
    assert not arrived.requires_grad
    assert arrived.tolist() == [2, 2]


def test_what_arrives_is_a_copy_that_can_be_written_to() -> None:
    message = to_message(torch.zeros(3))
    arrived = from_message(message)
    arrived[0] = 7
    assert from_message(message).tolist() == [0, 0, 0]


def test_bytes_of_a_contiguous_tensor_are_a_view() -> None:
    tensor = torch.zeros(4)
    view = tensor_bytes(tensor)
    tensor[0] = 1
    assert bytes(view[:4]) == WIRE[torch.float32][1]


def test_a_tensor_over_bytes_shares_their_memory() -> None:
    data = bytearray(8)
    tensor = from_bytes(data, torch.int64, ())
    data[0] = 5
    assert tensor.item() == 5


@pytest.mark.parametrize("kind", [bytes, bytearray, memoryview], ids=lambda kind: kind.__name__)
@pytest.mark.filterwarnings("ignore:The given buffer is not writable")
def test_bytes_of_any_kind_are_taken(kind: type) -> None:
    tensor = example(torch.float32, (2, 3))
    assert same_bits(from_bytes(kind(bytes(tensor_bytes(tensor))), torch.float32, [2, 3]), tensor)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("missing", [-1, 1, 100])
def test_a_number_of_bytes_that_does_not_fit_is_refused(dtype: torch.dtype, missing: int) -> None:
    expected = 6 * dtype.itemsize
    with pytest.raises(ValueError, match=rf"bytes given for torch\.\w+ \[2, 3\], which has {expected}"):
        from_bytes(bytes(max(0, expected - missing)), dtype, (2, 3))


@pytest.mark.parametrize(
    ("shape", "data"),
    [([], b""), ([0], b"\0"), ([2], bytes(4)), ([(1 << 32) - 1] * 8, bytes(4)), ([1, 0, 3], bytes(4))],
    ids=str,
)
def test_a_message_that_does_not_fit_is_refused(shape: list[int], data: bytes) -> None:
    message = tensor_pb2.Tensor(dtype=tensor_pb2.DATA_TYPE_FLOAT32, shape=shape, data=data)
    with pytest.raises(ValueError, match="bytes given for"):
        from_message(message)


@pytest.mark.parametrize("number", [0, 9, -1, (1 << 31) - 1])
def test_an_unknown_data_type_is_refused(number: int) -> None:
    with pytest.raises(ValueError, match="dtype"):
        from_message(tensor_pb2.Tensor(dtype=number, shape=[1], data=bytes(4)))


def test_a_part_is_refused() -> None:
    message = to_message(torch.zeros(3))
    message.offset = 4
    with pytest.raises(ValueError, match="offset"):
        from_message(message)


@pytest.mark.parametrize("dtype", [torch.complex64, torch.int16, torch.float8_e4m3fn], ids=str)
def test_a_dtype_without_a_data_type_cannot_be_sent(dtype: torch.dtype) -> None:
    with pytest.raises(ValueError, match="cannot be sent"):
        to_message(torch.zeros(2, dtype=dtype))


@pytest.mark.parametrize("shape", [(), (1,), (1, 1), (1, 1, 1)], ids=str)
@pytest.mark.parametrize("dtype", list(DATA_TYPES), ids=str)
def test_an_expanded_single_element(dtype: torch.dtype, shape: tuple[int, ...]) -> None:
    """Its stride is 0 though torch calls it contiguous."""
    tensor = torch.ones(1, dtype=dtype)[0].expand(shape)
    assert bytes(tensor_bytes(tensor)) == bytes(tensor_bytes(torch.ones(1, dtype=dtype)))
    assert torch.equal(from_message(to_message(tensor)), tensor)
