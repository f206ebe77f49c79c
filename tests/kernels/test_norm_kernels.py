"""The norm's kernels: values against the fp64 reference, the graph contract, and operands where they lie."""

from __future__ import annotations

import random

import pytest
import torch

from graphsafe.errors import GraphSafeError
from graphsafe_kernels.backend import resolve
from graphsafe_kernels.norm import rms_norm, rms_norm_gated
from graphsafe_kernels.norm.configurations import MAX_WIDTH, backward_options
from graphsafe_kernels.norm.launch import rows

TOLERANCE = {torch.float32: 2e-6, torch.float16: 1e-3, torch.bfloat16: 5e-3}
"""Relative RMS error allowed against fp64."""
NAN = float("nan")


def batch(device, tokens, heads, width, *, dtype=torch.float32, padding=0, seed=0, gated=True, weighted=True):
    """Operands and dy of one packed batch with NaN in every padding row; the gate is a slice of a wider projection."""
    generator = torch.Generator().manual_seed(seed)

    def randn(*shape):
        return torch.randn(*shape, generator=generator).to(dtype).to(device)

    x, dy = randn(1, tokens + padding, heads, width), randn(1, tokens + padding, heads, width)
    projection = randn(1, tokens + padding, 8 + heads * width + 3)
    weight = randn(width)
    for t in (x, dy, projection):
        t[:, tokens:] = NAN
    g = projection[..., 8 : 8 + heads * width].unflatten(-1, (heads, width))
    operands = {"x": x, "g": g if gated else None, "weight": weight if weighted else None}
    return {k: v for k, v in operands.items() if v is not None}, dy


def run(operands, dy, total=None, dtype=None, **options):
    """y and the gradients by name; with ``dtype`` through the reference's fp64."""
    leaves = {k: v.detach().to(dtype or v.dtype).requires_grad_() for k, v in operands.items()}
    cu = None if total is None else torch.tensor([0, total // 2, total, total], device=dy.device, dtype=torch.int32)
    y = (rms_norm_gated if "g" in leaves else rms_norm)(**leaves, cu_seqlens=cu, **options)
    grads = torch.autograd.grad(y, list(leaves.values()), dy.to(y.dtype))
    return {"y": y.detach(), **dict(zip(leaves, grads, strict=True))}


def close(got, want, dtype):
    for name, w in want.items():
        g = got[name].double()
        assert torch.isfinite(g).all(), name
        error = (g - w).square().mean().sqrt() / (w.square().mean().sqrt() + 1e-8) if w.numel() else 0
        assert error <= TOLERANCE[dtype], f"{name}: {error}"


def padding_is_zero(got, total):
    for name, t in got.items():
        if name != "weight":
            assert torch.count_nonzero(t[:, total:]) == 0, name


@pytest.mark.parametrize("dtype", list(TOLERANCE), ids=str)
@pytest.mark.parametrize(("heads", "width"), [(1, 3), (3, 5), (2, 128), (1, 80), (3, 257)])
def test_values_of_every_dtype_and_width(device, dtype, heads, width):
    operands, dy = batch(device, 37, heads, width, dtype=dtype, padding=30, seed=width)
    got = run(operands, dy, 37)
    close(got, run(operands, dy, 37, torch.float64), dtype)
    padding_is_zero(got, 37)
    assert all(got[k].dtype == v.dtype and got[k].shape == v.shape for k, v in operands.items())


@pytest.mark.parametrize("activation", ["swish", "sigmoid", None])
@pytest.mark.parametrize("weighted", [False, True], ids=["", "weight"])
@pytest.mark.parametrize("packed", [False, True], ids=["dense", "packed"])
def test_values_of_every_option(device, activation, weighted, packed):
    operands, dy = batch(device, 24, 2, 12, padding=9 if packed else 0, gated=activation is not None,
                         weighted=weighted)
    options = {"eps": 0.01} | ({"activation": activation} if activation else {})
    if packed:
        got, want = run(operands, dy, 24, **options), run(operands, dy, 24, torch.float64, **options)
    else:
        operands = {k: v if k == "weight" else v.reshape(2, 12, 2, 12) for k, v in operands.items()}
        got, want = (run(operands, dy.reshape(2, 12, 2, 12), dtype=d, **options) for d in (None, torch.float64))
    close(got, want, torch.float32)


def test_only_the_gradients_that_are_wanted(device):
    operands, dy = batch(device, 9, 2, 8, padding=3)
    want = run(operands, dy, 9)
    for name, operand in operands.items():
        leaf = operand.detach().requires_grad_()
        cu = torch.tensor([0, 9], device=device)
        (got,) = torch.autograd.grad(rms_norm_gated(**(operands | {name: leaf}), cu_seqlens=cu), leaf, dy)
        assert torch.equal(got, want[name]), name


@pytest.mark.parametrize("live", [0, 1, 40, 1025])
@pytest.mark.parametrize(("heads", "width"), [(1, 256), (3, 40)])
def test_no_bit_depends_on_how_much_padding_follows(device, live, heads, width):
    """The weight's sum spans several programs, in an order that the layer's sizes fix."""
    operands, dy = batch(device, live, heads, width, seed=live)
    first = run(operands, dy, live)
    if live == 1025 and device.type == "cuda":
        assert live * heads > 2 * backward_options("sm_90", width)[0]["ROWS"]
    for padding in (1, 64, 3000):
        got = run(*batch_with_padding(operands, dy, padding), live)
        padding_is_zero(got, live)
        for name, t in got.items():
            assert torch.equal(t if name == "weight" else t[:, :live], first[name]), f"{name}, {padding} rows"


def batch_with_padding(operands, dy, padding):
    def behind(t):
        return torch.cat([t, t.new_full((1, padding, *t.shape[2:]), NAN)], 1)

    return {k: v if k == "weight" else behind(v) for k, v in operands.items()}, behind(dy)


def test_replays_of_random_layouts_have_the_bits_of_eager(device, capture):
    tokens = 96
    operands, dy = batch(device, tokens, 2, 24, dtype=torch.bfloat16)
    leaves = {k: v.detach().clone().requires_grad_() for k, v in operands.items()}
    cu = torch.tensor([0, 40], device=device, dtype=torch.int32)

    def body():
        y = rms_norm_gated(**leaves, cu_seqlens=cu)
        return (y.detach(), *torch.autograd.grad(y, list(leaves.values()), dy))

    graph, rng = capture(body), random.Random(0)
    for _ in range(8):
        total = rng.randint(0, tokens)
        fresh, fresh_dy = batch(device, total, 2, 24, dtype=torch.bfloat16, padding=tokens - total, seed=total)
        for name, leaf in leaves.items():
            leaf.data.copy_(fresh[name])
        dy.copy_(fresh_dy)
        cu[1] = total
        replayed = [t.clone() for t in graph.replay()]
        assert all(torch.equal(a, b) for a, b in zip(replayed, body(), strict=True))
        padding_is_zero(dict(zip(("y", "x", "g", "weight"), replayed, strict=True)), total)


def test_operands_are_read_where_they_lie():
    """A slice of a fused projection, dense or packed, is no copy; what has no even rows is."""
    projection = torch.empty(2, 7, 100)
    g = projection[..., 10:58].unflatten(-1, (4, 12))
    assert rows(g).tensor.data_ptr() == g.data_ptr()
    assert rows(g).strides == (100, 12)
    assert rows(projection[..., 10:58]).strides == (100, 48)
    for uneven in (projection[:, :5], projection[..., ::2], projection.transpose(0, 1)):
        assert rows(uneven).tensor.data_ptr() != uneven.data_ptr()
        assert rows(uneven).strides[0] == uneven.shape[-1]


def test_launches(device, launches):
    """Forward one, backward one, and one where the weight's gradient is wanted."""
    operands, dy = batch(device, 9, 2, 8, padding=3)
    cu = torch.tensor([0, 9], device=device)
    launches.clear()
    rms_norm_gated(**operands, cu_seqlens=cu)
    assert launches == ["norm_forward_kernel"]
    launches.clear()
    leaves = {k: v.detach().requires_grad_() for k, v in operands.items()}
    y = rms_norm_gated(**leaves, cu_seqlens=cu)
    torch.autograd.grad(y, list(leaves.values()), dy)
    assert launches == ["norm_forward_kernel", "norm_backward_kernel", "norm_reduce_kernel"]


def test_what_the_kernels_do_not_serve_is_refused_by_name(device):
    with pytest.raises(GraphSafeError, match=str(MAX_WIDTH)) as caught:
        rms_norm(torch.zeros(1, 2, MAX_WIDTH + 1, device=device))
    assert caught.value.rule.name == "unsupported"
    x = torch.zeros(1, 4, 2, device=device, requires_grad=True)
    cu = torch.tensor([0, 4], device=device)
    y = rms_norm(x, cu_seqlens=cu)
    cu[1] = 3
    with pytest.raises(GraphSafeError, match="rms_norm") as caught:
        y.sum().backward()
    assert caught.value.rule.name == "metadata-changed"
    (g,) = torch.autograd.grad(rms_norm(x).sum(), x, create_graph=True)
    with pytest.raises(GraphSafeError, match="rms_norm") as caught:
        g.sum().backward()
    assert caught.value.rule.name == "unsupported"


@pytest.mark.parametrize("live", [0, 3, 50])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_cleared_padding(device, live, dtype, launches):
    """The copy of a layer's input with zeros behind the live rows: one launch, NaN or not."""
    x = torch.randn(1, 50, 33, device=device).to(dtype)
    want = x.clone()
    want[:, live:] = 0
    x[:, live:] = NAN
    cu = torch.tensor([0, live // 2, live], device=device)
    launches.clear()
    y = resolve("clear_padding", device)(x, cu)
    assert launches == ["clear_padding_kernel"]
    assert torch.equal(y, want)
    assert live == 50 or torch.isnan(x[:, live:]).all(), "the caller's tensor is not written to"
