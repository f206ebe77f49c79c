"""Right before fast: each kind of wrong result is caught, and named, before anything is timed."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from bench_fakes import small

from graphsafe import get_runtime
from graphsafe.bench.cases import GDN_NORM, KDA_GATE, SIX_SWITCHES
from graphsafe.bench.checks import Check, bound_of, check, oracle_rows, relative_error
from graphsafe.bench.modes import Prepared, prepare
from graphsafe.bench.workloads import Workload, workload_of


@pytest.fixture(scope="module")
def runtime() -> Any:
    return get_runtime("cpu")


@pytest.fixture(scope="module")
def good(runtime: Any) -> Any:
    """A workload, its arms and its oracle, all right."""
    workload = workload_of(small(direction="forward+backward"), runtime.device)
    prepared = prepare(workload, "graphsafe", runtime)
    yield workload, prepared, oracle_rows(workload, workload.oracle(workload.batch(0), torch.device("cpu")))
    prepared.close()


def checked(good: Any, **wrong: dict[str, Callable[[torch.Tensor], torch.Tensor]]) -> Check:
    """The check with results of modes replaced: ``eager_fixed={"o": spoil}``."""
    workload, prepared, oracle = good
    results = {mode: dict(found) for mode, found in prepared.results.items()}
    for mode, spoilers in wrong.items():
        for name, spoil in spoilers.items():
            results[mode.replace("_", "-")][name] = spoil(results[mode.replace("_", "-")][name].clone())
    return check(workload, Prepared(arms=prepared.arms, results=results, verify=prepared.verify), oracle)


def test_right_results_have_no_problem(good: Any) -> None:
    found = checked(good)
    assert found.problems == []
    assert found.replay is True
    assert found.live_difference == 0
    assert found.same_bits == {"eager-off": True, "eager-on": True, "graph-live": True}
    assert set(found.errors) == {
        *("o", "final_state"),
        *("dq", "dk", "dv", "dg", "dbeta", "dinitial_state"),
    }
    assert all(error < found.bounds[name] / 10 for name, error in found.errors.items())


@pytest.mark.parametrize("mode", ["eager_live", "eager_fixed", "graph_replay", "graph_live"])
@pytest.mark.parametrize("name", ["o", "dg"])
def test_a_wrong_value_is_caught_in_every_mode(good: Any, mode: str, name: str) -> None:
    found = checked(good, **{mode: {name: lambda t: t * 1.001}})
    assert any(p.startswith(f"{mode.replace('_', '-')}: {name} differs from fp64") for p in found.problems)


def test_nan_is_caught(good: Any) -> None:
    def spoil(t: torch.Tensor) -> torch.Tensor:
        t[0, 0] = torch.nan
        return t

    found = checked(good, eager_live={"o": spoil})
    assert any("eager-live: o differs from fp64 by nan" in p for p in found.problems)
    assert found.errors["o"] != found.errors["o"]
    assert found.as_dict()["errors"]["o"] is None


@pytest.mark.parametrize("leftover", [1e-30, float("nan")])
def test_a_row_behind_the_live_total_that_is_not_zero_is_caught(good: Any, leftover: float) -> None:
    def spoil(t: torch.Tensor) -> torch.Tensor:
        t[:, -1] = leftover
        return t

    found = checked(good, graph_replay={"dq": spoil})
    assert "graph-replay: rows of dq behind the live total are not zero" in found.problems


def test_a_missing_or_misshapen_result_is_caught(good: Any) -> None:
    found = checked(good, eager_live={"o": lambda t: t[:, :-1]})
    assert any("eager-live: o is [1, 63, 1, 16]" in p for p in found.problems)
    workload, prepared, oracle = good
    without = {"eager-live": {k: v for k, v in prepared.results["eager-live"].items() if k != "dq"}}
    assert "eager-live: dq is missing" in check(workload, Prepared(results=without), oracle).problems


def test_a_bit_changed_by_the_off_switch_is_caught(good: Any) -> None:
    found = checked(good, eager_off={"o": lambda t: torch.nextafter(t, t + 1)})
    assert found.same_bits["eager-off"] is False
    assert any("use_graph=False changes bits" in p for p in found.problems)


def test_a_replay_that_does_nothing_is_caught(runtime: Any) -> None:
    workload = workload_of(small(), runtime.device)
    prepared = prepare(workload, "graphsafe", runtime)
    oracle = oracle_rows(workload, workload.oracle(workload.batch(0), torch.device("cpu")))
    from graphsafe_cpu.tape import Tape

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Tape, "replay", lambda self: None)
        found = check(workload, prepared, oracle)
    prepared.close()
    assert found.replay is False
    assert any("graph-replay: GS4" in p for p in found.problems)


def test_a_wrong_slot_of_a_table_is_caught(runtime: Any) -> None:
    workload = workload_of(small(operator="tables"), runtime.device)
    prepared = prepare(workload, "graphsafe", runtime)
    oracle = oracle_rows(workload, workload.oracle(workload.batch(0), torch.device("cpu")))
    assert check(workload, prepared, oracle).problems == []
    table = prepared.results["eager-fixed"]["chunk_indices"]
    live = workload.case.live_slots
    for row, problem in ((live - 1, "chunk_indices differs from fp64"), (live, "do not hold the sentinel")):
        kept = table[row].clone()
        table[row] += 1
        assert any(f"eager-fixed: {problem}" in p or problem in p for p in check(workload, prepared, oracle).problems)
        table[row] = kept
    prepared.close()


def test_relative_error_is_the_specified_measure() -> None:
    oracle = torch.tensor([3.0, 4.0], dtype=torch.float64)
    result = torch.tensor([3.0, 4.5])
    assert relative_error(result, oracle) == pytest.approx(0.5 / 5)


@pytest.mark.parametrize(
    ("case", "name", "bound"),
    [
        ({"dtype": "float32"}, "o", 1e-4),
        ({"dtype": "bfloat16"}, "o", 0.005),
        ({"dtype": "float16"}, "dq", 0.008),
        ({"dtype": "bfloat16"}, "dbeta", 0.02),
        ({"operator": "conv", "dtype": "float32"}, "y", 1e-3),
        ({"operator": "tables"}, "chunk_indices", 0.0),
    ],
)
def test_bounds_are_those_of_the_mathematics(case: dict[str, Any], name: str, bound: float) -> None:
    assert bound_of(small(**case), name) == bound


def test_two_batches_share_their_parameters_and_nothing_else(runtime: Any) -> None:
    case = small(operator="kda", tokens=256, sequences=4, fill=1.0, options=KDA_GATE)
    workload: Workload = workload_of(case, runtime.device)
    one, other = workload.batch(0), workload.batch(1)
    assert {name for name in one if torch.equal(one[name], other[name])} == {"A_log", "dt_bias"}
    again = workload.batch(0)
    assert all(torch.equal(one[name], again[name]) for name in one)


@pytest.mark.parametrize("operator", ["gdn", "kda"])
def test_an_oracle_of_many_heads_is_formed_in_parts(operator: str, monkeypatch: pytest.MonkeyPatch) -> None:
    options = SIX_SWITCHES if operator == "kda" else GDN_NORM
    case = small(operator=operator, direction="forward+backward", heads=5, value_heads=10, options=options)
    work = workload_of(case, torch.device("cpu"))
    batch = work.batch(0)
    whole = work.oracle(batch, torch.device("cpu"))
    asked = []
    reference = Workload.oracle

    def noted(self: Workload, tensors: Any, device: torch.device) -> Any:
        asked.append(tensors["v"].shape[2])
        return reference(self, tensors, device)

    monkeypatch.setattr(Workload, "oracle", noted)
    monkeypatch.setattr("graphsafe.bench.heads.PART", 4 * case.live_tokens * case.key_dim)
    parts = work.oracle(batch, torch.device("cpu"))
    assert asked == [4, 4, 2]  # two query heads and their four value heads at a time
    assert parts.keys() == whole.keys()
    for name, want in whole.items():
        assert relative_error(parts[name], want) < 1e-13, name
