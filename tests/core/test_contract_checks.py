"""What an operator checks before any launch, without reading the device."""

from __future__ import annotations

import pytest
import torch

import graphsafe as gs
from graphsafe.contract import check_cu_seqlens, check_tensor, describe, resolve_tables
from graphsafe.metadata import build_tables
from graphsafe.runtime import get_runtime

X = torch.zeros(1, 8, 2)
CU = torch.tensor([0, 3, 8], dtype=torch.int32)
CPU = torch.device("cpu")


def test_a_tensor_is_described_in_one_line():
    assert describe(torch.zeros(1, 8, dtype=torch.bfloat16)) == "bfloat16[1, 8] on cpu"
    assert describe(3) == "int"


@pytest.mark.parametrize(
    ("value", "options", "text"),
    [
        (3, {}, "x is int; a tensor is needed"),
        (X, {"shape": (1, None)}, r"x is float32\[1, 8, 2\] on cpu; shape \[1, \*\] is needed"),
        (X, {"shape": (1, None, 3)}, r"shape \[1, \*, 3\] is needed"),
        (X, {"dtypes": (torch.float16, torch.bfloat16)}, "dtype float16 or bfloat16 is needed"),
        (X, {"device": torch.device("meta")}, "device meta is needed"),
        (X.transpose(1, 2), {"contiguous": True}, r"strides \(16, 1, 2\); a contiguous tensor is needed"),
    ],
)
def test_a_wrong_operand_is_named_with_what_is_needed(value, options, text):
    with pytest.raises(gs.ArgumentError, match=text):
        check_tensor("x", value, **options)
    with pytest.raises(gs.MetadataError, match=text):
        check_tensor("x", value, **options, rule="tables")


def test_a_right_operand_passes():
    check_tensor("x", X, shape=(1, None, 2), dtypes=(torch.float32,), device=CPU, contiguous=True)


def test_boundaries_give_the_number_of_sequences():
    assert check_cu_seqlens(CU, batch=1, device=CPU) == 2
    assert check_cu_seqlens(CU.long(), batch=1, device=CPU, max_num_seqs=2) == 2


@pytest.mark.parametrize(
    ("cu", "options", "cls", "text"),
    [
        (CU.float(), {}, gs.ArgumentError, "dtype int32 or int64"),
        (CU.view(1, 3), {}, gs.ArgumentError, "shape"),
        (CU[:1], {}, gs.ArgumentError, "at least two entries"),
        (torch.zeros(6, dtype=torch.int32)[::2], {}, gs.ArgumentError, "contiguous"),
        (CU, {"batch": 2}, gs.ArgumentError, "a packed batch has leading size 1"),
        (CU, {"max_num_seqs": 3}, gs.MetadataError, "max_num_seqs is 3 but cu_seqlens has room for 2"),
        ([0, 3, 8], {}, gs.ArgumentError, "cu_seqlens is list; a tensor is needed"),
    ],
)
def test_wrong_boundaries_are_refused(cu, options, cls, text):
    with pytest.raises(cls, match=text):
        check_cu_seqlens(cu, **{"batch": 1, "device": CPU, **options})


def test_tables_are_built_or_taken_from_the_caller():
    built = resolve_tables(CU, tokens=8, chunk_size=4, chunk_indices=None, chunk_offsets=None)
    made = build_tables(CU, 8, 4)
    assert torch.equal(built.chunk_indices, made.chunk_indices)
    taken = resolve_tables(
        CU, tokens=8, chunk_size=4, chunk_indices=made.chunk_indices, chunk_offsets=made.chunk_offsets
    )
    assert taken.chunk_indices is made.chunk_indices
    assert (taken.max_num_seqs, taken.slots) == (2, 3)


@pytest.mark.parametrize(
    ("change", "text"),
    [
        ({"chunk_indices": None}, "chunk_indices is missing"),
        ({"chunk_offsets": None}, "chunk_offsets is missing"),
        ({"chunk_indices": torch.zeros(4, 2, dtype=torch.int32)}, r"chunk_indices .* shape \[3, 2\] is needed"),
        ({"chunk_offsets": torch.zeros(4, dtype=torch.int32)}, r"chunk_offsets .* shape \[3\] is needed"),
        ({"chunk_indices": torch.zeros(3, 2, dtype=torch.int64)}, "dtype int32 is needed"),
        ({"chunk_indices": torch.zeros(2, 3, dtype=torch.int32).t()}, "contiguous"),
    ],
)
def test_tables_that_do_not_agree_are_refused(change, text):
    made = build_tables(CU, 8, 4)
    options = {"chunk_indices": made.chunk_indices, "chunk_offsets": made.chunk_offsets, **change}
    with pytest.raises(gs.MetadataError, match=text):
        resolve_tables(CU, tokens=8, chunk_size=4, **options)


def test_no_check_reads_the_device():
    rt = get_runtime("cpu")
    made = build_tables(CU, 8, 4)
    with rt.capture() as graph:
        check_tensor("x", X, shape=(1, None, 2), contiguous=True)
        check_cu_seqlens(CU, batch=1, device=CPU, max_num_seqs=2)
        resolve_tables(CU, tokens=8, chunk_size=4, chunk_indices=made.chunk_indices, chunk_offsets=made.chunk_offsets)
    assert graph.launches == 0
