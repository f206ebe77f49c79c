"""States go in and out: prefill in pieces, decoding token by token, values and cache objects."""

from __future__ import annotations

import pytest
import torch
from layer_cases import (
    CASES,
    HIDDEN,
    assert_close,
    boundaries,
    make_layer,
    randn,
    random_state,
    run,
    tensors,
    with_tensors,
)

from graphsafe.errors import ArgumentError, GraphSafeError
from graphsafe_kernels.layers import LayerState
from graphsafe_kernels.layers.state import read_state

each_layer = pytest.mark.parametrize("case", CASES)


class DictCache:
    """The part of flash-linear-attention's cache that a layer uses."""

    def __init__(self, layers=0):
        self.states = [{"recurrent_state": None, "conv_state": None} for _ in range(layers)]
        self.tokens = 0

    def __len__(self):
        return len(self.states)

    def __getitem__(self, layer_idx):
        return self.states[layer_idx]

    def update(self, recurrent_state=None, attn_state=None, conv_state=None, ffn_state=None, layer_idx=0, offset=1,
               cache_kwargs=None):
        while len(self.states) <= layer_idx:
            self.states.append({"recurrent_state": None, "conv_state": None})
        self.states[layer_idx] = {"recurrent_state": recurrent_state, "conv_state": conv_state}
        self.tokens += offset
        return self.states[layer_idx]


@each_layer
@pytest.mark.parametrize("use_graph", [False, True])
def test_two_halves_with_the_state_handed_on_equal_one_call(case, use_graph):
    """Prefill in pieces: outputs, last state, and the gradients through the state that was handed on."""
    layer = make_layer(case)
    first, second = [70, 2, 0, 5], [3, 66, 4, 0]
    x = [randn(1, sum(lengths), HIDDEN, seed=i) for i, lengths in enumerate((first, second))]
    dy = [randn(*t.shape, seed=5 + i) for i, t in enumerate(x)]
    start, dlast = random_state(layer, 4), random_state(layer, 4, 20)
    order, at = [], [0, 0]
    for lengths in zip(first, second, strict=True):
        for half in (0, 1):
            order += [(0 if half == 0 else sum(first)) + at[half] + i for i in range(lengths[half])]
            at[half] += lengths[half]
    whole = run(layer, torch.cat(x, 1)[:, order], torch.cat(dy, 1)[:, order], start, dlast,
                cu_seqlens=boundaries([a + b for a, b in zip(first, second, strict=True)]))

    leaves = [t.requires_grad_() for t in x]
    given = with_tensors(start, [t.requires_grad_() for t in tensors(start)])
    y0, _, middle = layer(leaves[0], past_key_values=given, use_cache=True, cu_seqlens=boundaries(first),
                          use_graph=use_graph)
    y1, _, last = layer(leaves[1], past_key_values=middle, use_cache=True, cu_seqlens=boundaries(second),
                        use_graph=use_graph)
    inputs = {"x0": leaves[0], "x1": leaves[1], **{f"state {i}": t for i, t in enumerate(tensors(given))},
              **dict(layer.named_parameters())}
    grads = dict(zip(inputs, torch.autograd.grad([y0, y1, *tensors(last)], list(inputs.values()),
                                                 [*dy, *tensors(dlast)]), strict=True))
    got = {"output": torch.cat([y0, y1], 1)[:, order].detach(),
           **{f"new state {i}": t.detach() for i, t in enumerate(tensors(last))},
           "gradient of x": torch.cat([grads.pop("x0"), grads.pop("x1")], 1)[:, order],
           **{f"gradient of {name}": g for name, g in grads.items()}}
    assert_close(got, whole)


@each_layer
@pytest.mark.parametrize("kind", ["value", "cache"])
def test_decoding_token_by_token_equals_one_call(case, kind):
    """Inference switches to the recurrent operator for up to 64 tokens; the numbers stay."""
    layer = make_layer(case).eval()
    x = randn(3, 80, HIDDEN)
    with torch.no_grad():
        whole, _, last = layer(x, use_cache=True)
        cache = None if kind == "value" else DictCache()
        outputs = []
        for piece in x.split([70, *[1] * 7, 3], 1):
            y, _, returned = layer(piece, past_key_values=cache, use_cache=True)
            assert (returned is cache) == (kind == "cache")
            cache = returned
            outputs.append(y)
    if kind == "cache":
        assert cache.tokens == 80
        channels = [t.shape[1] for t in cache[0]["conv_state"] or ()]
        assert channels == ([layer.key_dim, layer.key_dim, layer.value_dim] if layer.use_short_conv else [])
        cache = read_state(cache, 0, use_graph=False)
    assert_close({"output": torch.cat(outputs, 1), **{str(i): t for i, t in enumerate(tensors(cache))}},
                 {"output": whole, **{str(i): t for i, t in enumerate(tensors(last))}})


@each_layer
def test_packed_decoding_with_padding_equals_the_chunk_operator(case):
    layer = make_layer(case).eval()
    x, cu, state = randn(1, 40, HIDDEN), boundaries([3, 0, 1, 20]), random_state(layer, 4)
    x[:, 24:] = float("nan")
    with torch.no_grad():
        short, _, new = layer(x, past_key_values=state, use_cache=True, cu_seqlens=cu)
        graph, _, new2 = layer(x, past_key_values=state, use_cache=True, cu_seqlens=cu, use_graph=True)
    assert torch.count_nonzero(short[:, 24:]) == 0
    assert_close({"output": short, **{str(i): t for i, t in enumerate(tensors(new))}},
                 {"output": graph, **{str(i): t for i, t in enumerate(tensors(new2))}})


@each_layer
def test_recurrent_mode_serves_long_inference(case):
    layer = make_layer(case).eval()
    recurrent = make_layer(case, mode="fused_recurrent").eval()
    x = randn(2, 100, HIDDEN)
    with torch.no_grad():
        assert_close({"output": recurrent(x)[0]}, {"output": layer(x)[0]})


def test_masked_decoding_with_a_cache_equals_sequences_alone():
    """Left-padded prompts of two lengths, then single tokens under a mask that covers the cached tokens too."""
    layer = make_layer("gdn").eval()
    x = randn(2, 9, HIDDEN)
    mask = torch.ones(2, 9, dtype=torch.int64)
    mask[1, :4] = 0
    cache = DictCache()
    with torch.no_grad():
        outputs = [layer(x[:, :6], attention_mask=mask[:, :6], past_key_values=cache, use_cache=True)[0]]
        for t in range(6, 9):
            outputs.append(layer(x[:, t : t + 1], attention_mask=mask[:, : t + 1], past_key_values=cache,
                                 use_cache=True)[0])
        got = torch.cat(outputs, 1)
        assert_close({"0": got[:1], "1": got[1:, 4:]}, {"0": layer(x[:1])[0], "1": layer(x[1:, 4:])[0]})
    assert torch.count_nonzero(got[1, :4]) == 0


def test_the_third_value_is_the_state_only_when_asked_for():
    layer = make_layer("gdn").eval()
    x, state, cache = randn(2, 3, HIDDEN), random_state(layer, 2), DictCache()
    with torch.no_grad():
        assert layer(x)[2] is None
        assert layer(x, past_key_values=state)[2] is None
        assert layer(x, use_cache=None)[2] is None
        assert isinstance(layer(x, use_cache=True)[2], LayerState)
        assert layer(x, past_key_values=cache)[2] is cache
    assert len(cache) == 0, "a cache is written only with use_cache=True"


@each_layer
def test_a_zero_state_is_no_state(case):
    layer = make_layer(case)
    x, dy, cu = randn(1, 9, HIDDEN), randn(1, 9, HIDDEN, seed=1), boundaries([4, 5])
    zero = layer.zero_state(2)
    got, want = run(layer, x, dy, zero, cu_seqlens=cu), run(layer, x, dy, cu_seqlens=cu)
    assert_close({k: got[k] for k in want}, want)
    assert [t.shape for t in tensors(zero)] == [want[f"new state {i}"].shape for i in range(len(tensors(zero)))]
    assert [t.dtype for t in tensors(zero)] == [want[f"new state {i}"].dtype for i in range(len(tensors(zero)))]


def test_states_are_values():
    """Nothing is updated in place: the state that was passed and the one returned share no memory."""
    layer = make_layer("gdn").eval()
    state = random_state(layer, 2)
    before = [t.clone() for t in tensors(state)]
    with torch.no_grad():
        _, _, new = layer(randn(2, 1, HIDDEN), past_key_values=state, use_cache=True)
    assert all(torch.equal(a, b) for a, b in zip(before, tensors(state), strict=True))
    old = {t.untyped_storage().data_ptr() for t in tensors(state)}
    assert all(t.untyped_storage().data_ptr() not in old for t in tensors(new))


def test_a_cache_without_this_layers_state_starts_from_zero():
    layer = make_layer("gdn", layer_idx=1).eval()
    x, cache = randn(1, 3, HIDDEN), DictCache(layers=2)
    with torch.no_grad():
        got = layer(x, past_key_values=cache, use_cache=True)[0]
        assert torch.equal(got, layer(x)[0])
    assert cache[0]["recurrent_state"] is None
    assert cache[1]["recurrent_state"].shape == (1, 2, 6, 4)


def test_a_cache_needs_layer_idx():
    layer = make_layer("gdn", layer_idx=None).eval()
    with torch.no_grad(), pytest.raises(ArgumentError, match="layer_idx"):
        layer(randn(1, 3, HIDDEN), past_key_values=DictCache(), use_cache=True)


def test_a_state_without_convolution_states_is_refused_where_they_are_needed():
    layer = make_layer("gdn")
    state = LayerState(layer.zero_state(1).recurrent_state, None)
    with pytest.raises(GraphSafeError, match="conv_state"):
        layer(randn(1, 3, HIDDEN), past_key_values=state)


def test_a_state_of_another_number_of_sequences_is_refused():
    layer = make_layer("gdn")
    with pytest.raises(ArgumentError, match="initial_state"):
        layer(randn(1, 3, HIDDEN), past_key_values=layer.zero_state(2))
