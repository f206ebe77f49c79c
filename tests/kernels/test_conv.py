"""The convolution's kernels: values against the fp64 reference, and the graph contract bit for bit."""

from __future__ import annotations

import random
from types import SimpleNamespace

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from graphsafe.errors import GraphSafeError, MetadataError
from graphsafe_kernels import policy as policies
from graphsafe_kernels.conv import causal_conv1d, launch
from graphsafe_kernels.reference import conv as reference
from graphsafe_kernels.tables import build_tables

# relative RMS error allowed against fp64: rounding of the outputs, and of fp32 sums
TOLERANCE = {torch.float32: 2e-6, torch.float16: 1e-3, torch.bfloat16: 5e-3}
NAN = float("nan")


def batch(device, lengths, *, width=8, taps=4, dtype=torch.float32, padding=0, seed=0, dense=False, index=torch.int32):
    """Operands of one call. Every row behind the live total holds NaN, in gradients too."""
    g = torch.Generator().manual_seed(seed)

    def randn(*shape):
        return torch.randn(*shape, generator=g).to(dtype).to(device)

    total = sum(lengths)
    rows, tokens = (len(lengths), lengths[0]) if dense else (1, total + padding)
    b = SimpleNamespace(
        x=randn(rows, tokens, width), weight=randn(width, taps), bias=randn(width), residual=randn(rows, tokens, width),
        initial=randn(len(lengths), width, taps), dy=randn(rows, tokens, width),
        dfinal=randn(len(lengths), width, taps), total=total, cu=None,
    )
    if not dense:
        b.cu = torch.tensor([0, *lengths], dtype=torch.int64).cumsum(0).to(index).to(device)
        for t in (b.x, b.residual, b.dy):
            t[:, total:] = NAN
    return b


def run(b, *, activation="silu", bias=True, residual=True, initial=True, final=True, chunk_size=16, function=None,
        **kw):
    """Outputs and gradients by name; ``function`` replaces the operator by the reference on fp64 operands."""
    operands = {"x": b.x, "weight": b.weight}
    if bias:
        operands["bias"] = b.bias
    if residual:
        operands["residual"] = b.residual
    if initial:
        operands["initial_state"] = b.initial
    dtype = b.x.dtype if function is None else torch.float64
    leaves = {k: (v if v.dtype == dtype else v.to(dtype)).detach().requires_grad_() for k, v in operands.items()}
    if function is None:
        y, state = causal_conv1d(**leaves, output_final_state=final, activation=activation, cu_seqlens=b.cu,
                                 chunk_size=chunk_size, **kw)
    else:
        full = {k: leaves.get(k) for k in ("x", "weight", "bias", "residual", "initial_state")}
        y, state = function(*full.values(), output_final_state=final, activate=activation is not None,
                            cu_seqlens=b.cu, tables=None, chunk_size=chunk_size, use_graph=False)
    outputs, seeds = ([y, state], [b.dy, b.dfinal]) if final else ([y], [b.dy])
    grads = torch.autograd.grad(outputs, list(leaves.values()), [s.to(dtype) for s in seeds])
    return {"y": y.detach(), **({"final_state": state.detach()} if final else {}),
            **{"d" + k: g for k, g in zip(leaves, grads, strict=True)}}


def error(want, got):
    """Relative RMS, infinite where ``got`` holds NaN."""
    want, got = want.double(), got.double()
    if torch.isnan(got).any():
        return float("inf")
    return ((want - got).square().mean().sqrt() / (want.square().mean().sqrt() + 1e-8)).item()


def assert_close(want, got, dtype):
    assert want.keys() == got.keys()
    errors = {k: error(want[k], got[k]) for k in want}
    assert all(e <= TOLERANCE[dtype] for e in errors.values()), errors


def assert_same_bits(a, b, names=None, live=None):
    for k in names or a:
        x, y = a[k], b[k]
        if live is not None and x.dim() == 3 and k in ("y", "dx", "dresidual"):
            x, y = x[:, :live], y[:, :live]
        assert torch.equal(x, y), k


def assert_padding_is_zero(out, total):
    for k in ("y", "dx", "dresidual"):
        if k in out:
            assert (out[k][:, total:] == 0).all(), k


@pytest.mark.parametrize("taps", range(1, 9))
@pytest.mark.parametrize("activation", [None, "silu"])
def test_values_for_every_number_of_taps(device, taps, activation):
    b = batch(device, [0, 1, taps - 1, taps, 35, 0, 19], taps=taps, padding=10, seed=taps)
    got = run(b, activation=activation)
    assert_close(run(b, activation=activation, function=reference.causal_conv1d), got, torch.float32)
    assert_padding_is_zero(got, b.total)


@pytest.mark.parametrize("bias", [False, True], ids=["", "bias"])
@pytest.mark.parametrize("residual", [False, True], ids=["", "residual"])
@pytest.mark.parametrize("states", ["none", "initial", "final", "both"])
def test_values_of_every_option(device, bias, residual, states):
    initial, final = states in ("initial", "both"), states in ("final", "both")
    options = dict(bias=bias, residual=residual, initial=initial, final=final)
    b = batch(device, [3, 0, 34], padding=5, seed=3)
    got = run(b, **options)
    assert_close(run(b, **options, function=reference.causal_conv1d), got, torch.float32)
    assert_padding_is_zero(got, b.total)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("width", [1, 5, 24])
def test_values_of_every_dtype_and_width(device, large, dtype, width):
    lengths = [300, 17, 0, 1000] if large else [35, 9]
    width = width * (50 if large else 1)
    b = batch(device, lengths, width=width, dtype=dtype, padding=40)
    got = run(b)
    assert_close(run(b, function=reference.causal_conv1d), got, dtype)
    assert_padding_is_zero(got, b.total)


@pytest.mark.parametrize("index", [torch.int32, torch.int64], ids=str)
@pytest.mark.parametrize("chunk_size", [4, 64])
def test_values_of_every_table(device, chunk_size, index):
    b = batch(device, [chunk_size, 1, chunk_size + 3], padding=3 * chunk_size, index=index)
    assert_close(run(b, function=reference.causal_conv1d), run(b, chunk_size=chunk_size), torch.float32)


@pytest.mark.parametrize("length", [1, 3, 64, 70])
def test_values_of_a_dense_batch(device, length):
    b = batch(device, [length] * 2, dense=True)
    assert_close(run(b, function=reference.causal_conv1d), run(b), torch.float32)


@pytest.mark.parametrize("length", [1, 2, 3])
def test_sequences_shorter_than_the_taps(device, length):
    """Both states, and a gradient of the final one (reported as fla 1140, 1141)."""
    b = batch(device, [length] * 4, seed=length)
    assert_close(run(b, function=reference.causal_conv1d), run(b), torch.float32)


@pytest.mark.parametrize(
    "lengths", [[0, 0, 9], [9, 0, 0], [9, 0, 0, 20], [0], [0, 0, 0], [0, 5, 0, 5, 0]], ids=str
)
def test_empty_sequences_hand_their_state_through(device, lengths):
    b = batch(device, lengths, padding=7)
    got = run(b)
    assert_close(run(b, function=reference.causal_conv1d), got, torch.float32)
    for n, length in enumerate(lengths):
        if length == 0:
            assert torch.equal(got["final_state"][n], b.initial[n])
            assert torch.equal(got["dinitial_state"][n], b.dfinal[n])
    without = run(b, initial=False)
    assert all((without["final_state"][n] == 0).all() for n, length in enumerate(lengths) if length == 0)


class _Copies(TorchDispatchMode):
    """Collects operators that move data: there are to be none beside the kernels."""

    def __init__(self):
        super().__init__()
        self.seen = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        name = func.overloadpacket.__name__
        if not any(word in name for word in ("empty", "detach", "view", "stride", "alias")):
            self.seen.append(name)
        return func(*args, **(kwargs or {}))


def test_a_slice_of_a_fused_projection_is_read_in_place(device, launches):
    b = batch(device, [20, 9], width=8, padding=3)
    want = run(b)
    fused, other = torch.full((1, 32, 24), NAN, device=device), torch.full((1, 32, 40), NAN, device=device)
    fused[..., 8:16], other[..., 24:32] = b.x, b.residual
    x, residual = fused[..., 8:16].requires_grad_(), other[..., 24:32].requires_grad_()
    tables = build_tables(b.cu, 32, 16)
    with _Copies() as copies:
        y, state = causal_conv1d(x, b.weight, b.bias, residual, b.initial, True, "silu", cu_seqlens=b.cu,
                                 chunk_indices=tables.chunk_indices, chunk_offsets=tables.chunk_offsets,
                                 chunk_size=16)
    assert copies.seen == []
    assert launches[-1] == "conv_forward_kernel"
    assert torch.equal(y, want["y"])
    assert torch.equal(state, want["final_state"])
    strided_dy = torch.full((1, 32, 30), NAN, device=device)
    strided_dy[..., 3:11] = b.dy
    dx, dresidual = torch.autograd.grad([y, state], [x, residual], [strided_dy[..., 3:11], b.dfinal])
    assert torch.equal(dx, want["dx"])
    assert torch.equal(dresidual, want["dresidual"])


def test_strides_that_need_a_copy(device):
    b = batch(device, [33, 9], padding=2)
    want = run(b)
    b.x = b.x.transpose(1, 2).contiguous().transpose(1, 2)
    b.weight, b.bias = b.weight.t().contiguous().t(), b.bias.repeat_interleave(2)[::2]
    assert_same_bits(want, run(b))


def test_a_gradient_of_a_sum(device):
    """The gradient of ``y.sum()`` is one element seen through strides of zero."""
    b = batch(device, [9, 4])
    x = b.x.clone().requires_grad_()
    causal_conv1d(x, b.weight, activation="silu", cu_seqlens=b.cu)[0].sum().backward()
    b.dy = torch.ones_like(b.dy)
    assert torch.equal(x.grad, run(b, bias=False, residual=False, initial=False, final=False)["dx"])


def test_only_the_final_state_is_used(device):
    b = batch(device, [9, 2])
    x = b.x.clone().requires_grad_()
    _, state = causal_conv1d(x, b.weight, output_final_state=True, cu_seqlens=b.cu)
    state.backward(b.dfinal)
    b.dy = torch.zeros_like(b.dy)
    assert torch.equal(x.grad, run(b, activation=None, bias=False, residual=False, initial=False)["dx"])


def test_nothing_depends_on_padding_or_the_bucket(device, large):
    """Outputs and gradients, dweight and dbias included, have the same bits in any bucket that fits."""
    lengths = [900, 3, 0, 2000] if large else [20, 3, 0, 17]
    options = dict(width=600 if large else 8, seed=4)
    tight = batch(device, lengths, **options)
    want = run(tight)
    for empty_tails, padding in ((0, 1), (0, 64), (3, 100), (20, 1)):
        b = batch(device, [*lengths, *[0] * empty_tails], padding=padding, **options)
        for name in ("x", "residual", "dy"):
            getattr(b, name)[:, : b.total] = getattr(tight, name)
        for name in ("weight", "bias"):
            setattr(b, name, getattr(tight, name))
        n = len(lengths)
        b.initial[:n], b.dfinal[:n] = tight.initial, tight.dfinal
        b.initial[n:], b.dfinal[n:] = NAN, NAN
        got = run(b, use_graph=True)
        assert_padding_is_zero(got, b.total)
        for name in ("final_state", "dinitial_state"):
            got[name] = got[name][:n]
        assert_same_bits(want, got, live=b.total)


def test_a_sequence_does_not_see_its_neighbours(device):
    """NaN in one sequence, gradients included, leaves no trace in the others."""
    b = batch(device, [20, 30, 20])
    want = run(b)
    for t in (b.x, b.residual, b.dy):
        t[:, 20:50] = NAN
    b.initial[1], b.dfinal[1] = NAN, NAN
    got = run(b)
    for name in ("y", "dx", "dresidual"):
        assert torch.equal(want[name][:, :20], got[name][:, :20]), name
        assert torch.equal(want[name][:, 50:], got[name][:, 50:]), name
    for name in ("final_state", "dinitial_state"):
        assert torch.equal(want[name][[0, 2]], got[name][[0, 2]]), name


@pytest.mark.parametrize("dense", [False, True], ids=["packed", "dense"])
def test_launches(device, launches, dense):
    """Forward one, backward two, states and residual included; a packed batch adds its tables."""
    b = batch(device, [20, 20], dense=dense)
    run(b)
    tables = [] if dense else ["chunk_tables_kernel"]
    assert launches == [*tables, "conv_forward_kernel", "conv_backward_kernel", "conv_reduce_kernel"]


def test_no_autograd_node_without_a_gradient(device):
    b = batch(device, [5])
    y, _ = causal_conv1d(b.x, b.weight, cu_seqlens=b.cu)
    assert y.grad_fn is None
    with torch.no_grad():
        y, _ = causal_conv1d(b.x.requires_grad_(), b.weight, cu_seqlens=b.cu)
    assert not y.requires_grad


def test_nothing_is_compiled_or_configured_anew_for_another_length(device, large):
    """T from 1000 to 9000 in steps of 777 (reported as fla 1147), in a bucket of each length."""
    prepared = (launch._forward_launch, launch._backward_launch, launch._reduce_launch)
    run(batch(device, [20, 9]))
    before = [p.cache_info().misses for p in prepared]
    compiled = []
    if device.type == "cuda":
        import triton

        previous = triton.knobs.runtime.jit_post_compile_hook
        triton.knobs.runtime.jit_post_compile_hook = lambda **kw: compiled.append(kw["repr"])
    for tokens in range(1000, 9001, 777) if large else (31, 50):
        run(batch(device, [tokens // 3, tokens - tokens // 3]))
    if device.type == "cuda":
        triton.knobs.runtime.jit_post_compile_hook = previous
    assert [p.cache_info().misses for p in prepared] == before
    assert compiled == []


def test_programs_that_walk_tasks_write_the_same_bits(device, monkeypatch):
    """A grid as large as the cores, as on Ascend, with sentinels among the tasks."""
    b = batch(device, [20, 0, 9, 3], padding=70, width=20)
    want = run(b)
    kind = policies.device_kind(device)
    few = policies.Policy(kind, policies.KINDS[kind].ptx, 3, policies.KINDS[kind].tables, policies.KINDS[kind].conv)
    monkeypatch.setattr(launch, "policy_for", lambda device: few)
    caches = [f for f in vars(launch).values() if hasattr(f, "cache_clear")]
    for cache in caches:
        cache.cache_clear()
    try:
        assert_same_bits(want, run(b))
    finally:
        for cache in caches:
            cache.cache_clear()


def test_an_unaligned_operand_after_an_aligned_one(device):
    """A prepared launch is not reused where Triton would have compiled another kernel."""
    b = batch(device, [40, 9], width=16, dtype=torch.float16)
    want = run(b)
    room = torch.empty(b.x.numel() + 1, dtype=b.x.dtype, device=device)
    shifted = room[1:].view_as(b.x)
    shifted.copy_(b.x)
    assert shifted.data_ptr() % 16
    b.x = shifted
    assert_same_bits(want, run(b))
    assert_same_bits(want, run(b))


def test_changed_boundaries_are_noticed(device):
    b = batch(device, [9, 4])
    cu = b.cu.clone()
    y, _ = causal_conv1d(b.x.requires_grad_(), b.weight, cu_seqlens=cu)
    cu.copy_(torch.tensor([0, 5, 13]))
    with pytest.raises(MetadataError, match="cu_seqlens"):
        y.sum().backward()


def test_refuses_more_taps_than_registers_hold(device):
    b = batch(device, [5], taps=9)
    with pytest.raises(GraphSafeError, match="9 taps"):
        causal_conv1d(b.x, b.weight, cu_seqlens=b.cu)


def test_replay_equals_eager_over_random_layouts(device, large, capture):
    """Forward and backward in one graph with its tables: 50 layouts on a device, padding and old outputs poisoned."""
    rng = random.Random(1)
    sequences, tokens, width = (32, 4096, 512) if large else (4, 60, 8)
    b = batch(device, [tokens // sequences] * sequences, width=width, padding=tokens % sequences,
              dtype=torch.bfloat16 if large else torch.float32)
    source = {k: torch.nan_to_num(getattr(b, k)) for k in ("x", "residual", "dy")}

    def body():
        return run(b, use_graph=True)

    graph = capture(body)
    for _ in range(50 if large else 3):
        cuts = sorted(rng.randrange(tokens + 1) for _ in range(sequences))
        if rng.random() < 0.3:
            cuts = sorted(rng.choice(cuts) for _ in cuts)
        b.cu.copy_(torch.tensor([0, *cuts], dtype=b.cu.dtype))
        b.total = cuts[-1]
        for k, v in source.items():
            getattr(b, k).copy_(v.roll(rng.randrange(tokens), 1))
            getattr(b, k)[:, b.total :] = NAN
        for t in graph.value.values():
            t.fill_(NAN)
        got = graph.replay()
        assert_padding_is_zero(got, b.total)
        assert_same_bits(run(b, use_graph=True), got)


def test_offsets_beyond_32_bits(device, large):
    """A tensor of more than 2^31 elements: its last rows equal the same rows computed alone."""
    if not large:
        pytest.skip("needs 13 GB of device memory")
    width, tokens = 8192, 2**18 + 2**10
    x = torch.zeros(1, tokens, width, dtype=torch.bfloat16, device=device)
    tail = torch.randn(1, 512, width, dtype=torch.bfloat16, device=device)
    x[:, -512:] = tail
    weight = torch.randn(width, 4, dtype=torch.bfloat16, device=device)
    y, _ = causal_conv1d(x, weight, activation="silu")
    want, _ = causal_conv1d(tail, weight, activation="silu")
    assert torch.equal(y[:, -512:], want)


def test_more_slots_than_a_grid_axis(device, large):
    """Over 65,535 slots: D 8192 with 128 sequences of 32 and one of 8192 (fla 992), and many slots of one row."""
    width = 8192 if large else 16
    b = batch(device, [32] * 128 + [8192] if large else [4] * 8 + [20], width=width)
    options = dict(bias=False, residual=False, initial=False, final=False)
    assert_close(run(b, function=reference.causal_conv1d, **options), run(b, **options), torch.float32)
    if large:
        b = batch(device, [1] * 70_000, width=4)
        assert_close(run(b, function=reference.causal_conv1d), run(b), torch.float32)


def test_second_order_gradients_are_refused(device):
    x = torch.ones(1, 8, 4, device=device, requires_grad=True)
    weight = torch.ones(4, 3, device=device, requires_grad=True)
    y, _ = causal_conv1d(x, weight, activation="silu")
    (g,) = torch.autograd.grad(y.sum(), x, create_graph=True)
    assert g.requires_grad, "a penalty on it would be taken for a constant"
    with pytest.raises(GraphSafeError, match="causal_conv1d") as caught:
        (y.sum() + g.square().sum()).backward()
    assert caught.value.rule.name == "unsupported"


@pytest.mark.parametrize("name", ["cu_seqlens", "chunk_indices", "chunk_offsets"])
def test_metadata_written_to_before_the_backward_is_refused(device, name):
    cu = torch.tensor([0, 9, 20], dtype=torch.int32, device=device)
    tables = build_tables(cu, 20, 4)
    x = torch.ones(1, 20, 8, device=device, requires_grad=True)
    y, _ = causal_conv1d(x, torch.ones(8, 3, device=device), cu_seqlens=cu, chunk_indices=tables.chunk_indices,
                         chunk_offsets=tables.chunk_offsets, chunk_size=4)
    getattr(tables, name).fill_(-1)
    with pytest.raises(GraphSafeError, match=name) as caught:
        y.sum().backward()
    assert caught.value.rule.name == "metadata-changed"


@pytest.mark.parametrize("packed", [False, True], ids=["dense", "packed"])
@pytest.mark.parametrize("wrong", [{"chunk_size": 0}, {"chunk_size": None}, {"chunk_size": 64.0}, {"chunk_size": [64]},
                                   {"max_num_seqs": [2]}, {"x": torch.ones(1, 20, 8).to_sparse()}], ids=str)
def test_wrong_arguments_have_an_error_of_their_own(device, packed, wrong):
    x = torch.ones(1, 20, 8, device=device)
    cu = torch.tensor([0, 9, 20], dtype=torch.int32, device=device) if packed else None
    arguments = {"x": x, "weight": torch.ones(8, 3, device=device), "cu_seqlens": cu} | wrong
    arguments["x"] = arguments["x"].to(device)
    with pytest.raises(GraphSafeError) as caught:
        causal_conv1d(**arguments)
    assert caught.value.rule.name == "argument"
