"""The short convolution against autograd of a loop over tokens, and the contract around it."""

from __future__ import annotations

import warnings
from itertools import accumulate

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from graphsafe.errors import ArgumentError, GraphSafeError
from graphsafe.metadata import build_tables
from graphsafe_kernels.backend import reference_only
from graphsafe_kernels.conv import causal_conv1d

F64 = torch.float64
NAN = float("nan")


@pytest.fixture(scope="module", autouse=True)
def _reference():
    """Whatever other tests made the process prefer."""
    with reference_only():
        yield


def loop(x, weight, bias, residual, initial_state, activation, lengths):
    """Section 3 of the mathematics, token by token: x [T, D] -> y [T, D], final state [N, D, W]."""
    taps, start, outputs, states = weight.shape[1], 0, [], []
    for n, length in enumerate(lengths):
        before = torch.zeros(taps, x.shape[1], dtype=x.dtype) if initial_state is None else initial_state[n].T
        history = torch.cat([before, x[start : start + length]])
        for t in range(length):
            z = sum(weight[:, j] * history[t + 1 + j] for j in range(taps))
            z = z if bias is None else z + bias
            y = z * torch.sigmoid(z) if activation else z
            outputs.append(y if residual is None else y + residual[start + t])
        states.append(history[length:].T)
        start += length
    return torch.stack(outputs) if outputs else x[:0], torch.stack(states)


def boundaries(lengths, dtype=torch.int32):
    return torch.tensor([0, *accumulate(lengths)], dtype=dtype)


def make(lengths, taps, seed, width=3, dtype=F64, **present):
    """Operands by name, in the operator's order; an absent one is None."""
    gen = torch.Generator().manual_seed(seed)
    shapes = {"x": (sum(lengths), width), "weight": (width, taps), "bias": (width,),
              "residual": (sum(lengths), width), "initial_state": (len(lengths), width, taps)}
    return {name: torch.randn(shape, generator=gen, dtype=F64).to(dtype) if present.get(name, True) else None
            for name, shape in shapes.items()}


def behind(t, rows, value=NAN):
    """t [T, ...] with rows of ``value`` appended, as a packed batch [1, T + rows, ...]."""
    return torch.cat([t, torch.full((rows, *t.shape[1:]), value, dtype=t.dtype)])[None]


def run(operands, grads, **options):
    """Outputs and the gradient of every operand present."""
    leaves = {k: v.detach().requires_grad_() for k, v in operands.items() if v is not None}
    y, state = causal_conv1d(**leaves, output_final_state=True, **options)
    got = torch.autograd.grad((y, state), list(leaves.values()), grads)
    return y, state, dict(zip(leaves, got, strict=True))


def packed(operands, rows, value=NAN):
    """The operands with ``rows`` rows of ``value`` behind the live tokens."""
    return {k: behind(v, rows, value) if v is not None and k in ("x", "residual") else v for k, v in operands.items()}


def assert_close(a, b, name, atol=1e-10):
    assert a.shape == b.shape, name
    assert torch.equal(a.isnan(), torch.zeros_like(a, dtype=torch.bool)), f"NaN in {name}"
    assert a.numel() == 0 or (a - b).abs().max().item() <= atol, name


options = st.fixed_dictionaries(
    {"taps": st.integers(1, 8), "bias": st.booleans(), "residual": st.booleans(), "initial_state": st.booleans(),
     "activation": st.sampled_from([None, "silu", "swish"]), "seed": st.integers(0, 10**6)}
)


@settings(max_examples=150, derandomize=True, deadline=None)
@given(options, st.lists(st.integers(0, 11), min_size=1, max_size=5), st.integers(0, 5),
       st.sampled_from([torch.int32, torch.int64]), st.booleans())
def test_packed_equals_the_loop_with_nan_in_all_padding(option, lengths, padding, index_dtype, use_graph):
    given_ = {k: option[k] for k in ("bias", "residual", "initial_state")}
    operands = make(lengths, option["taps"], option["seed"], **given_)
    leaves = {k: v.detach().requires_grad_() for k, v in operands.items() if v is not None}
    y, state = loop(**(operands | leaves), activation=option["activation"], lengths=lengths)
    gen = torch.Generator().manual_seed(option["seed"] + 1)
    dy, dstate = (torch.randn(t.shape, generator=gen, dtype=F64) for t in (y, state))
    wanted = dict(zip(leaves, torch.autograd.grad((y, state), list(leaves.values()), (dy, dstate), allow_unused=True,
                                                  materialize_grads=True), strict=True))

    live = sum(lengths)
    cu = boundaries(lengths, index_dtype)
    got_y, got_state, got = run(packed(operands, padding), (behind(dy, padding), dstate), cu_seqlens=cu,
                                activation=option["activation"], use_graph=use_graph)
    assert_close(got_y[0, :live], y, "y")
    assert_close(got_state, state, "final_state")
    assert torch.count_nonzero(got_y[0, live:]) == 0
    for name, want in wanted.items():
        if name in ("x", "residual"):
            assert torch.count_nonzero(got[name][0, live:]) == 0, name
            assert_close(got[name][0, :live], want, name)
        else:
            assert_close(got[name], want, name)


@settings(max_examples=40, derandomize=True, deadline=None)
@given(options, st.integers(1, 3), st.integers(0, 9))
def test_dense_equals_packed(option, batch, tokens):
    lengths = [tokens] * batch
    operands = make(lengths, option["taps"], option["seed"], **{k: option[k] for k in ("bias", "initial_state")})
    dense = {k: v.reshape(batch, tokens, 3) if k in ("x", "residual") else v for k, v in operands.items()}
    gen = torch.Generator().manual_seed(option["seed"] + 1)
    dy = torch.randn(batch * tokens, 3, generator=gen, dtype=F64)
    dstate = torch.randn(batch, 3, option["taps"], generator=gen, dtype=F64)
    y, state, got = run(dense, (dy.reshape(batch, tokens, 3), dstate), activation="silu", use_graph=True)
    y2, state2, got2 = run(packed(operands, 0), (dy[None], dstate), activation="silu", cu_seqlens=boundaries(lengths))
    assert torch.equal(y.reshape(-1, 3), y2[0])
    assert torch.equal(state, state2)
    for name, g in got.items():
        assert torch.equal(g.reshape(got2[name].shape), got2[name]), name


@pytest.mark.parametrize("taps", range(2, 9))
@pytest.mark.parametrize("activation", [None, "silu"])
def test_gradients_pass_gradcheck(taps, activation):
    """Numerical differentiation, a second opinion next to the loop."""
    operands = {k: v.requires_grad_() for k, v in make([1, 0, 5], taps, seed=taps, width=2).items()}
    cu = boundaries([1, 0, 5])

    def f(x, weight, bias, residual, state):
        return causal_conv1d(x[None], weight, bias, residual[None], state, True, activation, cu_seqlens=cu)

    assert torch.autograd.gradcheck(f, tuple(operands.values()))


@pytest.mark.parametrize("length", [1, 2, 3])
@pytest.mark.parametrize("with_state", [False, True])
def test_fla_1140_1141_sequences_shorter_than_the_taps(length, with_state):
    """flash-linear-attention 1140, 1141: gradients for sequences shorter than W - 1, with a state gradient."""
    operands = make([length, 4, length], 4, seed=length, initial_state=with_state)
    leaves = {k: v.detach().requires_grad_() for k, v in operands.items() if v is not None}
    y, state = loop(**(operands | leaves), activation=None, lengths=[length, 4, length])
    gen = torch.Generator().manual_seed(7)
    dy, dstate = (torch.randn(t.shape, generator=gen, dtype=F64) for t in (y, state))
    wanted = torch.autograd.grad((y, state), list(leaves.values()), (dy, dstate))
    cu = boundaries([length, 4, length])
    _, got_state, got = run(packed(operands, 0), (dy[None], dstate), cu_seqlens=cu)
    assert_close(got_state, state, "final_state")
    for (name, g), want in zip(got.items(), wanted, strict=True):
        assert_close(g.reshape(want.shape), want, name)


def test_tokenspeed_969_padding_writes_no_state():
    """tokenspeed 969: in a bucket above the live total, every state equals the unpadded run's, bit for bit."""
    lengths = [5, 2, 9]
    operands = make(lengths, 4, seed=969)
    cu = boundaries([*lengths, 0, 0, 0])
    padded = packed(operands, 13)
    padded["initial_state"] = torch.cat([operands["initial_state"], torch.zeros(3, 3, 4, dtype=F64)])
    _, state = causal_conv1d(**padded, output_final_state=True, cu_seqlens=cu, use_graph=True, max_num_seqs=6)
    _, alone = causal_conv1d(**packed(operands, 0), output_final_state=True, cu_seqlens=boundaries(lengths))
    assert torch.equal(state[:3], alone)
    assert torch.count_nonzero(state[3:]) == 0


@pytest.mark.parametrize("bad", [NAN, float("inf")])
def test_sequences_do_not_influence_each_other(bad):
    """A sequence full of NaN leaves its neighbours' outputs, states and gradients as they were, bit for bit."""
    lengths, hit = [4, 3, 6], slice(4, 7)
    operands = make(lengths, 4, seed=11)
    cu = boundaries(lengths)
    dy, dstate = torch.ones(1, 13, 3, dtype=F64), torch.ones(3, 3, 4, dtype=F64)
    clean = run(packed(operands, 0), (dy, dstate), cu_seqlens=cu, activation="silu")
    dirty_operands = {k: v.clone() for k, v in operands.items()}
    dirty_operands["x"][hit] = bad
    dirty_operands["residual"][hit] = bad
    dirty_operands["initial_state"][1] = bad
    dirty_dy = dy.clone()
    dirty_dy[0, hit] = bad
    dirty_dstate = dstate.clone()
    dirty_dstate[1] = bad
    dirty = run(packed(dirty_operands, 0), (dirty_dy, dirty_dstate), cu_seqlens=cu, activation="silu")
    others = [*range(4), *range(7, 13)]
    assert torch.equal(clean[0][0, others], dirty[0][0, others])
    assert torch.equal(clean[1][[0, 2]], dirty[1][[0, 2]])
    for name in ("x", "residual"):
        assert torch.equal(clean[2][name][0, others], dirty[2][name][0, others]), name
    assert torch.equal(clean[2]["initial_state"][[0, 2]], dirty[2]["initial_state"][[0, 2]])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("live", [1, 5, 37, 200])
@pytest.mark.parametrize("width", [1, 5])
def test_results_have_the_same_bits_in_every_bucket(live, width, dtype):
    """Live rows, states and above all dweight and dbias: no bit depends on how much padding follows."""
    lengths = [live // 3, 0, live - live // 3]
    operands = make(lengths, 4, seed=live, width=width, dtype=dtype)
    gen = torch.Generator().manual_seed(live)
    dy = torch.randn(live, width, generator=gen).to(dtype)
    dstate = torch.randn(3, width, 4, generator=gen).to(dtype)
    first = None
    for padding in (0, 1, 3, 64, 211, 1000):
        y, state, got = run(packed(operands, padding), (behind(dy, padding), dstate), activation="silu",
                            cu_seqlens=boundaries(lengths))
        got["x"], got["residual"] = got["x"][:, :live], got["residual"][:, :live]
        result = {"y": y[:, :live], "state": state, **got}
        first = first or result
        for name, t in result.items():
            assert torch.equal(t, first[name]), f"{name} with {padding} rows of padding"


def test_strided_input_is_taken_as_it_is():
    """Slices of one fused projection give the bits of contiguous copies, forward and backward."""
    gen = torch.Generator().manual_seed(3)
    fused = torch.randn(2, 9, 12, generator=gen, dtype=F64, requires_grad=True)
    weight = torch.randn(4, 3, generator=gen, dtype=F64)
    middle = fused[:, :, 4:8]
    assert not middle.is_contiguous()
    y, _ = causal_conv1d(middle, weight, activation="silu")
    copied = middle.detach().contiguous().requires_grad_()
    y2, _ = causal_conv1d(copied, weight, activation="silu")
    dy = torch.randn(9, 2, 4, generator=gen, dtype=F64).transpose(0, 1)
    (g,), (g2,) = torch.autograd.grad(y, fused, dy), torch.autograd.grad(y2, copied, dy.contiguous())
    assert torch.equal(y, y2)
    assert torch.equal(g[:, :, 4:8], g2)
    assert torch.count_nonzero(g[:, :, :4]) == torch.count_nonzero(g[:, :, 8:]) == 0


def test_trailing_dimensions_are_channels():
    gen = torch.Generator().manual_seed(4)
    x, weight = torch.randn(1, 7, 2, 3, generator=gen), torch.randn(6, 4, generator=gen)
    y, state = causal_conv1d(x, weight, residual=x, output_final_state=True)
    y2, state2 = causal_conv1d(x.flatten(2), weight, residual=x.flatten(2), output_final_state=True)
    assert y.shape == x.shape
    assert torch.equal(y.flatten(2), y2)
    assert torch.equal(state, state2)


def test_two_halves_with_the_state_handed_on_equal_one_call():
    operands = make([9, 2], 4, seed=21, residual=False)
    whole, state = causal_conv1d(**packed(operands, 0), output_final_state=True, cu_seqlens=boundaries([9, 2]))
    x = operands.pop("x")
    _, handed = causal_conv1d(x[[0, 1, 2, 3, 9]][None], **operands, output_final_state=True,
                              cu_seqlens=boundaries([4, 1]))
    second, last = causal_conv1d(x[[4, 5, 6, 7, 8, 10]][None], **(operands | {"initial_state": handed}),
                                 output_final_state=True, cu_seqlens=boundaries([5, 1]))
    assert torch.equal(second[0], whole[0, [4, 5, 6, 7, 8, 10]])
    assert torch.equal(last, state)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
def test_narrow_dtypes_are_within_tolerance_and_keep_their_dtype(dtype):
    operands = make([40, 3, 21], 4, seed=5, dtype=dtype)
    dy, dstate = torch.ones(1, 64, 3), torch.ones(3, 3, 4)
    y, state, got = run(packed(operands, 0), (dy.to(dtype), dstate.to(dtype)), activation="silu",
                        cu_seqlens=boundaries([40, 3, 21]))
    wide = {k: v.to(F64) for k, v in operands.items()}
    y64, state64, want = run(packed(wide, 0), (dy.to(F64), dstate.to(F64)), activation="silu",
                             cu_seqlens=boundaries([40, 3, 21]))
    tolerance = 1e-4 if dtype == torch.float32 else 5e-3
    for name, t, w in [("y", y, y64), ("state", state, state64), *((k, got[k], want[k]) for k in got)]:
        assert t.dtype == dtype, name
        assert (t.to(F64) - w).square().mean().sqrt() <= tolerance * w.square().mean().sqrt(), name


def test_only_the_state_may_have_a_gradient():
    operands = make([3, 6], 4, seed=8)
    leaves = {k: v.requires_grad_() for k, v in packed(operands, 0).items()}
    _, state = causal_conv1d(**leaves, output_final_state=True, activation="silu", cu_seqlens=boundaries([3, 6]))
    grads = torch.autograd.grad(state.sum(), list(leaves.values()), allow_unused=True, materialize_grads=True)
    for name, g in zip(leaves, grads, strict=True):
        if name in ("weight", "bias", "residual"):
            assert torch.count_nonzero(g) == 0, name
    assert grads[0].sum() == 7 * 3
    assert grads[4].sum() == 1 * 3


def test_boundaries_written_to_before_the_backward_are_noticed():
    operands = packed(make([3, 4], 4, seed=1), 0)
    operands["x"].requires_grad_()
    cu = boundaries([3, 4])
    y, _ = causal_conv1d(**operands, cu_seqlens=cu)
    cu.copy_(boundaries([4, 3]))
    with pytest.raises(GraphSafeError, match="causal_conv1d") as caught:
        y.sum().backward()
    assert caught.value.rule.name == "metadata-changed"


def test_second_order_gradients_are_refused():
    x = torch.ones(1, 4, 2, requires_grad=True)
    y, _ = causal_conv1d(x, torch.ones(2, 3), activation="silu")
    (g,) = torch.autograd.grad(y.sum(), x, create_graph=True)
    with pytest.raises(GraphSafeError, match="causal_conv1d") as caught:
        g.sum().backward()
    assert caught.value.rule.name == "unsupported"


def test_tables_of_the_bucket_change_no_bit():
    lengths = [5, 0, 30]
    operands = packed(make(lengths, 4, seed=2), 29)
    cu = boundaries(lengths)
    tables = build_tables(cu, 64, 16)
    y, _ = causal_conv1d(**operands, cu_seqlens=cu, use_graph=True, max_num_seqs=3, chunk_size=16,
                         chunk_indices=tables.chunk_indices, chunk_offsets=tables.chunk_offsets)
    y2, _ = causal_conv1d(**operands, cu_seqlens=cu)
    assert torch.equal(y, y2)


def test_no_host_read_and_no_host_data():
    """On the meta device a host read or a data-dependent shape raises; checks and computation run through."""
    leaves = {k: v.to("meta").requires_grad_() for k, v in packed(make([3, 4], 4, seed=1), 5).items()}
    cu = torch.empty(3, dtype=torch.int32, device="meta")
    y, state = causal_conv1d(**leaves, output_final_state=True, activation="silu", cu_seqlens=cu, use_graph=True)
    torch.autograd.grad((y.sum(), state.sum()), list(leaves.values()))


BAD = [
    ("argument", "x has shape", {"x": torch.zeros(4, 2)}),
    ("argument", "x has shape", {"x": torch.zeros(1, 4, 3)}),
    ("argument", "x is int64", {"x": torch.zeros(1, 4, 2, dtype=torch.int64)}),
    ("argument", "weight is float32", {"weight": torch.zeros(2, 1, 3)}),
    ("argument", "at least one channel", {"x": torch.zeros(1, 4, 0), "weight": torch.zeros(0, 3)}),
    ("argument", "bias", {"bias": torch.zeros(3)}),
    ("argument", "residual", {"residual": torch.zeros(1, 5, 2)}),
    ("argument", "initial_state", {"initial_state": torch.zeros(2, 2, 3)}),
    ("argument", "activation is 'gelu'", {"activation": "gelu"}),
    ("argument", "batch of 2", {"x": torch.zeros(2, 4, 2), "cu_seqlens": boundaries([4, 4])}),
    ("argument", "cu_seqlens", {"cu_seqlens": torch.zeros(3)}),
    ("tables", "max_num_seqs is 5", {"cu_seqlens": boundaries([4]), "max_num_seqs": 5}),
    ("tables", "max_num_seqs", {"max_num_seqs": 5}),
    ("tables", "chunk_indices", {"chunk_indices": torch.zeros(1, 2, dtype=torch.int32)}),
    ("tables", "chunk_offsets is missing", {"cu_seqlens": boundaries([4]),
                                            "chunk_indices": torch.zeros(1, 2, dtype=torch.int32)}),
    ("tables", "chunk_indices", {"cu_seqlens": boundaries([4]), "chunk_indices": torch.zeros(9, 2, dtype=torch.int32),
                                 "chunk_offsets": torch.zeros(2, dtype=torch.int32)}),
    ("unsupported", "without weight", {"weight": None}),
    ("unsupported", "backend='cuda'", {"backend": "cuda"}),
    ("unsupported", "backend='mix'", {"backend": "mix"}),
    ("unsupported", "cu_seqlens_cpu", {"cu_seqlens": boundaries([4]), "cu_seqlens_cpu": boundaries([4])}),
    ("unsupported", "cp_context", {"cp_context": object()}),
    ("unsupported", "seq_idx", {"seq_idx": torch.zeros(4)}),
]


@pytest.mark.parametrize(("rule", "text", "change"), BAD, ids=[f"{i}-{b[1]}" for i, b in enumerate(BAD)])
def test_bad_arguments_are_refused_by_name(rule, text, change):
    arguments = {"x": torch.zeros(1, 4, 2), "weight": torch.zeros(2, 3)} | change
    with pytest.raises(GraphSafeError, match=text) as caught:
        causal_conv1d(**arguments)
    assert caught.value.rule.name == rule
    assert isinstance(caught.value, ArgumentError) == (rule == "argument")
    assert caught.value.where is not None
    assert caught.value.where.file == __file__


def test_no_warning_is_left_to_the_caller():
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        run(packed(make([2, 3], 4, seed=9), 3), (torch.ones(1, 8, 3, dtype=F64), torch.ones(2, 3, 4, dtype=F64)),
            cu_seqlens=boundaries([2, 3]))
