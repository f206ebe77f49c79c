"""The one-launch table builder against ``graphsafe.metadata.build_tables``, bit for bit."""

from __future__ import annotations

import random

import pytest
import torch

import graphsafe.metadata as metadata
from graphsafe.errors import GraphSafeError
from graphsafe.metadata import MetadataBuilder
from graphsafe_kernels.tables import TritonMetadataBuilder, build_tables


def boundaries(lengths, dtype, device):
    ends = torch.tensor([0, *lengths], dtype=torch.int64).cumsum(0)
    return ends.to(dtype).to(device)


def random_layout(rng, sequences, chunk_size):
    """Lengths with empties anywhere and lengths about a chunk's, and a capacity with no, some or much padding."""
    choices = [0, 0, 1, 2, chunk_size - 1, chunk_size, chunk_size + 1, rng.randrange(4 * chunk_size)]
    lengths = [rng.choice(choices) for _ in range(sequences)]
    padding = rng.choice([0, 1, chunk_size - 1, chunk_size, 5 * chunk_size + 3])
    return lengths, max(1, sum(lengths) + padding)


def assert_equal(cu_seqlens, tokens, chunk_size):
    want = metadata.build_tables(cu_seqlens, tokens, chunk_size)
    got = build_tables(cu_seqlens, tokens, chunk_size)
    assert got.chunk_size == want.chunk_size
    assert got.cu_seqlens is cu_seqlens
    for name in ("chunk_indices", "chunk_offsets"):
        a, b = getattr(want, name), getattr(got, name)
        assert a.dtype == b.dtype
        assert torch.equal(a, b), (name, cu_seqlens.tolist(), tokens, chunk_size)
    return got


@pytest.mark.parametrize("seed", range(8))
def test_equals_the_definition_on_random_layouts(device, large, seed):
    rng = random.Random(seed)
    for _ in range(150 if large else 8):
        chunk_size = rng.choice([1, 3, 16, 32, 64, 128])
        sequences = rng.choice([1, 2, 3, 5, 17, 64, 65, *([1000, 1024, 1025, 4096] if large else [])])
        lengths, tokens = random_layout(rng, sequences, chunk_size)
        dtype = rng.choice([torch.int32, torch.int64])
        assert_equal(boundaries(lengths, dtype, device), tokens, chunk_size)


@pytest.mark.parametrize(
    "lengths",
    [[0], [0, 0, 0], [0, 0, 70], [70, 0, 0], [70, 0, 0, 0, 1], [64, 0, 64], [1] * 20, [0, 1, 0, 1, 0]],
    ids=str,
)
@pytest.mark.parametrize("dtype", [torch.int32, torch.int64], ids=str)
def test_empty_sequences_anywhere(device, lengths, dtype):
    for tokens in (max(1, sum(lengths)), sum(lengths) + 1, sum(lengths) + 200):
        assert_equal(boundaries(lengths, dtype, device), tokens, 64)


@pytest.mark.parametrize("sequences", [300, 4096])
def test_more_sequences_than_a_tile(device, large, sequences):
    if not large:
        sequences = min(sequences, 300)
    lengths = [(7 * i) % 5 for i in range(sequences)]
    assert_equal(boundaries(lengths, torch.int32, device), sum(lengths) + 100, 16)


def test_the_live_totals_are_on_the_device(device):
    """What later kernels need besides: live rows and live slots."""
    tables = build_tables(boundaries([5, 0, 100, 0], torch.int32, device), 300, 64)
    assert int(tables.cu_seqlens[-1]) == 105
    assert int(tables.chunk_offsets[-1]) == 3 == int((tables.chunk_indices[:, 0] >= 0).sum())


def test_one_launch(device, launches):
    build_tables(boundaries([5, 0, 100], torch.int32, device), 300, 64)
    assert launches == ["chunk_tables_kernel"]


def test_follows_the_buffer_and_not_its_identity(device):
    """Two layouts written to one buffer (reported as fla 1274)."""
    cu_seqlens = boundaries([256, 256, 256, 256], torch.int32, device)
    first = assert_equal(cu_seqlens, 1024, 64)
    cu_seqlens.copy_(boundaries([100, 300, 624, 0], torch.int32, device))
    second = assert_equal(cu_seqlens, 1024, 64)
    assert not torch.equal(first.chunk_indices, second.chunk_indices)


def test_recycled_tensors(device, large):
    """Rounds of random layouts in tensors that are freed in between (reported as FlashQLA 23)."""
    rng = random.Random(9)
    for _ in range(1000 if large else 20):
        lengths = [rng.randrange(512) for _ in range(8)]
        assert_equal(boundaries(lengths, torch.int64, device), 4096, 64)


def test_replay_follows_the_buffer(device, large, capture):
    rng = random.Random(11)
    sequences, tokens = (32, 4096) if large else (4, 300)
    cu_seqlens = boundaries([tokens // sequences] * sequences, torch.int32, device)
    graph = capture(lambda: (lambda t: (t.chunk_indices, t.chunk_offsets))(build_tables(cu_seqlens, tokens, 64)))
    for _ in range(50 if large else 5):
        cuts = sorted(rng.randrange(tokens + 1) for _ in range(sequences))
        cu_seqlens.copy_(torch.tensor([0, *cuts], dtype=torch.int32))
        indices, offsets = graph.replay()
        want = metadata.build_tables(cu_seqlens, tokens, 64)
        assert torch.equal(indices, want.chunk_indices)
        assert torch.equal(offsets, want.chunk_offsets)


def test_is_a_metadata_builder(device):
    builder = TritonMetadataBuilder()
    assert isinstance(builder, MetadataBuilder)
    cu_seqlens = boundaries([3, 4], torch.int32, device)
    assert torch.equal(builder.build(cu_seqlens, 7).chunk_indices, build_tables(cu_seqlens, 7).chunk_indices)


@pytest.mark.parametrize(("tokens", "chunk_size"), [(7, 0), (-1, 64), (2**31, 64)])
def test_refuses_what_it_cannot_number(device, tokens, chunk_size):
    with pytest.raises(GraphSafeError, match="build_tables"):
        build_tables(boundaries([3, 4], torch.int32, device), tokens, chunk_size)


@pytest.mark.parametrize(
    "cu",
    [torch.tensor([[0, 0], [9, 5], [20, 7]])[:, 0], torch.tensor([0.0, 9.0, 20.0]), torch.tensor([[0, 9, 20]]),
     torch.tensor([], dtype=torch.int32)],
    ids=["strided", "float", "rows", "empty"],
)  # fmt: skip
def test_boundaries_of_another_layout_are_refused(device, cu):
    strided = not cu.is_contiguous()
    on_device = cu.repeat_interleave(2).to(device)[::2] if strided else cu.to(device)
    with pytest.raises(GraphSafeError) as caught:
        build_tables(on_device, 20, 4)
    assert caught.value.rule.name == "argument"
