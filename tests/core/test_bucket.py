"""A bucket: three positive numbers, from which every fixed shape follows."""

from __future__ import annotations

import itertools

import pytest

import graphsafe as gs
from graphsafe.bucket import slot_count
from graphsafe.testing.layouts import layouts, naive_tables


@pytest.mark.parametrize("name", ["tokens", "sequences", "chunk_size"])
@pytest.mark.parametrize("value", [0, -1, 1.0, "64", None, True], ids=repr)
def test_a_number_that_is_no_positive_integer_is_refused_by_name(name, value):
    with pytest.raises(gs.ArgumentError, match=f"Bucket\\({name}={value!r}\\)"):
        gs.Bucket(**{"tokens": 64, "sequences": 2, "chunk_size": 64, name: value})


@pytest.mark.parametrize("value", [3, 48, 100])
def test_a_chunk_size_that_is_no_power_of_two_is_refused(value):
    with pytest.raises(gs.ArgumentError, match="power of two"):
        gs.Bucket(64, 2, value)


@pytest.mark.parametrize("tokens", [1, 2, 63, 64, 65, 200])
@pytest.mark.parametrize("sequences", [1, 2, 7])
@pytest.mark.parametrize("chunk_size", [1, 16, 64])
def test_no_layout_needs_more_slots(tokens, sequences, chunk_size):
    bucket = gs.Bucket(tokens, sequences, chunk_size)
    assert bucket.slots == slot_count(tokens, sequences, chunk_size)
    needed = [naive_tables(one, tokens, sequences, chunk_size)[1][-1] for one in layouts(40, tokens, sequences)]
    assert max(needed) <= bucket.slots


@pytest.mark.parametrize("chunk_size", [2, 4])
def test_among_all_layouts_the_slots_are_enough_and_sometimes_needed(chunk_size):
    tight = 0
    for tokens, sequences in itertools.product(range(1, 9), range(1, 4)):
        every = [c for c in itertools.product(range(tokens + 1), repeat=sequences) if sum(c) <= tokens]
        most = max(sum(-(-length // chunk_size) for length in lengths) for lengths in every)
        assert most <= gs.Bucket(tokens, sequences, chunk_size).slots
        tight += most == gs.Bucket(tokens, sequences, chunk_size).slots
    assert tight > 6


def test_the_smallest_comes_first():
    buckets = [gs.Bucket(64, 4), gs.Bucket(32, 8), gs.Bucket(64, 2), gs.Bucket(64, 2, 32)]
    assert sorted(buckets) == [gs.Bucket(32, 8), gs.Bucket(64, 2, 32), gs.Bucket(64, 2), gs.Bucket(64, 4)]


def test_fits():
    bucket = gs.Bucket(64, 4)
    assert bucket.fits(64, 4)
    assert bucket.fits(0, 0)
    assert not bucket.fits(65, 4)
    assert not bucket.fits(64, 5)


def test_it_is_a_key_and_a_text():
    assert {gs.Bucket(64): 1}[gs.Bucket(64, 1, 64)] == 1
    assert str(gs.Bucket(4096, 32)) == "4096x32 (BT 64)"
    with pytest.raises(AttributeError):
        gs.Bucket(64).tokens = 3
