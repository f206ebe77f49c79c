"""A packed batch is its samples, whatever lies behind them and however the batch is described."""

from __future__ import annotations

import pytest
import torch
from layer_cases import (
    CASES,
    HIDDEN,
    assert_close,
    behind,
    boundaries,
    make_layer,
    randn,
    random_state,
    run,
    select,
    tensors,
)

from graphsafe.errors import GraphSafeError

NAN = float("nan")
LENGTHS = [5, 0, 70, 1, 2, 64]
TOKENS = sum(LENGTHS)

each_layer = pytest.mark.parametrize("case", CASES)


def batch(layer, lengths, seed=0):
    """x, dy, state and state gradient of a packed batch."""
    n, t = len(lengths), sum(lengths)
    return (randn(1, t, HIDDEN, seed=seed), randn(1, t, HIDDEN, seed=seed + 1), random_state(layer, n, seed + 2),
            random_state(layer, n, seed + 10))


def without_padding(result, live):
    """The result with the padding rows of output and input gradient, which must be zero, cut off."""
    cut = dict(result)
    for name in ("output", "gradient of x"):
        assert torch.count_nonzero(result[name][:, live:]) == 0, name
        cut[name] = result[name][:, :live]
    return cut


@each_layer
def test_automodel_2147_packed_equals_every_sample_alone(case):
    """Automodel 2147: no state leaks between packed samples; outputs, states and all gradients are the samples' own."""
    layer = make_layer(case)
    x, dy, state, dstate = batch(layer, LENGTHS)
    got = run(layer, x, dy, state, dstate, cu_seqlens=boundaries(LENGTHS))
    alone, start = [], 0
    for n, length in enumerate(LENGTHS):
        rows, one = slice(start, start + length), slice(n, n + 1)
        start += length
        alone.append(run(layer, x[:, rows], dy[:, rows], select(state, one), select(dstate, one)))
    want = {}
    for name in got:
        parts = [a[name] for a in alone]
        if name in ("output", "gradient of x"):
            want[name] = torch.cat(parts, 1)
        else:
            want[name] = torch.cat(parts) if "state" in name else torch.stack(parts).sum(0)
    assert_close(got, want)


@each_layer
def test_transformer_engine_2898_garbage_behind_the_live_tokens_reaches_no_gradient(case):
    """TransformerEngine 2898: NaN in padding, of the input and of the incoming gradient, through the whole layer."""
    layer = make_layer(case)
    x, dy, state, dstate = batch(layer, LENGTHS)
    cu = boundaries(LENGTHS)
    want = run(layer, x, dy, state, dstate, cu_seqlens=cu)
    for fill in (NAN, float("inf"), 1e30):
        got = run(layer, behind(x, 51, fill), behind(dy, 51, fill), state, dstate, cu_seqlens=cu, use_graph=True)
        assert_close(without_padding(got, TOKENS), want, atol=1e-12)


@each_layer
def test_what_padding_holds_changes_no_bit(case):
    layer = make_layer(case)
    x, dy, state, dstate = batch(layer, LENGTHS)
    cu = boundaries(LENGTHS)
    results = [run(layer, behind(x, 30, fill), behind(dy, 30, fill), state, dstate, cu_seqlens=cu, use_graph=graph)
               for fill, graph in ((0.0, True), (NAN, True), (NAN, False))]
    for name, first in results[0].items():
        assert all(torch.equal(first, r[name]) for r in results[1:]), name


@each_layer
def test_tokenspeed_969_unused_sequences_and_padding_write_no_state(case):
    """tokenspeed 969: a bucket with room for more tokens and sequences gives every state of the unpadded run."""
    layer = make_layer(case)
    x, dy, state, dstate = batch(layer, LENGTHS)
    want = run(layer, x, dy, state, dstate, cu_seqlens=boundaries(LENGTHS))
    live = slice(0, len(LENGTHS))
    wide, dwide = random_state(layer, 9, 2), random_state(layer, 9, 10)
    for a, b in ((wide, state), (dwide, dstate)):
        for c, d in zip(tensors(a), tensors(b), strict=True):
            c[live] = d
    got = run(layer, behind(x, 51), behind(dy, 51), wide, dwide, cu_seqlens=boundaries([*LENGTHS, 0, 0, 0]),
              use_graph=True)
    # an unused sequence hands its state through, and the state's gradient back
    assert torch.equal(got["new state 0"][6:], wide.recurrent_state[6:])
    assert torch.equal(got["gradient of state 0"][6:], dwide.recurrent_state[6:])
    got = {k: v[live] if "state" in k else v for k, v in got.items()}
    assert_close(without_padding(got, TOKENS), want)


@each_layer
def test_dense_batch_equals_packed(case):
    layer = make_layer(case)
    x, dy, state, dstate = batch(layer, [70, 70])
    want = run(layer, x, dy, state, dstate, cu_seqlens=boundaries([70, 70]))
    got = run(layer, x.reshape(2, 70, HIDDEN), dy.reshape(2, 70, HIDDEN), state, dstate, use_graph=True)
    for name in ("output", "gradient of x"):
        got[name] = got[name].reshape(1, 140, HIDDEN)
    assert_close(got, want)


@each_layer
def test_no_tokens_at_all(case):
    """A bucket whose sequences are all empty hands every state through and gives zero gradients."""
    layer = make_layer(case)
    x, dy, state, dstate = batch(layer, [0, 0])
    for padding in (0, 3):
        got = run(layer, behind(x, padding), behind(dy, padding), state, dstate, cu_seqlens=boundaries([0, 0]),
                  use_graph=True)
        assert torch.equal(got["new state 0"], state.recurrent_state)
        assert torch.equal(got["gradient of state 0"], dstate.recurrent_state)
        for name, t in got.items():
            if "state" not in name:
                assert torch.count_nonzero(t) == 0, name


@each_layer
@pytest.mark.parametrize("side", ["left", "right", "both"])
def test_attention_mask_equals_packing_by_hand(case, side):
    layer = make_layer(case)
    lengths = [70, 3, 0, 12]
    before = {"left": [10, 77, 80, 68], "right": [0, 0, 0, 0], "both": [5, 40, 3, 68]}[side]
    mask = torch.zeros(4, 80, dtype=torch.int64)
    for row, (first, length) in enumerate(zip(before, lengths, strict=True)):
        mask[row, first : first + length] = 1
    x, dy = randn(4, 80, HIDDEN), randn(4, 80, HIDDEN, seed=1)
    state, dstate = random_state(layer, 4), random_state(layer, 4, 10)
    got = run(layer, x, dy, state, dstate, attention_mask=mask)
    kept = mask.bool()
    want = run(layer, x[kept][None], dy[kept][None], state, dstate, cu_seqlens=boundaries(lengths))
    for name in ("output", "gradient of x"):
        assert torch.count_nonzero(got[name][~kept]) == 0
        got[name] = got[name][kept][None]
    assert_close(got, want)


def test_a_mask_longer_than_the_tokens_describes_them_by_its_end():
    layer = make_layer("gdn").eval()
    x, mask = randn(2, 5, HIDDEN), torch.tensor([[1, 1, 1, 0, 1, 1, 1, 1], [0, 0, 0, 0, 0, 0, 1, 1]])
    with torch.no_grad():
        assert torch.equal(layer(x, attention_mask=mask)[0], layer(x, attention_mask=mask[:, 3:] == 1)[0])


@pytest.mark.parametrize("use_graph", [False, True])
def test_explicit_boundaries_win_over_a_mask(use_graph):
    layer = make_layer("kda")
    x, cu = randn(1, 9, HIDDEN), boundaries([4, 5])
    want = layer(x, cu_seqlens=cu)[0]
    mask = torch.zeros(1, 9, dtype=torch.bool)
    assert torch.equal(layer(x, attention_mask=mask, cu_seqlens=cu, use_graph=use_graph)[0], want)


@each_layer
def test_bf16_layers_run_and_keep_padding_zero(case):
    layer = make_layer(case).to(torch.bfloat16)
    x = behind(randn(1, 20, HIDDEN).to(torch.bfloat16), 12).requires_grad_()
    output, _, state = layer(x, use_cache=True, cu_seqlens=boundaries([7, 13]), use_graph=True)
    assert output.dtype == torch.bfloat16
    assert state.recurrent_state.dtype == torch.float32
    output.sum().backward()
    for t in (output, x.grad):
        assert torch.count_nonzero(t[:, 20:]) == 0
    assert all(torch.isfinite(p.grad).all() for p in layer.parameters())


@each_layer
@pytest.mark.parametrize("packed", [False, True])
def test_second_order_gradients_are_refused_by_name(case, packed):
    """Never a wrong number: not through a weight either, whose own path is made of torch's operators."""
    layer, x = make_layer(case), randn(1, 9, HIDDEN).requires_grad_()
    y = layer(x, **({"cu_seqlens": boundaries([4, 5])} if packed else {}))[0]
    (g,) = torch.autograd.grad(y.square().sum(), x, create_graph=True)
    for of in (x, layer.in_proj.weight):
        with pytest.raises(GraphSafeError, match="second-order") as caught:
            torch.autograd.grad(g.sum(), of, retain_graph=True)
        assert caught.value.rule.name == "unsupported"
