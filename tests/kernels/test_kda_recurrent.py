"""KDA's token-by-token kernel and the gate's kernels: against the fp64 reference, the chunk form, and the contract."""

from __future__ import annotations

import functools

import pytest
import torch

from graphsafe_kernels import backend
from graphsafe_kernels.kda import chunk_kda, fused_kda_gate, fused_recurrent_kda

NAN = float("nan")
GATED = {"use_gate_in_kernel": True, "use_qk_l2norm_in_kernel": True, "use_beta_sigmoid_in_kernel": True,
         "allow_neg_eigval": True}  # fmt: skip
CASES = {
    "given gate": (dict(lengths=(5, 0, 9)), {}),
    "softplus": (dict(lengths=(33,), gate=True), GATED),
    "bounded, odd widths, shared heads": (dict(lengths=(3, 20), gate=True, key=24, value=20, group=2),
                                          {**GATED, "lower_bound": -5.0}),
    "without A_log, v first": (dict(lengths=(7, 1), gate=True, A_log=False), {**GATED, "state_v_first": True}),
    "dense": (dict(lengths=(6, 6), dense=True), {"scale": -0.3}),
}  # fmt: skip


@pytest.fixture(autouse=True)
def kernels(monkeypatch):
    """The operators are served by their kernels, on any device."""
    for name in ("chunk_kda", "fused_recurrent_kda", "fused_kda_gate"):
        monkeypatch.delitem(backend.DEVICES, name, raising=False)
    backend._load.cache_clear()
    yield
    backend._load.cache_clear()


def operands(device, lengths, *, gate=False, A_log=True, dense=False, key=16, value=16, group=1, padding=0,
             dtype=torch.float32, v_first=False, seed=0):  # fmt: skip
    randn = functools.partial(torch.randn, generator=torch.Generator().manual_seed(seed))
    shape = (len(lengths), lengths[0]) if dense else (1, sum(lengths))
    heads = group
    x = {
        "q": randn(*shape, 1, key).to(dtype), "k": randn(*shape, 1, key).to(dtype),
        "v": randn(*shape, heads, value).to(dtype), "g": randn(*shape, heads, key), "beta": randn(*shape, heads),
    }  # fmt: skip
    if not gate:
        x.update(g=-x["g"].abs(), beta=x["beta"].sigmoid(), k=torch.nn.functional.normalize(x["k"], dim=-1))
    if padding:
        x = {name: torch.cat([t, t.new_full((1, padding, *t.shape[2:]), NAN)], 1) for name, t in x.items()}
    x["initial_state"] = randn(len(lengths), heads, *((value, key) if v_first else (key, value)))
    if gate:
        x.update(dt_bias=randn(heads * key), **({"A_log": randn(heads)} if A_log else {}))
    if not dense:
        x["cu_seqlens"] = torch.tensor([0, *lengths]).cumsum(0).int()
    return {name: t.to(device) for name, t in x.items()}


def exact(operator, x, **options):
    with backend.reference_only():
        return operator(**{n: t.double() if t.is_floating_point() else t for n, t in x.items()}, **options)


def error(got, want):
    return ((got.double() - want).norm() / want.norm()).item()


@pytest.mark.parametrize("name", CASES)
def test_values_and_padding(device, name, launches):
    """The reference's values and the chunk form's, in one launch; padding rows are zero whatever they held."""
    sizes, options = CASES[name]
    sizes = {**sizes, "v_first": options.get("state_v_first", False)}
    x = operands(device, **sizes)
    want = exact(fused_recurrent_kda, x, output_final_state=True, **options)
    chunk = chunk_kda(**x, output_final_state=True, chunk_size=32, **options)
    launches.clear()
    padded = x if sizes.get("dense") else operands(device, **sizes, padding=7)
    o, final = fused_recurrent_kda(**padded, output_final_state=True, **options)
    assert launches == ["recurrent_kernel"]
    live = want[0].shape[1]
    assert (o[:, live:] == 0).all()
    for got, exactly, chunked in zip((o[:, :live], final), want, chunk, strict=True):
        assert error(got, exactly) < 1e-6
        assert error(got, chunked.double()) < 1e-5


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_half_precision(device, dtype):
    x = operands(device, (9, 20), gate=True, dtype=dtype)
    o, final = fused_recurrent_kda(**x, output_final_state=True, **GATED)
    want = exact(fused_recurrent_kda, x, output_final_state=True, **GATED)
    assert o.dtype == dtype
    assert error(o, want[0]) < (1e-3 if dtype == torch.float16 else 5e-3)
    assert error(final, want[1]) < 1e-5


def test_a_prefix_and_a_neighbour_change_nothing(device):
    """A sequence's bits are those it has alone, whatever follows it, in it or behind it."""
    x = operands(device, (9, 12), gate=True)
    whole, _ = fused_recurrent_kda(**x, **GATED)
    head = {n: t[:, :7] if n in ("q", "k", "v", "g", "beta") else t for n, t in x.items()}
    head["initial_state"], head["cu_seqlens"] = x["initial_state"][:1], x["cu_seqlens"][:1].new_tensor([0, 7])
    alone, _ = fused_recurrent_kda(**head, **GATED)
    assert torch.equal(whole[:, :7], alone)
    for name in ("q", "k", "v", "g", "beta"):
        x[name][:, 9:] = NAN
    x["initial_state"][1] = NAN
    assert torch.equal(fused_recurrent_kda(**x, **GATED)[0][:, :9], whole[:, :9])


def test_a_gradient_is_the_references(device):
    """Decoding needs no gradient; who wants one gets the reference's."""
    x = operands(device, (5,))
    x["v"].requires_grad_()
    (got,) = torch.autograd.grad(fused_recurrent_kda(**x)[0].sum(), x["v"])
    with backend.reference_only():
        (want,) = torch.autograd.grad(fused_recurrent_kda(**x)[0].sum(), x["v"])
    assert torch.equal(got, want)


@pytest.mark.parametrize("lower_bound", [None, -5.0], ids=["softplus", "bounded"])
@pytest.mark.parametrize("parameters", [True, False], ids=["parameters", "none"])
def test_gate(device, lower_bound, parameters, launches):
    """Values and gradients are the reference's; one launch forward, at most two back."""
    randn = functools.partial(torch.randn, generator=torch.Generator().manual_seed(1))
    g, A_log, dt_bias, dy = (t.to(device) for t in (randn(3, 15, 2, 20), randn(2), randn(40), randn(3, 15, 2, 20)))
    leaves = [g, A_log, dt_bias] if parameters else [g]
    launches.clear()
    leaves = [t.requires_grad_() for t in leaves]
    y = fused_kda_gate(*leaves, lower_bound=lower_bound)
    found = [y.detach(), *torch.autograd.grad(y, leaves, dy)]
    more = ["finish_kernel"] if parameters else []
    assert launches == ["gate_kernel", "gate_backward_kernel", *more]
    doubles = [t.detach().double().requires_grad_() for t in leaves]
    want = fused_kda_gate(*doubles, lower_bound=lower_bound, output_dtype=torch.float64)
    for a, b in zip(found, [want.detach(), *torch.autograd.grad(want, doubles, dy.double())], strict=True):
        assert error(a, b) < 5e-6


def test_a_saturated_or_silent_gate(device):
    """Finite at either end in values and gradients; an element without a gradient may hold anything."""
    g = torch.tensor([[[1e4, -1e4, 30.0, 3.0, NAN]]], device=device).requires_grad_()
    A_log = torch.tensor([200.0], device=device).requires_grad_()
    dy = torch.tensor([[[1.0, 1.0, 1.0, 1.0, 0.0]]], device=device)
    for lower_bound in (None, -5.0):
        y = fused_kda_gate(g, A_log, lower_bound=lower_bound)
        assert torch.isfinite(y[..., :4]).all()
        dg, dA_log = torch.autograd.grad(y, (g, A_log), dy)
        assert dg[..., 4] == 0
        assert torch.isfinite(dg[..., :2]).all()
        assert not dA_log.isnan()


def test_a_gate_of_nothing(device):
    g = torch.empty(0, 2, 8, device=device).requires_grad_()
    bias = torch.zeros(16, device=device).requires_grad_()
    dg, dbias = torch.autograd.grad(fused_kda_gate(g, dt_bias=bias).sum(), (g, bias))
    assert dg.shape == g.shape
    assert (dbias == 0).all()
