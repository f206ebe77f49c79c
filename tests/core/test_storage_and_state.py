"""Storages as the unit of memory, and how what a run changed is put back."""

from __future__ import annotations

import gc
import random

import numpy
import pytest
import torch

from graphsafe._state import Generators, SavedState, host_random_state
from graphsafe._storage import StorageRef, key_of


def test_views_share_a_key_and_copies_do_not():
    x = torch.arange(8.0)
    assert key_of(x) == key_of(x[2:].view(2, 3).t()) == key_of(x.detach())
    assert key_of(x) != key_of(x.clone())


def test_a_reference_does_not_keep_memory_alive():
    x = torch.arange(8.0)
    ref = StorageRef(x)
    assert ref.alive()
    view = x[3:]
    del x
    gc.collect()
    assert ref.alive(), "a view keeps the storage"
    del view
    gc.collect()
    assert not ref.alive()
    assert ref.storage() is None
    assert ref.bytes() is None
    assert not ref.unchanged()
    assert ref.holders() == 0


def test_a_key_is_not_given_again_while_it_is_watched():
    refs = []
    for _ in range(50):
        t = torch.empty(64)
        refs.append(StorageRef(t))
        del t
    assert len({r.key for r in refs}) == 50


def test_holders_are_counted_without_the_watcher():
    x = torch.arange(8.0)
    ref = StorageRef(x)
    assert ref.holders() == 1
    view, alias = x[2:], x.detach()
    assert ref.holders() == 3
    del view, alias
    w = torch.ones(8, requires_grad=True)
    y = w * x
    del x
    assert ref.holders() == 1, "autograd saved it"
    del y
    assert ref.holders() == 0


def test_a_resized_storage_is_changed():
    x = torch.arange(8.0)
    ref = StorageRef(x)
    assert ref.unchanged()
    x.resize_(1000)
    assert not ref.unchanged()


def test_bytes_are_the_whole_storage():
    x = torch.arange(4, dtype=torch.int16)
    assert StorageRef(x[2:]).bytes().tolist() == [0, 0, 1, 0, 2, 0, 3, 0]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.bool, torch.complex64, torch.int64], ids=str)
def test_what_was_saved_comes_back_bit_for_bit(dtype):
    x = torch.tensor([[0.0, float("nan")], [-0.0, 3.0]]).to(dtype)
    before = StorageRef(x).bytes().clone()
    saved = SavedState()
    saved.save(x[0])
    x.fill_(1)
    saved.save(x[1])
    x.fill_(0)
    saved.restore()
    assert torch.equal(StorageRef(x).bytes(), before)
    x.fill_(1)
    saved.restore()
    assert torch.equal(x, torch.ones_like(x)), "restore forgets"


def test_gradients_come_back_as_they_were():
    fresh, old = (torch.ones(3, requires_grad=True) for _ in range(2))
    old.grad = torch.full((3,), 7.0)
    held = old.grad
    saved = SavedState()
    for t in (fresh, old):
        saved.leaf(t)
    saved.save(old.grad)
    (fresh * old).sum().backward()
    saved.restore()
    assert fresh.grad is None
    assert old.grad is held
    assert held.tolist() == [7.0] * 3


def test_nothing_is_kept_that_the_run_let_go():
    saved = SavedState(births=True)
    for _ in range(600):
        saved.save(torch.zeros(10))
    assert len(saved._saved) < 300
    assert saved.present() == {}


def test_all_generators_come_back():
    own = torch.Generator().manual_seed(3)
    before = Generators([torch.default_generator, own])
    host = host_random_state()

    def draw():
        return torch.rand(2).tolist(), torch.rand(2, generator=own).tolist(), random.random(), numpy.random.rand()

    first = draw()
    assert host_random_state() != host
    before.restore()
    assert host_random_state() == host
    assert draw() == first
    assert before.reseeded() is None
    own.manual_seed(4)
    assert before.reseeded() is own
