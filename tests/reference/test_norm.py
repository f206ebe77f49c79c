"""The RMS norm, plain and gated, against its formula under autograd, and the contract around it."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from graphsafe.errors import ArgumentError, GraphSafeError
from graphsafe_kernels.backend import reference_only
from graphsafe_kernels.norm import FusedRMSNormGated, RMSNorm, rms_norm, rms_norm_gated

F64 = torch.float64
NAN = float("nan")


@pytest.fixture(scope="module", autouse=True)
def _reference():
    """Whatever other tests made the process prefer."""
    with reference_only():
        yield


def formula(x, g, weight, activation, eps):
    y = x / torch.sqrt((x * x).mean(-1, keepdim=True) + eps)
    y = y if weight is None else y * weight
    if g is None:
        return y
    return y * torch.sigmoid(g) * (1 if activation == "sigmoid" else g)


def make(tokens, heads, width, seed, *, gated=True, weighted=True, dtype=F64):
    gen = torch.Generator().manual_seed(seed)
    x, g, dy = (torch.randn(tokens, heads, width, generator=gen, dtype=F64).to(dtype) for _ in range(3))
    weight = torch.randn(width, generator=gen, dtype=F64).to(dtype)
    return {"x": x, "g": g if gated else None, "weight": weight if weighted else None}, dy


def packed(operands, rows):
    """x and g as a packed batch [1, T + rows, ...] with NaN behind the live tokens."""
    return {k: v if k == "weight" else behind(v, rows) for k, v in operands.items() if v is not None}


def behind(t, rows, value=NAN):
    return torch.cat([t, torch.full((rows, *t.shape[1:]), value, dtype=t.dtype)])[None]


def run(operands, dy, **options):
    leaves = {k: v.detach().requires_grad_() for k, v in operands.items()}
    y = (rms_norm_gated if "g" in leaves else rms_norm)(**leaves, **options)
    return y, dict(zip(leaves, torch.autograd.grad(y, list(leaves.values()), dy), strict=True))


@settings(max_examples=100, derandomize=True, deadline=None)
@given(st.integers(0, 9), st.integers(1, 3), st.integers(1, 9), st.integers(0, 4), st.booleans(), st.booleans(),
       st.sampled_from(["swish", "silu", "sigmoid"]), st.sampled_from([1e-6, 0.1]), st.integers(0, 10**6))
def test_equals_the_formula_with_nan_in_all_padding(tokens, heads, width, padding, gated, weighted, activation, eps,
                                                    seed):
    operands, dy = make(tokens, heads, width, seed, gated=gated, weighted=weighted)
    leaves = {k: None if v is None else v.detach().requires_grad_() for k, v in operands.items()}
    y = formula(**leaves, activation=activation, eps=eps)
    present = {k: v for k, v in leaves.items() if v is not None}
    wanted = dict(zip(present, torch.autograd.grad(y, list(present.values()), dy), strict=True))

    options = {"activation": activation} if gated else {}
    cu = torch.tensor([0, tokens // 2, tokens, tokens])
    got_y, got = run(packed(operands, padding), behind(dy, padding), eps=eps, cu_seqlens=cu, **options)
    assert torch.allclose(got_y[0, :tokens], y, rtol=0, atol=1e-12)
    assert torch.count_nonzero(got_y[0, tokens:]) == 0
    for name, want in wanted.items():
        g = got[name]
        if name != "weight":
            assert torch.count_nonzero(g[0, tokens:]) == 0, name
            g = g[0, :tokens]
        assert torch.allclose(g, want, rtol=1e-11, atol=1e-11), name


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("live", [1, 5, 50])
@pytest.mark.parametrize(("heads", "width"), [(1, 1), (3, 5)])
def test_results_have_the_same_bits_in_every_bucket(live, heads, width, dtype):
    """No bit of the weight's gradient, or of a live row, depends on how much padding follows."""
    operands, dy = make(live, heads, width, seed=live, dtype=dtype)
    first = None
    for padding in (0, 1, 7, 64, 300):
        y, got = run(packed(operands, padding), behind(dy, padding), cu_seqlens=torch.tensor([0, live]))
        result = {"y": y[:, :live], "x": got["x"][:, :live], "g": got["g"][:, :live], "weight": got["weight"]}
        first = first or result
        for name, t in result.items():
            assert torch.equal(t, first[name]), f"{name} with {padding} rows of padding"


def test_dense_batch_equals_its_samples():
    operands, dy = make(12, 2, 4, seed=1)
    dense = {k: v if k == "weight" else v.reshape(3, 4, 2, 4) for k, v in operands.items()}
    y, got = run(dense, dy.reshape(3, 4, 2, 4))
    y2, got2 = run(packed(operands, 0), dy[None])
    assert torch.equal(y.reshape(y2.shape), y2)
    for name, g in got.items():
        assert torch.equal(g.reshape(got2[name].shape), got2[name]), name


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
def test_narrow_dtypes_compute_in_fp32_and_keep_their_dtype(dtype):
    """x^2 overflows fp16 from 256 up: a sum kept in fp16 would give zero rows."""
    operands, dy = make(20, 2, 8, seed=3, dtype=dtype)
    operands["x"] = operands["x"] * 1000
    y, got = run(packed(operands, 0), dy[None])
    y64, want = run({k: v.to(F64) for k, v in packed(operands, 0).items()}, dy[None].to(F64))
    tolerance = 1e-5 if dtype == torch.float32 else 5e-3
    for name, t, w in [("y", y, y64), *((k, got[k], want[k]) for k in got)]:
        assert t.dtype == dtype, name
        assert (t.to(F64) - w).square().mean().sqrt() <= tolerance * w.square().mean().sqrt(), name


def test_saturated_gates_give_finite_gradients():
    operands, dy = make(4, 1, 4, seed=5, dtype=torch.float32)
    operands["g"] = torch.tensor([-1e4, -100.0, 100.0, 1e4])[:, None, None].expand(4, 1, 4)
    for activation in ("swish", "sigmoid"):
        y, got = run(packed(operands, 0), dy[None], activation=activation)
        assert torch.isfinite(y).all()
        assert all(torch.isfinite(g).all() for g in got.values())


def test_boundaries_written_to_before_the_backward_are_noticed():
    operands, _ = make(4, 1, 4, seed=6)
    cu = torch.tensor([0, 4])
    y = rms_norm(operands["x"][None].requires_grad_(), cu_seqlens=cu)
    cu[1] = 3
    with pytest.raises(GraphSafeError, match="rms_norm") as caught:
        y.sum().backward()
    assert caught.value.rule.name == "metadata-changed"


def test_second_order_gradients_are_refused():
    x = torch.ones(1, 4, 2, requires_grad=True)
    (g,) = torch.autograd.grad(rms_norm(x).sum(), x, create_graph=True)
    with pytest.raises(GraphSafeError, match="rms_norm") as caught:
        g.sum().backward()
    assert caught.value.rule.name == "unsupported"


def test_no_host_read_and_no_host_data():
    """On the meta device a host read or a data-dependent shape raises; checks and computation run through."""
    operands, dy = make(4, 2, 3, seed=7)
    cu = torch.empty(3, dtype=torch.int32, device="meta")
    run({k: v.to("meta") for k, v in packed(operands, 2).items()}, behind(dy, 2).to("meta"), cu_seqlens=cu)


def test_modules_hold_one_parameter_and_call_the_operators():
    operands, _ = make(5, 2, 4, seed=8, dtype=torch.float32)
    x, g, cu = operands["x"][None], operands["g"][None], torch.tensor([0, 3])
    gated, plain = FusedRMSNormGated(4, eps=1e-3, activation="sigmoid"), RMSNorm(4, eps=1e-3)
    for module in (gated, plain):
        assert {k: v.shape for k, v in module.state_dict().items()} == {"weight": (4,)}
        assert torch.equal(module.weight, torch.ones(4))
        torch.nn.init.uniform_(module.weight)
        assert "eps=0.001" in repr(module)
    want = rms_norm_gated(x, g, gated.weight, activation="sigmoid", eps=1e-3, cu_seqlens=cu)
    assert torch.equal(gated(x, g, cu_seqlens=cu), want)
    assert torch.equal(plain(x, cu_seqlens=cu), rms_norm(x, plain.weight, 1e-3, cu_seqlens=cu))


BAD = [
    ("argument", "x has shape", {"x": torch.zeros(4, 2)}),
    ("argument", "x is int32", {"x": torch.zeros(1, 4, 2, dtype=torch.int32)}),
    ("argument", "g is", {"g": torch.zeros(1, 4, 3)}),
    ("argument", "weight is", {"weight": torch.zeros(3)}),
    ("argument", "activation is 'relu'", {"activation": "relu"}),
    ("argument", "cu_seqlens", {"cu_seqlens": torch.zeros(2)}),
    ("unsupported", "bias", {"bias": torch.zeros(2)}),
    ("unsupported", "residual", {"residual": torch.zeros(1, 4, 2)}),
    ("unsupported", "prenorm", {"prenorm": True}),
    ("unsupported", "residual_in_fp32", {"residual_in_fp32": True}),
]


@pytest.mark.parametrize(("rule", "text", "change"), BAD, ids=[f"{i}-{b[1]}" for i, b in enumerate(BAD)])
def test_bad_arguments_are_refused_by_name(rule, text, change):
    arguments = {"x": torch.zeros(1, 4, 2), "g": torch.zeros(1, 4, 2)} | change
    with pytest.raises(GraphSafeError, match=text) as caught:
        rms_norm_gated(**arguments)
    assert caught.value.rule.name == rule
    assert isinstance(caught.value, ArgumentError) == (rule == "argument")


def test_a_module_with_an_unknown_activation_is_refused():
    with pytest.raises(ArgumentError, match="'gelu'"):
        FusedRMSNormGated(4, activation="gelu")
