"""Faults that users of such libraries reported, at the level of graphs: one test for each report, named after it.

Reports about operators, layers and kernels are tested where those are; ``README.md`` beside this file lists them all.
"""

from __future__ import annotations

import gc
import itertools
import random
from dataclasses import dataclass

import pytest
import torch
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

import graphsafe as gs
from graphsafe._operators import facts_of, violation
from graphsafe._watch import _HOST_READS
from graphsafe.compare import differences
from graphsafe.explanations import explanations_of
from graphsafe.pricing import operator_price
from graphsafe.rules import rule
from graphsafe.testing.layouts import boundaries, layouts, naive_tables
from graphsafe.testing.suite.checks import captured, clone, data, refused, same
from graphsafe.verify import verify_replay
from graphsafe_kernels.conv import causal_conv1d
from graphsafe_kernels.layers import GatedDeltaNet, KimiDeltaAttention


def tables_of(tables):
    return tables.chunk_indices.tolist(), tables.chunk_offsets.tolist()


def convolution(x, weight, tables, **options):
    return causal_conv1d(
        x, weight, activation="silu", cu_seqlens=tables.cu_seqlens, chunk_indices=tables.chunk_indices,
        chunk_offsets=tables.chunk_offsets, chunk_size=tables.chunk_size, use_graph=True, **options,
    )[0]  # fmt: skip


# Tables.


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64], ids=str)
def test_fla_1274_tables_follow_the_buffer(runtime, dtype):
    """fla 1274: tables were cached by tensor identity, so a replay after copy_ used the old layout."""
    bucket = gs.Bucket(1024, 4)
    first, second = [0, 256, 512, 768, 1024], [0, 100, 400, 1024, 1024]
    cu = torch.tensor(first, dtype=dtype).to(runtime.device)
    x, weight = data(runtime, 1, 1024, 3), data(runtime, 3, 4, seed=1)

    def body():
        tables = runtime.tables(bucket).build(cu)
        return tables.chunk_indices, tables.chunk_offsets, convolution(x, weight, tables)

    graph, (indices, offsets, y) = captured(runtime, body)
    for layout in (first, second, first):
        cu.copy_(torch.tensor(layout, dtype=dtype))
        graph.replay()
        runtime.synchronize()
        lengths = [b - a for a, b in itertools.pairwise(layout)]
        assert (indices.tolist(), offsets.tolist()) == naive_tables(lengths, 1024, 4, 64)
        alone = [causal_conv1d(part, weight, activation="silu")[0] for part in x.split(lengths, 1) if part.shape[1]]
        torch.testing.assert_close(y, torch.cat(alone, 1), rtol=1e-5, atol=1e-6)


def test_flashqla_23_a_recycled_id_brings_no_other_batchs_tables(runtime):
    """FlashQLA 23: a cache keyed by id() gave another batch's tables: 1,000 rounds, tensors freed in between."""
    bucket = gs.Bucket(8 * 511, 8)
    draw = random.Random(23)
    call = gs.graphed(lambda cu_seqlens, tables: (tables.chunk_indices, tables.chunk_offsets), runtime=runtime,
                      buckets=[bucket])  # fmt: skip
    ids = set()
    for i in range(1000):
        lengths = [draw.randrange(512) for _ in range(8)]
        cu = boundaries(lengths, device=runtime.device)
        ids.add(id(cu))
        want = naive_tables(lengths, bucket.tokens, 8, 64)
        indices, offsets = call(cu)
        runtime.synchronize()
        assert (indices.tolist(), offsets.tolist()) == want, f"round {i}, replayed"
        assert tables_of(runtime.tables(bucket).build(cu)) == want, f"round {i}, eager"
        del cu
    assert len(ids) < 1000, "no id was recycled: nothing was shown"
    assert call.stats.captures == 1


def test_aiter_5193_no_cache_that_evicts_holds_a_graphs_tables(runtime):
    """aiter 5193: a device table was evicted from a cache while a graph still read it."""
    bucket = gs.Bucket(512, 8)

    def graph_of(cu):
        return captured(runtime, lambda: tuple(vars(runtime.tables(bucket).build(cu)).values())[1:3])

    first_cu = boundaries([100, 0, 200], device=runtime.device, sequences=8)
    first, result = graph_of(first_cu)
    first.replay()
    want = clone(runtime, result)
    kept = []
    for i, lengths in enumerate(layouts(300, 512, 8, seed=5193)):
        cu = boundaries(lengths, device=runtime.device, sequences=8)
        runtime.tables(bucket).build(cu)
        if i % 20 == 0:
            kept.append((graph_of(cu), lengths))
    gc.collect()
    first.poison()
    first.replay()
    same(runtime, result, want)
    assert tables_of(runtime.tables(bucket).build(first_cu)) == naive_tables([100, 0, 200], 512, 8, 64)
    del kept


def test_aiter_5393_a_workspace_first_made_inside_a_capture_is_refused(runtime):
    """aiter 5393: a workspace first allocated during capture aliased intermediates."""
    x = data(runtime, 16)

    class Lazy(torch.nn.Module):
        workspace = None

        def forward(self, x):
            if self.workspace is None:
                self.workspace = torch.zeros(16, device=x.device)
            return self.workspace.copy_(x) * 2

    def cold():
        lazy = Lazy()
        with runtime.capture() as graph:
            graph.outputs(lazy(x))

    problem = refused("tensor-escapes", cold)
    assert "float32[16]" in problem.what
    assert "workspace" in problem.what
    assert problem.where.function == "forward"
    warm = Lazy()
    graph, y = captured(runtime, lambda: warm(x))  # the warm-up made it, outside
    x.fill_(3.0)
    graph.replay()
    same(runtime, y, x * 2)


def test_sglang_38994_a_replay_does_not_use_the_layout_of_the_warm_up(runtime):
    """sglang 38994: replay reused the tables of the warm-up."""
    weight = data(runtime, 3, 4, seed=1)
    call = gs.graphed(lambda x, cu_seqlens, tables: convolution(x, weight, tables), runtime=runtime,
                      buckets=[gs.Bucket(64, 4, 16)])  # fmt: skip
    call.capture(data(runtime, 1, 64, 3), boundaries([64], device=runtime.device))
    for lengths in ([10, 20, 30], [1, 1, 1, 61], [0, 64]):
        x = data(runtime, 1, sum(lengths), 3, seed=len(lengths))
        cu = boundaries(lengths, device=runtime.device)
        got = clone(runtime, call(x, cu))
        same(runtime, got, call.eager(x, cu))
        alone = [causal_conv1d(part, weight, activation="silu")[0] for part in x.split(lengths, 1) if part.shape[1]]
        torch.testing.assert_close(got, torch.cat(alone, 1), rtol=1e-5, atol=1e-6)
    assert call.stats.captures == 1


# Host reads.


class HostReads(TorchFunctionMode):
    """Counts reads of the device by the host: by function, and by operator."""

    def __init__(self):
        super().__init__()
        self.found = []
        outer = self

        class Operators(TorchDispatchMode):
            def __torch_dispatch__(self, func, types, args=(), kwargs=None):
                broken = violation(facts_of(func), args, kwargs or {})
                if broken is not None:
                    outer.found.append(broken[1])
                return func(*args, **(kwargs or {}))

        self._operators = Operators()

    def __torch_function__(self, func, types, args=(), kwargs=None):
        if func in _HOST_READS:
            self.found.append(_HOST_READS[func])
            with torch._C.DisableTorchFunction(), torch.utils._python_dispatch._disable_current_modes():
                return func(*args, **(kwargs or {}))
        return func(*args, **(kwargs or {}))

    def __enter__(self):
        self._operators.__enter__()
        return super().__enter__()

    def __exit__(self, *problem):
        super().__exit__(*problem)
        self._operators.__exit__(*problem)


def test_the_counter_counts():
    x = torch.ones(3)
    with HostReads() as reads:
        x.tolist()
        x.sum().item()
        x.nonzero()
    assert len(reads.found) == 3


@pytest.mark.parametrize("layer", [GatedDeltaNet, KimiDeltaAttention], ids=lambda cls: cls.__name__)
def test_fla_752_770_vllm_38361_no_layer_reads_the_device(runtime, layer):
    """fla 752, 770, vllm 38361: a device-to-host read per layer. None over 12 layers in graph mode, one eager."""
    torch.manual_seed(0)
    stack = torch.nn.ModuleList(layer(hidden_size=16, num_heads=1, head_dim=16, expand_v=1) for _ in range(12))
    stack.to(runtime.device)
    x = data(runtime, 1, 16, 16).requires_grad_()
    cu = boundaries([8, 0, 5], device=runtime.device, sequences=4)

    def forward(**options):
        y = x
        for one in stack:
            y = y + one(y, cu_seqlens=cu, **options)[0]
        torch.autograd.grad(y.square().mean(), [x, *stack.parameters()])

    forward(use_graph=True)  # the first call of an operator may import or compile
    with HostReads() as reads:
        forward(use_graph=True)
        forward(tables=runtime.tables(gs.Bucket(16, 4)).build(cu), use_graph=True)
    assert reads.found == []
    with HostReads() as reads:
        forward()
    assert len(reads.found) <= 1


def test_megatron_6796_a_capacity_needs_no_host_read(runtime):
    """Megatron-LM 6796: [-1].item() sized an allocation; cu_seqlens of a fixed length whose values change."""
    x = data(runtime, 1, 64, 2)
    cu = boundaries([20, 30], device=runtime.device, sequences=4)

    def sized_by_the_data():
        packed = torch.zeros(1, cu[-1].item(), 2, device=runtime.device)
        return packed + x[:, : packed.shape[1]]

    def capture():
        with runtime.capture() as graph:
            graph.outputs(sized_by_the_data())

    problem = refused("host-read", capture)
    assert (problem.where.file, problem.where.function) == (__file__, "sized_by_the_data")
    assert problem.where.line == sized_by_the_data.__code__.co_firstlineno + 1

    def sized_by_the_bucket():
        live = torch.arange(64, device=runtime.device) < cu[-1]
        return torch.where(live.view(1, -1, 1), x, torch.zeros_like(x))

    graph, y = captured(runtime, sized_by_the_bucket)
    for lengths in ([64], [3, 4, 5], [0]):
        cu.copy_(boundaries(lengths, device=runtime.device, sequences=4))
        graph.replay()
        runtime.synchronize()
        total = sum(lengths)
        same(runtime, y[:, :total], x[:, :total])
        assert not y[:, total:].any()


# Addresses and lifetimes.


@dataclass
class Batch:
    x: torch.Tensor


@pytest.mark.parametrize(
    ("path", "wrap"),
    [
        ("w", lambda t: t), ("w['deep'][0]", lambda t: {"deep": [t]}), ("w.x", Batch),
        ("w['b'].x", lambda t: {"b": Batch(t)}),
    ],
    ids=["itself", "in a dict", "in a dataclass", "in both"],
)  # fmt: skip
@pytest.mark.parametrize("keyword", [False, True], ids=["positional", "keyword"])
def test_vllm_53915_a_rebound_input_is_named(runtime, path, wrap, keyword):
    """vllm 53915: rebinding an input was silent."""

    def body(w):
        (t,) = gs.tree.tensors(w)
        return t * 2

    def use(t):
        return call(w=wrap(t)) if keyword else call(wrap(t))

    call = gs.graphed(body, runtime=runtime, inputs={path: "bound"})
    w = data(runtime, 4)
    same(runtime, use(w), w * 2)
    problem = refused("input-rebound", use, w.clone())
    assert repr(path) in problem.what
    w.fill_(3.0)
    same(runtime, use(w), w * 2)


def test_pytorch_174649_an_input_that_died_is_named_with_its_place(runtime):
    """pytorch 174649: an input died before the replay."""
    held = [data(runtime, 1000)]

    def body():
        return held[0] * 2

    graph, _ = captured(runtime, body)
    graph.replay()
    held.clear()
    gc.collect()
    problem = refused("input-died", graph.replay)
    assert "[1000]" in problem.what
    assert f"{__file__}:{body.__code__.co_firstlineno + 1} in body" in problem.what


# Proof.


def test_b12x_220_the_leftovers_of_an_eager_run_prove_nothing(runtime, monkeypatch):
    """b12x 220: "verified" the leftovers of the eager run. A replay that does nothing fails."""
    call = gs.graphed(lambda x, w: (x @ w).relu(), runtime=runtime)
    x, w = data(runtime, 4, 4), data(runtime, 4, 4, seed=1)
    same(runtime, call(x, w), (x @ w).relu())
    (entry,) = call._entries.values()
    monkeypatch.setattr(entry.graph, "replay", lambda: None)
    assert "16 of 16 elements differ" in refused("replay-differs", call.verify, x, w).what


def test_te_144_no_tolerance_hides_a_wrong_result(runtime):
    """TransformerEngine 144: a tolerance of 0.9 hid wrong results. The smallest possible difference fails."""
    x = data(runtime, 8)
    graph, result = captured(runtime, lambda: x * 2)

    def nearly():
        y = x * 2
        y[7] = torch.nextafter(y[7], torch.full_like(y[7], 9.0))
        return y

    problem = refused("replay-differs", verify_replay, runtime, graph, nearly, result)
    assert "output[7]" in problem.what
    nan = torch.full((2,), float("nan"))
    assert differences(nan, torch.zeros(2), "x")
    assert differences(torch.zeros(2), nan, "x")


def test_pytorch_181723_te_2937_accumulated_gradients_are_the_sum(runtime):
    """pytorch 181723, TransformerEngine 2937: gradients returned by a graph are its static buffers."""
    model = torch.nn.Linear(4, 2).to(runtime.device)
    batches = [{"x": data(runtime, 3, 4, seed=i)} for i in range(2)]

    def loss_fn(model, batch):
        return model(batch["x"]).square().mean()

    want = None
    for batch in batches:
        grads = torch.autograd.grad(loss_fn(model, batch), list(model.parameters()))
        want = grads if want is None else [a + b for a, b in zip(want, grads, strict=True)]

    # one graph for both, through TrainStep
    step = gs.TrainStep(model, loss_fn, torch.optim.SGD(model.parameters(), lr=0.0), runtime=runtime, accumulate=2)
    step(batches)
    same(runtime, [p.grad for p in model.parameters()], list(want))
    step.close()

    # one graph for one micro-batch, replayed twice
    for p in model.parameters():
        p.grad = torch.zeros_like(p)
    x = batches[0]["x"].clone()
    graph, _ = captured(runtime, lambda: loss_fn(model, {"x": x}).backward())
    for batch in batches:
        x.copy_(batch["x"])
        graph.replay()
    same(runtime, [p.grad for p in model.parameters()], list(want))


# Capacity.


def test_sglang_32555_nobody_reads_the_tail_of_a_larger_batch(runtime):
    """sglang 32555: the front of a buffer was refilled, its tail consumed."""
    call = gs.graphed(lambda x, state, cu_seqlens: (x.sum(), state.sum()), runtime=runtime,
                      buckets=[gs.Bucket(64, 4, 16)])  # fmt: skip
    for n, length in ((4, 16), (1, 3), (3, 20), (1, 1)):
        x = torch.ones(1, n * length, 2, device=runtime.device)
        state = torch.ones(n, 3, device=runtime.device)
        tokens, states = call(x, state, boundaries([length] * n, device=runtime.device))
        runtime.synchronize()
        assert (tokens.tolist(), states.tolist()) == (2 * n * length, 3 * n)


def test_imp_1709_a_batch_one_token_too_long_is_counted_or_an_error(runtime):
    """imp 1709: oversize batches ran eager without a word."""
    fits, too_long = (
        (data(runtime, 1, tokens, 2), boundaries([tokens], device=runtime.device)) for tokens in (64, 65)
    )
    counted, strict = (
        gs.graphed(lambda x, cu_seqlens: x * 2, runtime=runtime, buckets=[gs.Bucket(64, 1, 16)], on_overflow=how)
        for how in ("eager", "error")
    )
    for call in (counted, strict):
        same(runtime, call(*fits), fits[0] * 2)
    same(runtime, counted(*too_long), too_long[0] * 2)
    assert counted.stats.as_dict()["overflows"] == {"tokens": 1}
    assert (counted.stats.replays, counted.stats.captures) == (1, 1)
    problem = refused("capacity", strict, *too_long)
    assert isinstance(problem, gs.CapacityError)
    assert "65 tokens in 1 sequences fit none of 64x1 (BT 16)" in problem.what


@pytest.mark.parametrize("operator", ["gdn", "kda"])
def test_vllm_57475_rf_detr_1490_the_price_is_known_before_anything_is_held(runtime, operator):
    """vllm 57475, rf-detr 1490: memory per graph was unknown until it ran out."""
    bucket = gs.Bucket(128, 4, 16)
    price = operator_price(bucket, operator=operator, heads=2, value_heads=4, key_dim=16, value_dim=8)
    runtime.synchronize()
    before = runtime.memory().held
    arena = runtime.arena(bucket)
    for line in price.lines:
        arena.tensor(line.name, line.shape, line.dtype)
    held = runtime.memory().held - before
    rounding = 0 if runtime.device.type == "cpu" else 512 * len(price.lines)
    assert price.bytes == arena.bytes == arena.price().bytes
    assert price.bytes <= held <= price.bytes + rounding

    call = gs.graphed(lambda x, cu_seqlens: x * 2, runtime=runtime, buckets=[bucket])
    (figures,) = call.capture(data(runtime, 1, 64, 32), boundaries([64], device=runtime.device))
    assert figures.arena_bytes == figures.price_bytes == 128 * 32 * 4 + 5 * 4
    arena.close()


@pytest.mark.parametrize(
    ("message", "says"),
    [
        ("aclmdlRICaptureEnd, error code is 107025", "joined"),
        ("The Inner error is reported as above. error code 107030", "capture"),
        ("NPU function error: AclrtSynchronizeStreamWithTimeout, error code is 507011", ""),
    ],
)
def test_vllm_ascend_13792_6002_11514_raw_codes_are_explained(message, says):
    """vllm-ascend 13792, 6002, 11514: users met 107025, 107030 and 507011 without a word on what they mean."""
    found = explanations_of(message)
    assert found, message
    _, explanation = found[0]
    assert str(rule(explanation.rule).category)
    assert says in explanation.meaning
    assert explanation.meaning
    assert explanation.remedy
