"""The gated delta rule: the recurrence is the explicit adjoint, and the chunk form is the recurrence."""

from __future__ import annotations

import pytest
import torch
from delta_rule_cases import CHUNK, RECURRENT, Case, assert_close, cases, make, output_gradients, run_case
from explicit_adjoint import explicit
from hypothesis import HealthCheck, given, settings

from graphsafe_kernels.gdn import chunk_gated_delta_rule, fused_recurrent_gated_delta_rule

RULE = "gdn"


@pytest.mark.parametrize("group", [1, 3])
@pytest.mark.parametrize("gate", ["usual", "mixed", "strong"])
def test_recurrence_is_the_explicit_adjoint(group, gate):
    case = Case(RULE, lengths=(0, 5, 1, 0, 9), heads=2, group=group, key=5, value=3, gate=gate, seed=7)
    assert_close(run_case(case, RECURRENT[RULE]), explicit(case), 1e-12)


@settings(max_examples=200, derandomize=True, deadline=None, database=None,
          suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large])
@given(cases(RULE))
def test_chunk_is_the_recurrence(case):
    tensors = make(case)
    assert_close(run_case(case, CHUNK[RULE], tensors), run_case(case, RECURRENT[RULE], tensors))


def test_recurrence_takes_decays_per_key_and_value_channel():
    case = Case(RULE, batch=2, tokens=6, heads=1, group=2, key=4, value=3, gate="usual", seed=11)
    tensors = make(case)
    g = tensors.pop("g")
    generator = torch.Generator().manual_seed(1)
    gk = -torch.rand((2, 6, 2, 4), generator=generator, dtype=torch.float64)
    gv = -torch.rand((2, 6, 2, 3), generator=generator, dtype=torch.float64)
    o, final = fused_recurrent_gated_delta_rule(**tensors, g=g, gk=gk, gv=gv, output_final_state=True)
    q, k, v, beta = (tensors[n] for n in ("q", "k", "v", "beta"))
    for b in range(2):
        for hv in range(2):
            state = tensors["initial_state"][b, hv]
            for t in range(6):
                state = state * (g[b, t, hv] + gk[b, t, hv][:, None] + gv[b, t, hv][None, :]).exp()
                state = state + beta[b, t, hv] * torch.outer(k[b, t, 0], v[b, t, hv] - state.T @ k[b, t, 0])
                assert (o[b, t, hv] - 4**-0.5 * state.T @ q[b, t, 0]).abs().max() < 1e-12
            assert (final[b, hv] - state).abs().max() < 1e-12


def test_recurrence_without_gate_and_beta_is_the_plain_delta_rule():
    case = Case(RULE, batch=1, tokens=5, heads=2, key=4, value=4, gate="none", seed=2)
    tensors = make(case)
    tensors["beta"] = torch.ones_like(tensors["beta"])
    want = fused_recurrent_gated_delta_rule(**tensors, output_final_state=True)
    got = fused_recurrent_gated_delta_rule(tensors["q"], tensors["k"], tensors["v"], output_final_state=True,
                                           initial_state=tensors["initial_state"])
    assert all(torch.equal(a, b) for a, b in zip(got, want, strict=True))


def test_outputs_without_final_state():
    case = Case(RULE, batch=1, tokens=20, seed=1)
    tensors = make(case)
    o, final = chunk_gated_delta_rule(**tensors)
    assert final is None
    assert torch.equal(o, chunk_gated_delta_rule(**tensors, output_final_state=True)[0])
    leaves = {n: t.requires_grad_() for n, t in tensors.items()}
    do, _ = output_gradients(case)
    chunk = torch.autograd.grad(chunk_gated_delta_rule(**leaves)[0], list(leaves.values()), do)
    loop = torch.autograd.grad(fused_recurrent_gated_delta_rule(**leaves)[0], list(leaves.values()), do)
    assert_close(dict(zip(leaves, chunk, strict=True)), dict(zip(leaves, loop, strict=True)))
