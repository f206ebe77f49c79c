"""Faults that users reported of operators and layers, on every runtime: what serves there is held against the fp64
reference on the host, in a graph.

The same reports have closer tests of the reference and of the kernels; ``README.md`` beside this file lists them.
"""

from __future__ import annotations

import copy
import math

import pytest
import torch

import graphsafe as gs
from graphsafe.testing.layouts import boundaries
from graphsafe.testing.suite.checks import captured, data
from graphsafe.verify import check_padding
from graphsafe_kernels.backend import reference_only
from graphsafe_kernels.conv import causal_conv1d
from graphsafe_kernels.gdn import chunk_gated_delta_rule
from graphsafe_kernels.kda import chunk_kda
from graphsafe_kernels.layers import GatedDeltaNet, KimiDeltaAttention

RULES = {"gdn": chunk_gated_delta_rule, "kda": chunk_kda}
LAYERS = {"gdn": GatedDeltaNet, "kda": KimiDeltaAttention}
HEADS, VALUE_HEADS, WIDTH = 1, 2, 64
BOUND = 5e-3


def operands(rule, tokens, *, seed=0, decay=1.0):
    """q, k, v, g, beta on the host in fp32; ``decay`` scales the log decay."""
    q, k, v, g, beta = (
        torch.randn(1, tokens, heads, *width, generator=torch.Generator().manual_seed(10 * seed + i))
        for i, (heads, width) in enumerate(
            [(HEADS, (WIDTH,)), (HEADS, (WIDTH,)), (VALUE_HEADS, (WIDTH,)),
             (VALUE_HEADS, (WIDTH,) if rule == "kda" else ()), (VALUE_HEADS, ())]
        )
    )  # fmt: skip
    unit = torch.nn.functional.normalize
    return [unit(q, dim=-1), unit(k, dim=-1), v, -g.abs() * decay, beta.sigmoid()]


def reference(function, given, lengths, **options):
    """Results and gradients of the fp64 reference on the host; upstream gradients are ones."""
    leaves = [t.double().requires_grad_() for t in given]
    wide = {k: v.double() if torch.is_tensor(v) and v.is_floating_point() else v for k, v in options.items()}
    with reference_only():
        results = [t for t in function(*leaves, cu_seqlens=boundaries(lengths), **wide) if t is not None]
    grads = torch.autograd.grad(sum(t.sum() for t in results), leaves)
    return [t.detach() for t in (*results, *grads)]


def graph_of(runtime, function, given, lengths, *, tokens=None, sequences=None, **options):
    """The same captured on the runtime, in a bucket with NaN behind the live rows; results cut to the batch."""
    total, tokens, sequences = sum(lengths), tokens or sum(lengths), sequences or len(lengths)
    bucket = gs.Bucket(tokens, sequences)
    padded = [torch.nn.functional.pad(t, (0, 0) * (t.dim() - 2) + (0, tokens - total), value=math.nan)
              if t.dim() > 2 and t.shape[:2] == (1, total) else t for t in given]  # fmt: skip
    leaves = [t.to(runtime.device).requires_grad_() for t in padded]
    there = {}
    for name, t in options.items():
        if torch.is_tensor(t) and name == "initial_state":
            t = torch.cat([t, t.new_zeros(sequences - t.shape[0], *t.shape[1:])])
        there[name] = t.to(runtime.device) if torch.is_tensor(t) else t
    cu = boundaries(lengths, device=runtime.device, sequences=sequences)

    def body():
        tables = runtime.tables(bucket).build(cu)
        results = function(
            *leaves, cu_seqlens=cu, chunk_indices=tables.chunk_indices, chunk_offsets=tables.chunk_offsets,
            use_graph=True, max_num_seqs=sequences, **there,
        )  # fmt: skip
        results = [t for t in results if t is not None]
        grads = torch.autograd.grad(results, leaves, [torch.ones_like(t) for t in results])
        return [*(t.detach() for t in results), *grads]

    graph, found = captured(runtime, body)
    graph.replay()
    runtime.synchronize()
    cut = []
    for t in found:
        if t.dim() > 2 and t.shape[:2] == (1, tokens):
            check_padding("a result", t, total)
            t = t[:, :total]
        cut.append(t)
    return cut


def close(got, want, bound=BOUND):
    """Within ``bound`` of the largest element, each."""
    assert len(got) == len(want)
    for place, (a, b) in enumerate(zip(got, want, strict=True)):
        a = a.double().cpu()
        a = a[tuple(slice(0, n) for n in b.shape)]
        assert a.shape == b.shape
        assert a.isfinite().all(), f"result {place} is not finite"
        if b.numel():
            worst = float((a - b).abs().max() / b.abs().max().clamp(min=1e-3))
            assert worst <= bound, f"result {place} is off by {worst:.1e}"


@pytest.mark.parametrize("rule", RULES)
def test_tokenspeed_969_padding_and_unused_sequences_write_no_state_in_a_graph(runtime, rule):
    """tokenspeed 969: padding rows were treated as tokens and wrote a state."""
    lengths = [70, 5, 20]
    given = operands(rule, sum(lengths))
    state = torch.randn(3, VALUE_HEADS, WIDTH, WIDTH, generator=torch.Generator().manual_seed(9))
    options = {"initial_state": state, "output_final_state": True}
    want = reference(RULES[rule], given, lengths, **options)
    got = graph_of(runtime, RULES[rule], given, lengths, tokens=160, sequences=5, **options)
    close(got, want)
    assert not got[1][3:].any(), "an unused sequence has a state"


@pytest.mark.parametrize("with_state", [False, True])
def test_fla_1140_1141_gradients_of_sequences_shorter_than_the_taps(runtime, with_state):
    """fla 1140, 1141: gradients were wrong for sequences shorter than W - 1: W 4, lengths 1, 2, 3."""
    lengths = [1, 2, 3, 1, 5]
    draw = torch.Generator().manual_seed(4)
    x, weight, bias = (torch.randn(*s, generator=draw) for s in ((1, sum(lengths), 16), (16, 4), (16,)))
    options = {"activation": "silu", "output_final_state": True}
    if with_state:
        options["initial_state"] = torch.randn(len(lengths), 16, 4, generator=draw)
    want = reference(causal_conv1d, (x, weight, bias), lengths, **options)
    got = graph_of(runtime, causal_conv1d, (x, weight, bias), lengths, tokens=64, sequences=8, **options)
    close(got, want, 1e-4)


@pytest.mark.parametrize("rule", RULES)
def test_fla_99_strong_decay_is_finite_and_right(runtime, rule):
    """fla 99: NaN under very strong decay, down to -1000 inside a chunk."""
    lengths = [64, 30]
    given = operands(rule, sum(lengths), decay=300.0)
    assert given[3].min() < -500
    close(graph_of(runtime, RULES[rule], given, lengths), reference(RULES[rule], given, lengths))


def test_fla_1107_1294_an_omitted_a_log_is_a_unit_scale(runtime):
    """fla 1107, 1294: omitted A_log meant another scale, or was refused; T 73, H 1, HV 2, K 64, cu [0, 3, 73]."""
    lengths = [3, 70]
    given = operands("kda", sum(lengths))
    zeros = torch.zeros(VALUE_HEADS)
    want = reference(chunk_kda, given, lengths, use_gate_in_kernel=True, A_log=zeros)
    for options in ({}, {"A_log": zeros}):
        close(graph_of(runtime, chunk_kda, given, lengths, use_gate_in_kernel=True, **options), want)


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize(
    "lengths", [[0, 0, 9], [9, 0, 0, 70], [70, 9, 0], [0, 0]], ids=["front", "middle", "end", "all"]
)
def test_flashkda_32_flashinfer_3536_empty_sequences_hand_their_state_on(runtime, rule, lengths):
    """FlashKDA 32, flashinfer 3536: empty sequences broke states."""
    given = operands(rule, sum(lengths))
    state = torch.randn(len(lengths), VALUE_HEADS, WIDTH, WIDTH, generator=torch.Generator().manual_seed(3))
    options = {"initial_state": state, "output_final_state": True}
    got = graph_of(runtime, RULES[rule], given, lengths, tokens=128, sequences=6, **options)
    if sum(lengths):
        close(got, reference(RULES[rule], given, lengths, **options))
    for i, length in enumerate(lengths):
        if length == 0:
            assert torch.equal(got[1][i].cpu(), state[i])


@pytest.fixture
def layer(runtime, kind):
    torch.manual_seed(0)
    return LAYERS[kind](hidden_size=32, num_heads=2, head_dim=16).to(runtime.device)


@pytest.mark.parametrize("kind", LAYERS)
def test_automodel_2147_packed_samples_are_the_samples_alone_in_a_graph(runtime, kind, layer):
    """Automodel 2147: states leaked between packed samples."""
    lengths = [40, 1, 23]
    x = data(runtime, 1, 64, 32)

    def forward(x, cu_seqlens, tables):
        return layer(x, cu_seqlens=cu_seqlens, tables=tables, use_graph=True)[0]

    call = gs.graphed(forward, runtime=runtime, buckets=[gs.Bucket(96, 5)], on_overflow="error")
    packed = call(x, boundaries(lengths, device=runtime.device)).clone()
    begin = 0
    for length in lengths:
        alone = call(x[:, begin : begin + length], boundaries([length], device=runtime.device))
        torch.testing.assert_close(packed[:, begin : begin + length], alone, rtol=1e-3, atol=1e-4)
        begin += length
    assert call.stats.captures == 1


@pytest.mark.parametrize("kind", LAYERS)
def test_transformer_engine_2898_garbage_behind_the_batch_reaches_no_weight(runtime, kind, layer):
    """TransformerEngine 2898: garbage at padded rows reached weight gradients: a full layer, NaN behind the batch."""
    lengths = [40, 13]
    x = data(runtime, 1, 53, 32)
    own = copy.deepcopy(layer)
    own(x, cu_seqlens=boundaries(lengths, device=runtime.device))[0].square().sum().backward()

    bucket = gs.Bucket(96, 4)
    padded = torch.nn.functional.pad(x, (0, 0, 0, 96 - 53), value=math.nan)
    cu = boundaries(lengths, device=runtime.device, sequences=4)
    for p in layer.parameters():
        p.grad = torch.zeros_like(p)

    def body():
        layer.zero_grad(set_to_none=False)
        tables = runtime.tables(bucket).build(cu)
        y = layer(padded, cu_seqlens=cu, tables=tables, use_graph=True)[0]
        y.square().sum().backward()
        return y.detach()

    graph, y = captured(runtime, body)
    graph.replay()
    runtime.synchronize()
    check_padding("y", y, 53)
    for (name, p), q in zip(layer.named_parameters(), own.parameters(), strict=True):
        assert p.grad.isfinite().all(), name
        off = float((p.grad - q.grad).abs().max() / q.grad.abs().max().clamp(min=1e-3))
        assert off <= 1e-2, f"the gradient of {name} is off by {off:.1e}"
