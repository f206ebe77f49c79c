"""The gates: their formulas, gradients, saturation, omitted parameters, and the KDA gate as an operator."""

from __future__ import annotations

import math

import pytest
import torch

from graphsafe.errors import ArgumentError, GraphSafeError
from graphsafe_kernels.kda import fused_kda_gate
from graphsafe_kernels.reference.gate import Gate, gate_backward, gate_forward, softplus

F64 = torch.float64
NAN, INF = float("nan"), float("inf")
BOUNDS = (None, -5.0, -0.3)


def normal(*shape, seed=0, dtype=F64):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=F64).to(dtype)


def parameters(heads=3, width=4, dtype=F64):
    return normal(heads, seed=1, dtype=dtype), normal(heads * width, seed=2, dtype=dtype)


def scalar_gate(x: float, log_scale: float, bias: float, lower_bound: float | None) -> float:
    """One element of the gate, in plain Python."""
    z, a = x + bias, math.exp(log_scale)
    if lower_bound is not None:
        return lower_bound / (1 + math.exp(-a * z))
    return -a * (z if z >= 20 else math.log1p(math.exp(z)))


@pytest.mark.parametrize("lower_bound", BOUNDS)
def test_the_gate_is_the_formula(lower_bound):
    g, (A_log, dt_bias) = 10 * normal(2, 5, 3, 4), parameters()
    got = fused_kda_gate(g, A_log, dt_bias, lower_bound, F64)
    for index in ((b, t, h, c) for b in range(2) for t in range(5) for h in range(3) for c in range(4)):
        h, c = index[2:]
        want = scalar_gate(g[index].item(), A_log[h].item(), dt_bias[4 * h + c].item(), lower_bound)
        assert got[index].item() == pytest.approx(want, rel=1e-13, abs=1e-300)


@pytest.mark.parametrize("lower_bound", BOUNDS)
@pytest.mark.parametrize("bias", [True, False], ids=["bias", "no bias"])
@pytest.mark.parametrize("scale", [True, False], ids=["A_log", "no A_log"])
def test_gradients_are_the_derivative(scale, bias, lower_bound):
    # softplus turns linear at 20, where its written-out derivative and that of the formula differ by 2e-9
    g = (4 * normal(2, 5, 3, 4)).clamp(max=15).requires_grad_()
    A_log, dt_bias = parameters()
    inputs = [g, A_log.requires_grad_() if scale else None, dt_bias.requires_grad_() if bias else None]
    assert torch.autograd.gradcheck(lambda *x: fused_kda_gate(*x, lower_bound, F64), inputs)


def test_softplus_is_linear_from_20():
    x = torch.tensor([19.999, 20.0, 20.001, 1000.0], dtype=F64)
    assert softplus(x)[0] > x[0]
    assert torch.equal(softplus(x)[1:], x[1:])


@pytest.mark.parametrize("lower_bound", BOUNDS)
def test_fla_1107_1294_an_omitted_A_log_is_a_zero_A_log(lower_bound):
    g, (_, dt_bias) = normal(1, 73, 2, 64, dtype=torch.float32), parameters(2, 64, torch.float32)
    dy = normal(1, 73, 2, 64, seed=5, dtype=torch.float32)
    results = []
    for A_log in (None, torch.zeros(2)):
        x, b = g.clone().requires_grad_(), dt_bias.clone().requires_grad_()
        y = fused_kda_gate(x, A_log, b, lower_bound)
        results.append((y, *torch.autograd.grad(y, [x, b], dy)))
    assert all(torch.equal(a, b) for a, b in zip(*results, strict=True))


def test_an_omitted_bias_is_a_zero_bias():
    g, (A_log, _) = normal(1, 7, 3, 4), parameters()
    assert torch.equal(fused_kda_gate(g, A_log), fused_kda_gate(g, A_log, torch.zeros(12, dtype=F64)))


@pytest.mark.parametrize("dtype", [torch.float32, F64], ids=str)
@pytest.mark.parametrize("A_log", [-100.0, 0.0, 60.0, 100.0, 1000.0])
@pytest.mark.parametrize("lower_bound", [None, -5.0])
def test_a_saturated_gate_is_finite_with_finite_gradients(lower_bound, A_log, dtype):
    x = torch.tensor([-3e38, -1e4, -120.0, 120.0, 1e4, 3e38], dtype=dtype)
    gate = Gate(torch.tensor([A_log], dtype=dtype), torch.tensor([0.5], dtype=dtype), lower_bound)
    g = gate_forward(x, gate)
    # what reaches the gate's input of the recurrence is exp(g) times something bounded
    dx, dA = gate_backward(x, gate, g.exp())
    assert all(t.isfinite().all() for t in (g, g.exp(), dx, dA))
    assert (g <= 0).all()


def test_an_element_has_the_same_bits_wherever_it_lies():
    x = 8 * normal(4000, dtype=torch.float32)
    for gate in (Gate(torch.tensor([0.3]), torch.tensor([0.1]), None), Gate(torch.tensor([0.3]), None, -5.0)):
        whole, slopes = gate_forward(x, gate), gate_backward(x, gate, x)
        for count in (1, 7, 31, 33, 100, 3999):
            assert torch.equal(gate_forward(x[:count].clone(), gate), whole[:count])
            part = gate_backward(x[:count].clone(), gate, x[:count].clone())
            assert all(torch.equal(p, s[:count]) for p, s in zip(part, slopes, strict=True))


@pytest.mark.parametrize("poison", [NAN, INF, -INF])
@pytest.mark.parametrize("lower_bound", [None, -5.0])
def test_an_element_without_a_gradient_contributes_nothing(lower_bound, poison):
    A_log, dt_bias = parameters()
    g, dy = normal(1, 9, 3, 4), normal(1, 9, 3, 4, seed=5)
    longer = torch.cat([g, torch.full((1, 70, 3, 4), poison, dtype=F64)], 1)
    longer_dy = torch.cat([dy, torch.zeros(1, 70, 3, 4, dtype=F64)], 1)
    results = []
    for x, d in ((g, dy), (longer, longer_dy)):
        leaves = [t.clone().requires_grad_() for t in (x, A_log, dt_bias)]
        results.append(torch.autograd.grad(fused_kda_gate(*leaves, lower_bound, F64), leaves, d))
    (dg, *dparameters), (longer_dg, *longer_dparameters) = results
    assert torch.equal(longer_dg[:, :9], dg)
    assert not longer_dg[:, 9:].any()
    assert all(torch.equal(a, b) for a, b in zip(dparameters, longer_dparameters, strict=True))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, F64], ids=str)
def test_dtypes(dtype):
    g, A_log = normal(2, 3, 4, dtype=dtype).requires_grad_(), normal(3, seed=1, dtype=torch.float32).requires_grad_()
    y = fused_kda_gate(g, A_log)
    assert y.dtype == torch.float32
    assert fused_kda_gate(g, A_log, output_dtype=dtype).dtype == dtype
    dg, dA_log = torch.autograd.grad(y.sum(), [g, A_log])
    assert (dg.dtype, dA_log.dtype) == (dtype, torch.float32)


def test_second_order_is_refused_by_name():
    g = normal(2, 3, 4).requires_grad_()
    (dg,) = torch.autograd.grad(fused_kda_gate(g).sum(), g, create_graph=True)
    with pytest.raises(GraphSafeError, match="second-order gradients of fused_kda_gate") as raised:
        dg.sum().backward()
    assert raised.value.rule.id == "GS106"


@pytest.mark.parametrize(("wrong", "name"), [
    (lambda g: fused_kda_gate(g[0, 0]), "g has shape"),
    (lambda g: fused_kda_gate(g.long()), "g is int64"),
    (lambda g: fused_kda_gate(g, torch.zeros(2)), "A_log"),
    (lambda g: fused_kda_gate(g, dt_bias=torch.zeros(3)), "dt_bias"),
    (lambda g: fused_kda_gate(g, lower_bound=0.0), "lower_bound is 0.0"),
    (lambda g: fused_kda_gate(g, lower_bound=-INF), "lower_bound is -inf"),
    (lambda g: fused_kda_gate(g, output_dtype=torch.int32), "output_dtype"),
])  # fmt: skip
def test_wrong_arguments_are_refused_by_name(wrong, name):
    with pytest.raises(ArgumentError, match=name) as raised:
        wrong(normal(2, 3, 4))
    assert raised.value.rule.id == "GS108"
    assert raised.value.where.file == __file__
