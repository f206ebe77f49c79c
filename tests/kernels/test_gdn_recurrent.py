"""The gated delta rule's recurrent kernel: the reference's values, one launch, padding."""

from __future__ import annotations

import functools

import pytest
import torch

from graphsafe_kernels import backend
from graphsafe_kernels.gdn import fused_recurrent_gated_delta_rule, recurrent

NAN = float("nan")


@pytest.fixture(autouse=True)
def kernels(monkeypatch):
    """The operator is served by its kernel, on any device."""
    monkeypatch.setitem(backend.TRITON, "fused_recurrent_gated_delta_rule", recurrent.__name__)
    backend._load.cache_clear()
    yield
    backend._load.cache_clear()


def operands(device, lengths, *, heads=1, value_heads=2, key=8, value=12, padding=0, dtype=torch.float32, v_first=False,
             dense=False, gates=("g",)):  # fmt: skip
    randn = functools.partial(torch.randn, generator=torch.Generator().manual_seed(0))
    rows, tokens = (len(lengths), lengths[0]) if dense else (1, sum(lengths))
    sizes = {"g": (), "gk": (key,), "gv": (value,)}
    t = {
        "q": randn(rows, tokens, heads, key), "k": randn(rows, tokens, heads, key),
        "v": randn(rows, tokens, value_heads, value), "beta": randn(rows, tokens, value_heads),
        **{name: -randn(rows, tokens, value_heads, *sizes[name]).abs() for name in gates},
    }  # fmt: skip
    if padding:
        t = {name: torch.cat([x, x.new_full((1, padding, *x.shape[2:]), NAN)], 1) for name, x in t.items()}
    t = {name: x.to(dtype) if name in "qkv" else x for name, x in t.items()}
    states = (value, key) if v_first else (key, value)
    t["initial_state"] = randn(len(lengths), value_heads, *states)
    t = {name: x.to(device) for name, x in t.items()}
    if not dense:
        t["cu_seqlens"] = torch.tensor([0, *lengths]).cumsum(0).to(device, torch.int32)
    return t


NORMED = {"use_qk_l2norm_in_kernel": True}
CASES = {
    "packed": (dict(lengths=[5, 0, 1, 7], padding=19), NORMED),
    "dense": (dict(lengths=[3, 3], dense=True, value_heads=3, heads=3), {**NORMED, "scale": 0.3}),
    "states v first": (dict(lengths=[2, 4], v_first=True), {**NORMED, "state_v_first": True}),
    "decays per channel": (dict(lengths=[6], gates=("g", "gk", "gv")), NORMED),
    "no decay": (dict(lengths=[4], gates=()), NORMED),
    "everything in the kernel": (
        dict(lengths=[3, 2], padding=2),
        {**NORMED, "use_beta_sigmoid_in_kernel": True, "allow_neg_eigval": True, "use_gate_in_kernel": True},
    ),
}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", CASES)
def test_values_padding_and_one_launch(device, launches, name, dtype):
    sizes, options = CASES[name]
    t = operands(device, dtype=dtype, **sizes)
    if options.get("use_gate_in_kernel"):
        options = {**options, "A_log": torch.tensor([0.3, -0.2], device=device),
                   "dt_bias": torch.tensor([0.5, -1.0], device=device)}  # fmt: skip
    launches.clear()
    o, final = fused_recurrent_gated_delta_rule(**t, output_final_state=True, **options)
    assert launches == ["recurrent_kernel"]
    with backend.reference_only():
        want, want_final = fused_recurrent_gated_delta_rule(**t, output_final_state=True, **options)
    assert o.dtype == dtype
    close = functools.partial(torch.testing.assert_close, rtol=1e-5, atol=1e-5)
    close(final, want_final)
    torch.testing.assert_close(o, want, rtol=1e-5 if dtype == torch.float32 else 1e-2, atol=1e-5)
    if sizes.get("padding"):
        assert (o[:, -sizes["padding"] :] == 0).all()


def test_a_sequence_without_tokens_hands_its_state_through(device):
    t = operands(device, [0, 0])
    o, final = fused_recurrent_gated_delta_rule(**t, output_final_state=True)
    assert torch.equal(final, t["initial_state"])
    assert o.numel() == 0


def test_gradients_are_the_references(device, launches):
    t = operands(device, [3])
    launches.clear()
    fused_recurrent_gated_delta_rule(**{**t, "v": t["v"].requires_grad_()})[0].sum().backward()
    assert t["v"].grad is not None
    assert not launches
