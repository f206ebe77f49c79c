"""The suite fails where an adapter breaks the contract: the CPU runtime, spoilt in one way at a time."""

from __future__ import annotations

import gc
from types import SimpleNamespace

import pytest
import torch

import graphsafe as gs
from graphsafe import _state, base
from graphsafe._watch import Watch
from graphsafe.arena import Arena
from graphsafe.bucket import Bucket
from graphsafe.runtime import MemoryFigures
from graphsafe.testing.suite import ContractSuite
from graphsafe_cpu import CpuRuntime
from graphsafe_cpu.runtime import CpuGraph
from graphsafe_cpu.tape import Tape, _Node, _Outside, _Owner

BUCKET = Bucket(96, 5, 16)
FAILS = (AssertionError, gs.GraphSafeError, pytest.fail.Exception)


def replay_nothing(patch):
    patch.setattr(CpuGraph, "replay", lambda self: self._ready())


def replay_all_but_the_last(patch):
    finish = Tape.finish
    patch.setattr(Tape, "finish", lambda self: (finish(self), self._nodes.pop() if len(self._nodes) > 1 else None))


def results_in_new_memory(patch):
    patch.setattr(_Node, "run", lambda self, outside: self.call(*self.args) if not self.from_outside else None)


def poison_nothing(patch):
    patch.setattr(CpuGraph, "poison", lambda self: None)


def keep_what_the_capture_wrote(patch):
    patch.setattr(_state.SavedState, "restore", lambda self: self.drop())


def keep_what_the_capture_drew(patch):
    patch.setattr(_state.Generators, "restore", lambda self: None)


def draw_the_same_numbers_again(patch):
    replay = CpuGraph.replay
    patch.setattr(CpuGraph, "replay", lambda self: (torch.manual_seed(0), replay(self)))


def no_look_at_what_died(patch):
    patch.setattr(_Outside, "tensor", lambda self: torch.zeros(self.view.size, dtype=self.view.dtype))


def no_look_at_what_was_replaced(patch):
    patch.setattr(_Owner, "check", lambda self: None)


def keep_inputs_alive(patch):
    held = []
    see = Tape._see
    patch.setattr(Tape, "_see", lambda self, t, used_by: (held.append(t), see(self, t, used_by))[1])


def several_captures_at_once(patch):
    lock = SimpleNamespace(acquire=lambda where: None, release=lambda: None, running=False, running_here=False)
    patch.setattr(base, "one_capture", lock)


def escapes_pass(patch):
    patch.setattr(base, "escaped", lambda watch, kept, graph: None)


def rules_off(patch):
    patch.setattr(Watch, "_refuse", lambda self, facts, args, kwargs: None)


def swallowed_errors_pass(patch):
    patch.setattr(Watch, "fail", lambda self, rule, what, **details: base.error(rule, what, **details))


def collector_left_off(patch):
    patch.setattr(base.gc, "enable", lambda: None)


def failed_graph_stays_open(patch):
    patch.setattr(base.Capture, "_fail", lambda self, problem: setattr(self.graph, "state", "captured"))


def replay_after_close(patch):
    patch.setattr(base.BaseGraph, "_ready", lambda self: None)


def no_launches(patch):
    patch.setattr(CpuGraph, "launches", property(lambda self: 0))


def no_bytes(patch):
    patch.setattr(CpuRuntime, "memory", lambda self: MemoryFigures(0, 0))


def tables_without_sentinel(patch):
    class Builder:
        def build(self, cu_seqlens, tokens, chunk_size=64):
            made = gs.metadata.build_tables(cu_seqlens, tokens, chunk_size)
            made.chunk_indices.clamp_(min=0)
            return made

    patch.setattr(CpuRuntime, "metadata_builder", lambda self: Builder())


def tables_cached_by_identity(patch):
    class Builder:
        cache = {}  # noqa: RUF012

        def build(self, cu_seqlens, tokens, chunk_size=64):
            key = id(cu_seqlens)
            return self.cache.setdefault(key, gs.metadata.build_tables(cu_seqlens, tokens, chunk_size))

    builder = Builder()
    patch.setattr(CpuRuntime, "metadata_builder", lambda self: builder)


def tails_stay(patch):
    def write(self, pairs):
        for slot, value in pairs:
            slot.tensor.narrow(slot.dim, 0, value.shape[slot.dim]).copy_(value)

    patch.setattr(Arena, "_write", write)


def sealed_arenas_grow(patch):
    patch.setattr(Arena, "seal", lambda self: None)


SPOILT = [
    (replay_nothing, "test_a_replay_writes_what_eager_writes", {"name": "forward"}),
    (replay_all_but_the_last, "test_a_replay_writes_what_eager_writes", {"name": "optimizer"}),
    (results_in_new_memory, "test_a_replay_writes_into_the_same_memory", {}),
    (poison_nothing, "test_a_replay_that_does_nothing_fails", {"monkeypatch": pytest.MonkeyPatch()}),
    (keep_what_the_capture_wrote, "test_a_capture_has_no_effect_until_it_is_replayed", {}),
    (keep_what_the_capture_wrote, "test_a_failed_capture_leaves_nothing", {"name": "a host read"}),
    (keep_what_the_capture_drew, "test_warm_up_and_capture_leave_the_generators_as_they_were", {}),
    (keep_what_the_capture_drew, "test_a_failed_capture_leaves_nothing", {"name": "an interrupt"}),
    (draw_the_same_numbers_again, "test_replays_draw_what_eager_would_have_drawn_next", {}),
    (no_look_at_what_died, "test_an_input_that_died_is_refused", {}),
    (no_look_at_what_died, "test_a_new_tensor_at_the_old_address_is_not_taken_for_it", {}),
    (no_look_at_what_was_replaced, "test_a_storage_that_was_replaced_is_refused", {"how": ".data", "kept": True}),
    (keep_inputs_alive, "test_the_graph_does_not_keep_its_inputs_alive", {}),
    (several_captures_at_once, "test_a_capture_inside_a_capture_is_refused_with_the_place_of_the_first", {}),
    (several_captures_at_once, "test_a_capture_from_another_thread_is_refused", {}),
    (several_captures_at_once, "test_a_replay_during_a_capture_is_refused", {}),
    (escapes_pass, "test_a_broken_rule_is_named_with_its_line", {"name": "an escape"}),
    (rules_off, "test_a_broken_rule_is_named_with_its_line", {"name": "nonzero"}),
    (rules_off, "test_a_broken_rule_is_named_with_its_line", {"name": "host data"}),
    (swallowed_errors_pass, "test_an_error_that_the_body_swallows_fails_the_capture", {}),
    (collector_left_off, "test_a_failed_capture_leaves_nothing", {"name": "a seed"}),
    (failed_graph_stays_open, "test_a_failed_capture_leaves_nothing", {"name": "an operator's error"}),
    (replay_after_close, "test_nothing_is_replayed_after_close", {}),
    (no_launches, "test_a_graph_tells_its_launches_and_bytes", {}),
    (no_bytes, "test_memory_counts_live_tensors", {}),
    (tables_without_sentinel, "test_unused_slots_hold_the_sentinel", {}),
    (tables_without_sentinel, "test_replayed_tables_equal_those_of_a_host", {"bucket": BUCKET, "dtype": torch.int32}),
    (tables_cached_by_identity, "test_tables_follow_the_contents_not_the_identity", {}),
    (tails_stay, "test_what_a_smaller_batch_leaves_free_is_padding", {"pad": 0.0, "dirty": False}),
    (tails_stay, "test_boundaries_are_continued_by_empty_sequences", {"dtype": torch.int32}),
    (sealed_arenas_grow, "test_a_sealed_arena_does_not_grow", {}),
]


@pytest.mark.parametrize(
    ("spoil", "test", "arguments"), SPOILT, ids=[f"{spoil.__name__}-{test}" for spoil, test, _ in SPOILT]
)
def test_a_spoilt_runtime_fails(monkeypatch, spoil, test, arguments):
    run = getattr(ContractSuite(), test)
    run(CpuRuntime(), **arguments)  # as it should be, it passes
    spoil(monkeypatch)
    try:
        with pytest.raises(FAILS):
            run(CpuRuntime(), **arguments)
    finally:
        monkeypatch.undo()
        gc.enable()
        for argument in arguments.values():
            if isinstance(argument, pytest.MonkeyPatch):
                argument.undo()
