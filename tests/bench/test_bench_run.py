"""The loop: what a result holds, what goes on after a failure, what interruption leaves and resumption takes up."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from bench_fakes import Planted, small

from graphsafe import get_runtime
from graphsafe.bench import run as run_module
from graphsafe.bench.cases import Case
from graphsafe.bench.counts import peak_bytes
from graphsafe.bench.environment import environment
from graphsafe.bench.modes import CONTROLS, MODES
from graphsafe.bench.run import Bench
from graphsafe.bench.timing import Protocol
from graphsafe.errors import ArgumentError
from graphsafe_kernels.providers import registry
from graphsafe_kernels.providers.service import GRAPH_ARGUMENTS

SHORT = Protocol(samples=2, warm=0, least=2)
TABLES = Case("tables", 256, 2)


def bench(*cases: Case, **options: Any) -> Bench:
    return Bench(get_runtime("cpu"), cases, **{"protocol": SHORT, **options})


@pytest.fixture(scope="module")
def forward() -> dict[str, Any]:
    """The result of one small GDN case."""
    (result,) = bench(small()).run()["results"]
    return dict(result)


def test_a_result_holds_every_mode_and_control(forward: dict[str, Any]) -> None:
    assert forward["status"] == "ok"
    assert set(forward["times"]) == {*MODES, *CONTROLS}
    for clocks in forward["times"].values():
        assert set(clocks) == {"device", "host", "wall"}
        assert clocks["wall"]["samples"] == 2
        assert 0 < clocks["host"]["p50"] <= clocks["wall"]["p50"]


def test_launches_are_exact(forward: dict[str, Any]) -> None:
    launches = forward["launches"]
    assert launches["graph-replay"]["host"] == 1
    assert launches["graph-replay"]["device"] == forward["graph"]["launches"] == launches["eager-fixed"]["device"]
    copies = launches["update"]["host"]
    assert launches["graph-update-replay"] == {"host": 1 + copies, "device": copies + forward["graph"]["launches"]} | {
        "busy_us": None
    }
    assert launches["eager-off"] == launches["eager-live"]


def test_bytes_are_exact(forward: dict[str, Any]) -> None:
    graph = forward["graph"]
    assert graph["arena_bytes"] == graph["price_bytes"]
    tokens, states = 128 * (3 * 16 + 2) * 4, 2 * 16 * 16 * 4
    assert graph["arena_bytes"] == tokens + states + 3 * 4
    assert forward["peak_bytes"]["graph-replay"] == 0
    assert forward["figures"]["graph_bytes"] == graph["arena_bytes"] + graph["pool_bytes"]


def test_peak_bytes_follow_storages_until_they_die() -> None:
    def body() -> torch.Tensor:
        a = torch.ones(1000)
        b = a + 1
        del a
        c = b.view(10, 100) * 2
        del b
        return c.sum()

    assert peak_bytes(body, get_runtime("cpu")) == 8000


def test_slot_use_is_that_of_the_lengths(forward: dict[str, Any]) -> None:
    assert forward["utilisation"] == {
        "tokens": 0.5,
        "sequences": 0.5,
        "slots": 1 / 3,
        "live_slots": 1,
        "slots_held": 3,
    }


@pytest.mark.parametrize(
    "case",
    [
        small(operator="kda", options={"use_gate_in_kernel": True, "lower_bound": -5.0, "safe_gate": True}),
        small(operator="conv", direction="forward+backward", width=8),
        small(operator="gdn-layer", hidden=32, value_heads=2),
        small(operator="kda-layer", hidden=32, direction="forward+backward"),
        small(operator="kda-step", hidden=32, depth=1, direction="step"),
        small(states=False, chunk_size=32, options={"use_qk_l2norm_in_kernel": True}),
        TABLES,
    ],
    ids=lambda case: case.label,
)
def test_every_kind_of_case_is_measured(case: Case) -> None:
    (result,) = bench(case).run()["results"]
    assert (result["status"], result["reason"]) == ("ok", None)
    assert set(MODES) <= set(result["times"])
    assert result["checks"]["replay"] is True
    assert result["not_counted"] == {}
    assert {"eager-live", "eager-fixed", "graph-replay", "graph-update-replay"} <= set(result["launches"])


def test_conversions_of_an_adapter_are_part_of_the_record(monkeypatch: pytest.MonkeyPatch) -> None:
    planted = Planted(lambda o: o, conversions=("beta is read on the host",))
    monkeypatch.setitem(registry._providers, "planted", planted)
    noted = bench(small(), TABLES, providers=("planted", "graphsafe")).environment["providers"]
    assert noted == {"planted": ["chunk_gated_delta_rule: beta is read on the host"], "graphsafe": []}


def test_a_planted_wrong_result_is_not_timed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(registry._providers, "planted", Planted(lambda o: o * 1.01))
    ours, planted = bench(small(), providers=("graphsafe", "planted")).run()["results"]
    assert ours["status"] == "ok"
    assert ours["times"]
    assert planted["status"] == "wrong"
    assert "o differs from fp64" in planted["reason"]
    assert planted["times"] == {}
    assert planted["launches"] == {}


def test_a_provider_without_graphs_is_measured_eagerly_and_on_one_layout(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(registry._providers, "planted", Planted(lambda o: o, unsafe="its grids follow the lengths"))
    (result,) = bench(small(), providers=("planted",)).run()["results"]
    assert result["status"] == "ok"
    assert set(result["times"]) == {"eager-live", "graph-live"}
    assert result["refusals"]["eager-off"] == "it has no use_graph to switch off"
    for mode in ("eager-fixed", "graph-replay", "graph-update-replay", "eager-on"):
        assert "not graph-safe: its grids follow the lengths" in result["refusals"][mode]


def test_a_library_without_graphs_is_handed_no_graph_argument(monkeypatch: pytest.MonkeyPatch) -> None:
    handed: list[set[str]] = []

    class Recording(Planted):
        def function(self, operator: str) -> Callable[..., Any]:
            function = super().function(operator)

            def call(**arguments: Any) -> Any:
                handed.append(set(arguments))
                return function(**arguments)

            return call

    monkeypatch.setitem(registry._providers, "planted", Recording(lambda o: o, unsafe="its grids follow the lengths"))
    (result,) = bench(small(direction="forward+backward"), providers=("planted",)).run()["results"]
    assert result["status"] == "ok"
    assert handed
    assert not set.union(*handed) & set(GRAPH_ARGUMENTS)


def test_a_refusal_and_a_failure_are_rows_and_the_run_goes_on(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(o: torch.Tensor) -> torch.Tensor:
        raise RuntimeError("no kernel image")

    monkeypatch.setitem(registry._providers, "planted", Planted(broken))
    results = bench(small(), TABLES, providers=("planted", "graphsafe")).run()["results"]
    assert [(r["provider"], r["status"]) for r in results] == [
        ("planted", "failed"),
        ("graphsafe", "ok"),
        ("planted", "refused"),
        ("graphsafe", "ok"),
    ]
    assert "no kernel image" in results[0]["reason"]
    assert "it has no build_tables" in results[2]["reason"]


def test_a_provider_is_asked_for_the_cases_of_its_limit_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(registry._providers, "planted", Planted(lambda o: o))
    cases = (small(), small(heads=2, value_heads=2), small(heads=4, value_heads=4), TABLES)
    run = bench(*cases, providers=("graphsafe", "planted"), limits={"planted": ("1/1x16", "4/4x16")})
    results = run.run()["results"]
    assert [r["status"] for r in results if r["provider"] == "graphsafe"] == ["ok"] * 4
    assert [r["status"] for r in results if r["provider"] == "planted"] == ["ok", "refused", "ok", "refused"]
    said = "it was asked for cases of 1/1x16 or 4/4x16 alone"
    reasons = [r["reason"] for r in results if r["status"] == "refused"]
    assert reasons[0] == said
    assert "it has no build_tables" in reasons[1]
    assert run.environment["providers"]["planted"] == [said]


def test_what_fails_while_timed_is_a_row_without_times(monkeypatch: pytest.MonkeyPatch) -> None:
    real = run_module.measure

    def measured(arms: Any, *args: Any, **options: Any) -> Any:
        if "graphsafe eager-off" in arms:  # the first case alone has this arm
            raise RuntimeError("out of memory")
        return real(arms, *args, **options)

    monkeypatch.setattr(run_module, "measure", measured)
    results = bench(small(), TABLES).run()["results"]
    assert [(r["status"], r["reason"]) for r in results] == [("failed", "RuntimeError: out of memory"), ("ok", None)]
    assert results[0]["times"] == {}


def test_a_library_that_reads_the_host_keeps_its_eager_times(monkeypatch: pytest.MonkeyPatch) -> None:
    def reading(o: torch.Tensor) -> torch.Tensor:
        return o if float(o.sum()) == float(o.sum()) else o * 0

    monkeypatch.setitem(registry._providers, "planted", Planted(reading, unsafe="it reads the host"))
    (result,) = bench(small(), providers=("planted",)).run()["results"]
    assert set(result["times"]) == {"eager-live"}
    assert "GS101 host-read" in result["refusals"]["graph-live"]


def test_a_library_with_compiled_functions_is_captured_on_one_layout(monkeypatch: pytest.MonkeyPatch) -> None:
    compiled = torch.compile(lambda o: o * 1.0, backend="eager")
    monkeypatch.setitem(registry._providers, "planted", Planted(compiled, unsafe="its grids follow the lengths"))
    (result,) = bench(small(), providers=("planted",)).run()["results"]
    assert result["status"] == "ok"
    assert set(result["times"]) == {"eager-live", "graph-live"}


def test_an_interrupted_run_reports_and_resumes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    journal = tmp_path / "journal.jsonl"
    cases = (TABLES, small(), Case("tables", 128, 2))
    real = run_module.prepare
    stop = {"at": small().key}

    def interrupted(workload: Any, *args: Any) -> Any:
        if workload.case.key == stop["at"]:
            raise KeyboardInterrupt
        return real(workload, *args)

    monkeypatch.setattr(run_module, "prepare", interrupted)
    report = bench(*cases, journal=journal).run()
    assert report["complete"] is False
    assert [r["key"] for r in report["results"]] == [TABLES.key]
    # a killed process may leave half a line
    journal.write_text(journal.read_text() + '{"key": "hal')

    stop["at"] = TABLES.key  # what is known is not measured again
    report = bench(*cases, journal=journal, resume=True).run()
    assert report["complete"] is True
    assert [r["key"] for r in report["results"]] == [case.key for case in cases]
    stop["at"] = ""
    again = bench(*cases, journal=journal, resume=True).run()
    assert json.dumps(again["results"]) == json.dumps(report["results"])


def test_a_broken_device_ends_a_run_that_can_be_resumed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    journal = tmp_path / "journal.jsonl"
    cases = (TABLES, small(), Case("tables", 128, 2))

    def fails() -> None:
        raise RuntimeError("an illegal memory access was encountered")

    with monkeypatch.context() as patch:

        def breaking(workload: Any, name: str, runtime: Any) -> Any:
            patch.setattr(runtime, "synchronize", fails)
            raise RuntimeError("an illegal memory access was encountered")

        patch.setattr(run_module, "prepare", breaking)
        report = bench(*cases, journal=journal).run()
    assert report["complete"] is False
    assert [(r["key"], r["status"]) for r in report["results"]] == [(TABLES.key, "failed")]
    report = bench(*cases, journal=journal, resume=True).run()
    assert [r["status"] for r in report["results"]] == ["failed", "ok", "ok"]


def test_a_failure_of_one_case_leaves_the_others(monkeypatch: pytest.MonkeyPatch) -> None:
    real = run_module.prepare

    def failing(workload: Any, *args: Any) -> Any:
        if workload.case.key == TABLES.key:
            raise RuntimeError("no room")
        return real(workload, *args)

    monkeypatch.setattr(run_module, "prepare", failing)
    report = bench(TABLES, small()).run()
    assert report["complete"] is True
    assert [r["status"] for r in report["results"]] == ["failed", "ok"]


def test_a_run_is_not_resumed_under_other_conditions(tmp_path: Path) -> None:
    journal = tmp_path / "journal.jsonl"
    bench(journal=journal).run()
    with pytest.raises(ArgumentError, match="cannot be resumed under other conditions: protocol"):
        bench(journal=journal, resume=True, protocol=Protocol(samples=4)).run()
    bench(journal=journal, resume=False, protocol=Protocol(samples=4)).run()


def test_a_run_is_not_resumed_with_other_libraries(tmp_path: Path) -> None:
    journal = tmp_path / "journal.jsonl"
    first = bench(journal=journal)
    first.environment["packages"] = {"flash-linear-attention": "0.5.0"}
    first.run()
    again = bench(journal=journal, resume=True)
    again.environment["packages"] = {"flash-linear-attention": "0.6.0", "causal-conv1d": "1.6.0"}
    with pytest.raises(ArgumentError, match=r"flash-linear-attention: 0\.6\.0 against 0\.5\.0"):
        again.run()


def test_floors_of_a_resumed_run_are_formed_of_the_first_measurement(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    speeds = iter([1e12, 2e12])
    monkeypatch.setattr(run_module, "device_peaks", lambda rt: {"bytes_per_s": 4e12, "flop_per_s": next(speeds)})
    journal = tmp_path / "journal.jsonl"
    case = small(dtype="bfloat16")
    first = bench(case, journal=journal).run()
    again = bench(case, small(dtype="bfloat16", fill=1.0), journal=journal, resume=True).run()
    assert again["environment"]["peaks"] == first["environment"]["peaks"] == {"bytes_per_s": 4e12, "flop_per_s": 1e12}
    ratio = [r["floor"]["us"] / sum(w["flop"] for w in r["floor"]["directions"]) for r in again["results"]]
    assert ratio[0] == pytest.approx(ratio[1])


def test_a_run_leaves_no_graph_behind() -> None:
    import gc

    from graphsafe_cpu.runtime import CpuGraph

    gc.collect()
    before = sum(type(o) is CpuGraph for o in gc.get_objects())
    bench(TABLES).run()
    gc.collect()
    assert sum(type(o) is CpuGraph for o in gc.get_objects()) == before


def test_a_simulated_device_is_said_to_be_one(monkeypatch: pytest.MonkeyPatch) -> None:
    assert "On a CPU" in bench().environment["note"]
    runtime = SimpleNamespace(
        name="npu", device=torch.device("meta"), simulated=True, environment=lambda: {"driver": None}
    )
    monkeypatch.setattr(torch, "get_device_module", lambda device: SimpleNamespace(get_device_name=lambda device: "x"))
    assert "simulated" in environment(runtime, SHORT)["note"]


def test_beside_a_device_the_host_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    """Eager times are the host's; on a CPU it is the device."""
    on_cpu = bench().environment
    assert on_cpu["host"] is None
    runtime = SimpleNamespace(name="npu", device=torch.device("meta"), environment=lambda: {"driver": None})
    monkeypatch.setattr(torch, "get_device_module", lambda device: SimpleNamespace(get_device_name=lambda device: "x"))
    assert environment(runtime, SHORT)["host"] == on_cpu["device"]


def test_the_environment_names_no_machine_and_no_path() -> None:
    import getpass
    import socket

    text = json.dumps(bench().environment)
    assert "/" not in text.replace("+cpu", "").replace("/s", "")
    assert socket.gethostname() not in text or len(socket.gethostname()) < 4
    assert f'"{getpass.getuser()}"' not in text
