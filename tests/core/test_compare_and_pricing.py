"""Bitwise comparison names the first difference; a price is the bytes."""

from __future__ import annotations

import math
import struct

import pytest
import torch

import graphsafe as gs
from graphsafe.compare import differences, first_difference
from graphsafe.pricing import Price, PriceLine, operator_price

DTYPES = [
    torch.float64, torch.float32, torch.float16, torch.bfloat16, torch.float8_e4m3fn, torch.int8, torch.uint8,
    torch.int16, torch.int32, torch.int64, torch.bool, torch.complex64, torch.complex128,
]  # fmt: skip


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_equal_bits_are_equal_and_one_other_element_is_named(dtype):
    want = torch.arange(6).view(2, 3).to(dtype)
    assert first_difference("x", want.clone(), want) is None
    got = want.clone()
    got[1, 2] = want[0, 0]
    found = first_difference("x", got, want)
    assert found.index == (1, 2)
    assert found.count == 1
    assert str(found).startswith("x[1, 2] is ")


def test_nan_equals_the_same_nan_alone():
    nan, other = (torch.tensor(struct.unpack("f", b)[0]) for b in (b"\x00\x00\xc0\x7f", b"\x00\x00\xc0\xff"))
    assert first_difference("x", nan, nan.clone()) is None
    assert first_difference("x", nan, other) is not None
    assert first_difference("x", nan, torch.tensor(1.0)) is not None


def test_zero_differs_from_negative_zero():
    found = first_difference("x", torch.tensor([0.0, 0.0]), torch.tensor([0.0, -0.0]))
    assert found.index == (1,)
    assert math.copysign(1, found.want) == -1


def test_another_shape_or_dtype_is_a_difference():
    assert "float32[2]" in str(first_difference("x", torch.zeros(3), torch.zeros(2)))
    assert "float64" in str(first_difference("x", torch.zeros(2), torch.zeros(2).double()))


def test_strides_and_lazy_bits_do_not_matter():
    x = torch.randn(4, 6)
    assert first_difference("x", x.t(), x.t().contiguous()) is None
    c = torch.randn(3, dtype=torch.complex64)
    assert first_difference("c", c.conj(), c.conj().resolve_conj()) is None
    assert first_difference("c", c.conj(), c) is not None
    assert first_difference("c", c.conj().imag, -c.imag) is None
    assert first_difference("empty", torch.zeros(0, 3), torch.zeros(0, 3)) is None
    assert first_difference("scalar", torch.tensor(1.0), torch.tensor(2.0)).index == ()


def test_all_tensors_of_a_structure_are_compared():
    want = {"a": torch.zeros(2), "b": [torch.ones(2), 3]}
    got = {"a": torch.ones(2), "b": [torch.zeros(2), 3]}
    assert [d.name for d in differences(got, want, "out")] == ["out['a']", "out['b'][0]"]
    with pytest.raises(ValueError):
        differences({"a": torch.zeros(2)}, want)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_a_line_is_the_bytes_of_its_tensor(dtype):
    for shape in ((), (0, 3), (2, 3)):
        t = torch.empty(shape, dtype=dtype)
        assert PriceLine.of("x", shape, dtype).bytes == t.numel() * t.element_size()


@pytest.mark.parametrize("operator", ["gdn", "kda"])
@pytest.mark.parametrize("backward", [False, True])
def test_an_operators_price_is_the_bytes_of_its_tensors(operator, backward):
    bucket = gs.Bucket(96, 5, 16)
    price = operator_price(
        bucket, operator=operator, heads=2, value_heads=4, key_dim=8, value_dim=6, dtype=torch.float32,
        backward=backward,
    )  # fmt: skip
    held = [torch.empty(line.shape, dtype=line.dtype) for line in price.lines]
    assert price.bytes == sum(t.untyped_storage().nbytes() for t in held)
    shapes = {line.name: line.shape for line in price.lines}
    assert shapes["q"] == (1, 96, 2, 8)
    assert shapes["o"] == (1, 96, 4, 6)
    assert shapes["g"] == ((1, 96, 4) if operator == "gdn" else (1, 96, 4, 8))
    assert shapes["initial_state"] == (5, 4, 8, 6)
    assert shapes["chunk_indices"] == (bucket.slots, 2)
    assert ("dq" in shapes) == backward


def test_a_price_is_the_sum_of_its_lines():
    assert Price(()).bytes == 0
    assert Price((PriceLine.of("a", (2,), torch.float32), PriceLine.of("b", (3,), torch.int64))).bytes == 32
