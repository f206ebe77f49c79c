"""Kimi delta attention: the recurrence is the explicit adjoint, and the chunk form is the recurrence."""

from __future__ import annotations

import pytest
import torch
from delta_rule_cases import CHUNK, RECURRENT, Case, assert_close, boundaries, cases, make, run_case
from explicit_adjoint import explicit
from hypothesis import HealthCheck, given, settings

from graphsafe_kernels.kda import chunk_kda, fused_kda_gate, fused_recurrent_kda

RULE = "kda"


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


@pytest.mark.parametrize("options", [{}, {"lower_bound": -5.0}], ids=["softplus", "bounded"])
@pytest.mark.parametrize("packed", [False, True], ids=["dense", "packed"])
@pytest.mark.parametrize("operator", [chunk_kda, fused_recurrent_kda])
def test_fla_1107_1294_an_omitted_A_log_is_a_zero_A_log(operator, packed, options):
    """B 1, T 73, H 1, HV 2, K 64, fp32, boundaries 0, 3, 73: equal outputs and gradients, bit for bit."""
    case = Case(RULE, batch=1, tokens=73, heads=1, group=2, key=64, value=64, A_log=False, seed=4,
                lengths=(3, 70) if packed else None, options={"use_gate_in_kernel": True, **options})
    tensors = make(case, torch.float32)
    omitted = run_case(case, operator, tensors, torch.float32)
    zeros = run_case(case, operator, {**tensors, "A_log": torch.zeros(2)}, torch.float32)
    for name, got in omitted.items():
        assert torch.equal(got, zeros[name]), name
    assert zeros["dA_log"].abs().min() > 0


@pytest.mark.parametrize("lower_bound", [None, -5.0])
def test_fla_1107_1294_the_three_paths_of_the_gate_agree(lower_bound):
    case = Case(RULE, batch=1, tokens=73, heads=1, group=2, key=64, value=64, A_log=False, seed=4,
                options={"use_gate_in_kernel": True, "lower_bound": lower_bound})
    tensors = make(case)
    outside = {n: t for n, t in tensors.items() if n != "dt_bias"}
    outside["g"] = fused_kda_gate(tensors["g"], None, tensors["dt_bias"], lower_bound, torch.float64)
    given = Case(RULE, batch=1, tokens=73, heads=1, group=2, key=64, value=64, seed=4)
    want = run_case(given, RECURRENT[RULE], outside)
    for operator in (chunk_kda, fused_recurrent_kda):
        got = run_case(case, operator, tensors)
        for name in ("o", "final_state", "dq", "dk", "dv", "dbeta", "dinitial_state"):
            assert (got[name] - want[name]).abs().max() < 1e-12, name


@pytest.mark.parametrize("state_v_first", [False, True])
@pytest.mark.parametrize("lengths", [None, (40, 0, 70, 3)], ids=["dense", "packed"])
def test_intermediate_states_are_those_at_the_start_of_every_chunk(lengths, state_v_first):
    case = Case(RULE, batch=2, tokens=70, lengths=lengths, heads=1, group=2, key=6, value=5, gate="usual", seed=6,
                options={"state_v_first": state_v_first})
    tensors = make(case)
    options = {**case.options, **({} if lengths is None else {"cu_seqlens": boundaries(lengths)})}
    with torch.inference_mode():
        o, final, states = chunk_kda(**tensors, **options, chunk_size=32, output_final_state=True,
                                     return_intermediate_states=True)
        plain = chunk_kda(**tensors, **options, chunk_size=32, output_final_state=True)
    assert torch.equal(o, plain[0])
    assert torch.equal(final, plain[1])
    tokens = ("q", "k", "v", "g", "beta")
    wanted = []
    if lengths is None:
        for chunk in range(3):
            head = {n: t[:, : chunk * 32] if n in tokens else t for n, t in tensors.items()}
            wanted.append(fused_recurrent_kda(**head, **case.options, output_final_state=True)[1])
        want = torch.stack(wanted, 1)
    else:
        for start, length, n in ((0, 40, 0), (40, 70, 2), (110, 3, 3)):
            for chunk in range(-(-length // 32)):
                head = {m: t[:, start : start + 32 * chunk] for m, t in tensors.items() if m in tokens}
                head["initial_state"] = tensors["initial_state"][n : n + 1]
                wanted.append(fused_recurrent_kda(**head, **case.options, output_final_state=True)[1])
        wanted.append(torch.zeros_like(wanted[0]))  # 7 slots, 6 chunks
        want = torch.stack(wanted, 1)
    assert states.shape == want.shape
    assert (states - want).abs().max() < 1e-12


def test_safe_gate_and_disable_recompute_change_no_bit():
    case = Case(RULE, lengths=(70, 0, 20), heads=2, key=9, value=8, gate="usual", seed=8)
    tensors = make(case)
    want = run_case(case, chunk_kda, tensors)
    for options in ({"safe_gate": True}, {"disable_recompute": True}):
        got = run_case(case, chunk_kda, tensors, **options)
        assert all(torch.equal(got[n], want[n]) for n in want), options


def test_disable_recompute_spares_the_backward_a_forward():
    case = Case(RULE, batch=1, tokens=40, seed=8)
    tensors = {n: t.requires_grad_() for n, t in make(case).items()}
    counts = []
    for disable_recompute in (False, True):
        o, _ = chunk_kda(**tensors, disable_recompute=disable_recompute)
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
            torch.autograd.grad(o.sum(), list(tensors.values()))
        counts.append(sum(e.count for e in profile.key_averages() if e.key == "aten::linalg_solve_triangular"))
    assert counts == [2, 1]
