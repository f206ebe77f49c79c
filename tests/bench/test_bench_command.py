"""``graphsafe bench``: exit codes, files, tables, and that planted faults are caught by the command."""

from __future__ import annotations

import json
import os
import re
import signal
from pathlib import Path
from typing import Any

import pytest
import torch
from bench_fakes import SMALL, FakeClock, Planted, result
from typer.testing import CliRunner

from graphsafe.bench import run as run_module
from graphsafe.bench.html import render
from graphsafe.bench.report import print_report
from graphsafe.bench.timing import measure
from graphsafe.cli.bench import app
from graphsafe.errors import ArgumentError
from graphsafe_kernels.providers import registry


@pytest.fixture(autouse=True)
def in_a_folder_of_its_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "200")
    threads = torch.get_num_threads()
    (tmp_path / "mine.json").write_text(json.dumps([{"operator": "tables", "tokens": 256, "sequences": 2}]))
    (tmp_path / "gdn.json").write_text(json.dumps([SMALL]))
    yield
    torch.set_num_threads(threads)


def command(*arguments: str) -> Any:
    return CliRunner().invoke(app, ["--device", "cpu", "--samples", "2", *arguments])


def test_a_run_writes_its_files_and_prints_its_tables() -> None:
    done = command("--cases", "mine.json", "--out", "there")
    assert done.exit_code == 0, done.output
    assert {p.name for p in Path("there").iterdir()} == {"report.json", "report.html", "journal.jsonl"}
    for text in (
        "Time of a call by wall clock",
        "tables 256x2",
        "What a graph costs",
        "same bits",
        "On a CPU these times",
    ):
        assert text in done.output
    assert "1/1 0 s: tables 256x2, fwd" in done.stderr.splitlines()  # no terminal: a line as each case begins
    report = json.loads(Path("there/report.json").read_text())
    assert report["complete"] is True
    assert report["results"][0]["case"]["group"] == "mine"


def test_a_run_that_only_checks_takes_no_times() -> None:
    done = command("--cases", "gdn.json", "--check", "--compare", "graphsafe", "reference")
    assert done.exit_code == 0, done.output
    assert "checked, not timed" in done.output
    assert "Time of a call" not in done.output
    assert "who is faster" not in done.output
    report = json.loads(Path("bench-report/report.json").read_text())
    assert [(r["status"], r["times"], r["checks"]["replay"]) for r in report["results"]] == [("ok", {}, True)] * 2
    assert report["conformance"][0]["providers"]["reference"]["error"]["error"] < 1e-4
    assert "nothing was timed" in Path("bench-report/report.html").read_text()


def test_a_planted_wrong_result_is_caught_by_a_check_too(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(registry._providers, "planted", Planted(lambda o: o * 1.01))
    done = command("--cases", "gdn.json", "--check", "--provider", "planted", "--no-html")
    assert done.exit_code == 1
    assert "wrong: eager-live: o differs from fp64" in done.output


def test_json_alone_on_stdout() -> None:
    done = command("--cases", "mine.json", "--json", "--no-html")
    assert done.exit_code == 0
    assert json.loads(done.stdout)["results"][0]["status"] == "ok"
    assert not Path("bench-report/report.html").exists()


def test_a_planted_slowdown_is_caught_by_the_command(monkeypatch: pytest.MonkeyPatch) -> None:
    share = {"slower": 1.0}

    def measured(arms: Any, runtime: Any, protocol: Any, **options: Any) -> Any:
        clock = FakeClock()
        fakes = {
            name: clock.arm(name, 100 * (share["slower"] if name.endswith("eager-live") else 1), jitter=0.01, seed=i)
            for i, name in enumerate(arms)
        }
        return measure(fakes, clock, protocol, now=clock.now)

    monkeypatch.setattr(run_module, "measure", measured)
    arguments = ("--cases", "mine.json", "--no-html", "--samples", "20")
    assert command(*arguments, "--out", "stored").exit_code == 0
    same = command(*arguments, "--against", "stored/report.json")
    assert same.exit_code == 0, same.output
    assert "0 slower, 0 faster, 4 the same" in same.output

    share["slower"] = 1.10
    slower = command(*arguments, "--against", "stored/report.json")
    assert slower.exit_code == 1
    assert re.search(r"eager-live \(wall\) +100 +110 +\+10 % +slower", slower.output)
    tolerated = command(*arguments, "--against", "stored/report.json", "--tolerance", "0.15")
    assert tolerated.exit_code == 0


def test_a_planted_wrong_result_is_caught_by_the_command(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(registry._providers, "planted", Planted(lambda o: o * 1.01))
    done = command("--cases", "gdn.json", "--provider", "planted", "--no-html")
    assert done.exit_code == 1
    assert "wrong: eager-live: o differs from fp64" in done.output
    assert json.loads(Path("bench-report/report.json").read_text())["results"][0]["times"] == {}


def test_compare_prints_who_is_right_and_who_is_faster(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(registry._providers, "planted", Planted(lambda o: o * 1.01))
    done = command("--cases", "gdn.json", "--compare", "graphsafe", "reference", "--out", "a")
    assert done.exit_code == 0, done.output
    assert "graphsafe against reference: who is right, who is faster" in done.output
    wrong = command("--cases", "gdn.json", "--compare", "graphsafe", "planted", "--out", "b")
    assert wrong.exit_code == 1
    assert "wrong: eager-live: o differs" in wrong.output
    report = json.loads(Path("b/report.json").read_text())
    ((row,),) = (found["rows"] for found in report["comparison"].values())
    assert row["graphsafe"]["status"] == "ok"
    assert row["arms"] == {}
    assert report["comparison"]["graphsafe against planted"]["tally"]["right"] == {"graphsafe": 1, "planted": 0}


def test_several_providers_have_one_table(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(registry._providers, "planted", Planted(lambda o: o * 1.01))
    named = ("--compare", "graphsafe", "reference", "--provider", "planted", "--provider", "flash_qla")
    done = command("--cases", "gdn.json", *named)
    assert done.exit_code == 1  # planted is wrong
    assert "All providers: who is right" in done.output
    report = json.loads(Path("bench-report/report.json").read_text())
    assert list(report["comparison"]) == [f"graphsafe against {n}" for n in ("reference", "planted", "flash_qla")]
    (row,) = report["conformance"]
    standing = {name: found["status"] for name, found in row["providers"].items()}
    assert standing == {"graphsafe": "ok", "reference": "ok", "planted": "wrong", "flash_qla": "refused"}
    assert set(row["fastest"]["eager-live"]) <= {"graphsafe", "reference"}
    page = Path("bench-report/report.html").read_text()
    assert "All providers" in page
    assert "it runs on cuda, and the operands are on cpu" in page or "it is not usable here" in page


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_an_interruption_ends_with_130_and_a_report(number: int, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted(*_: Any) -> Any:
        os.kill(os.getpid(), number)

    monkeypatch.setattr(run_module, "prepare", interrupted)
    before = signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell's background jobs begin with it ignored
    try:
        done = command("--cases", "mine.json", "--no-html")
    finally:
        signal.signal(signal.SIGINT, before)
    assert done.exit_code == 130
    assert signal.getsignal(signal.SIGTERM) is signal.SIG_DFL
    assert "--resume" in done.output
    assert json.loads(Path("bench-report/report.json").read_text())["complete"] is False


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        (("--preset", "rcf"), "no preset 'rcf'"),
        (("--cases", "mine.json", "--only", "kda"), "no case of 1 has a label with 'kda'"),
        (("--cases", "mine.json", "--provider", "flla"), "no provider 'flla'"),
        (
            ("--cases", "mine.json", "--compare", "reference", "reference"),
            "each provider is named once",
        ),
        (("--cases", "mine.json", "--limit", "reference=gdn"), "PROVIDER=TEXT is needed, of graphsafe"),
        (("--cases", "mine.json", "--limit", "graphsafe"), "PROVIDER=TEXT is needed"),
        (("--cases", "mine.json", "--against", "mine.json"), "no report of graphsafe bench"),
    ],
)
def test_what_cannot_be_run_is_refused_before_anything_is_measured(arguments: tuple[str, ...], named: str) -> None:
    done = command(*arguments)
    assert isinstance(done.exception, ArgumentError)
    assert named in str(done.exception)
    assert not Path("bench-report").exists()


def test_list_shows_presets_and_what_each_provider_lacks() -> None:
    done = command("--list")
    assert done.exit_code == 0
    for text in ("quick", "ascendc", "flash_qla", "causal-conv1d", "usable"):
        assert text in done.output
    assert "no module fla_npu" in done.output or "no Ascend NPU" in done.output


def report(**results: Any) -> dict[str, Any]:
    environment = {
        "graphsafe": "0",
        "commit": None,
        "date": "2026-01-01 00:00 UTC",
        "runtime": "cuda",
        "device": "A <b>GPU</b>",
        "driver": "1",
        "python": "3",
        "torch": "2",
        "triton": None,
        "packages": {"fla-core": "0.6.0"},
        "threads": None,
        "cache_flush": "256 MiB",
        "served_by": {"chunk_kda": "triton"},
        "providers": {"graphsafe": [], "fla": ["its guard is lifted"]},
        "protocol": {"samples": 40, "warm": 3, "least": 10},
        "peaks": {"bytes_per_s": 4.3e12, "flop_per_s": 7.9e14},
        "note": None,
    }
    return {"environment": environment, "complete": True, "break_even": [], "results": [], **results}


def test_the_page_needs_nothing_else_and_quotes_what_was_measured() -> None:
    lost = result(status="wrong", reason="o differs <script>alert(1)</script>")
    page = render(report(results=[lost]))
    assert "<script" not in page
    assert "&lt;script&gt;" in page
    assert "A &lt;b&gt;GPU&lt;/b&gt;" in page
    assert not re.search(r"""(?:src|href)\s*=\s*["']?(?:https?:)?//""", page)
    assert "@import" not in page
    assert "its guard is lifted" in page
    assert "chunk_kda: triton" in page


def test_the_page_shows_plots_with_their_break_even() -> None:
    from graphsafe.bench.figures import break_even, figures

    results = []
    for tokens, eager, graph in ((128, 100.0, 50.0), (256, 110.0, 90.0), (512, 150.0, 180.0)):
        times = {
            "eager-live": eager,
            "eager-fixed": eager * 1.1,
            "graph-replay": graph - 5,
            "graph-update-replay": graph,
            "graph-live": graph - 10,
            "update": 5.0,
        }
        one = result(case={"tokens": tokens, "sequences": 1, "fill": 1.0}, times=times, peak_bytes={"eager-live": 1000})
        one["graph"] = {
            "warm_up_s": 1.0,
            "capture_s": 1.0,
            "launches": 3,
            "arena_bytes": 2000,
            "price_bytes": 2000,
            "pool_bytes": 3000,
        }
        results.append({**one, "figures": figures(one)})
    page = render(report(results=results, break_even=break_even(results)))
    assert page.count("<svg") == 4
    assert re.search(r"break-even 3\d\d", page)
    assert "at 3" in page
    for mode in ("eager-live", "eager-fixed", "graph-replay", "graph-update-replay"):
        assert f">{mode}<" in page


def test_a_device_has_a_table_for_each_clock(capsys: pytest.CaptureFixture[str]) -> None:
    from rich.console import Console

    one = result(times={"eager-live": 100.0, "graph-update-replay": 50.0})
    from graphsafe.bench.figures import figures

    print_report(report(results=[{**one, "figures": figures(one)}]), Console(width=160))
    printed = capsys.readouterr().out
    assert "by wall clock" in printed
    assert "by device events" in printed
    assert "2.00x" in printed
