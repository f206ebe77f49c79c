"""The capability matrix: statuses, processes, forms, and that the rows cover every option."""

from __future__ import annotations

import contextlib
import importlib
import inspect
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from typer.testing import CliRunner

import graphsafe as gs
from graphsafe.capabilities import Matrix, Row, child, nursery, run
from graphsafe.capabilities.probe import Missing, Probe, Wrong, probes
from graphsafe.capabilities.probes.operators import OPERATORS
from graphsafe.cli.app import app
from graphsafe.errors import error

PAGES = sorted((Path(__file__).parents[2] / "docs" / "capabilities").glob("[!R]*.md"))


# What a probe's end means.


def _raise(problem):
    raise problem


@pytest.mark.parametrize(
    ("body", "status", "rule", "text"),
    [
        (lambda rt: None, "supported", None, ""),
        (lambda rt: "two launches", "supported", None, "two launches"),
        (lambda rt: _raise(Missing("no triton here")), "unsupported", "GS106", "no triton here"),
        (lambda rt: _raise(error("host-read", "item() reads x")), "unsupported", "GS101", "item() reads x"),
        (lambda rt: _raise(error("collective", "waits")), "unsupported", "GS601", "waits"),
        (lambda rt: _raise(error("replay-differs", "x[0] is 1")), "failed", "GS403", "x[0] is 1"),
        (lambda rt: _raise(error("input-died", "gone")), "failed", "GS202", "gone"),
        (lambda rt: _raise(Wrong("padding is not zero")), "failed", "GS403", "padding is not zero"),
        (lambda rt: _raise(ValueError("seven")), "failed", None, "ValueError: seven"),
        (lambda rt: _raise(RuntimeError("CUDA error: 901")), "failed", "GS110", "RuntimeError: CUDA error: 901"),
    ],
)
def test_how_a_probe_ends_is_its_status(monkeypatch, body, status, rule, text):
    monkeypatch.setattr(child, "probes", lambda: {"a.b": Probe("a.b", "in words", body)})
    found = child.found_by("cpu", "a.b")
    assert (found["status"], found.get("rule"), found["text"]) == (status, rule, text)
    assert found["simulated"] is False
    assert bool(found.get("category")) == (rule is not None)
    assert ("explanation" in found) == ("901" in text)


def test_no_path_of_a_machine_is_in_a_row(monkeypatch):
    text = "aten::nonzero has a shape that depends on data (made by aten::lt.Tensor at /home/me/x.py:62 in f)"
    body = lambda rt: _raise(error("data-dependent-shape", text))  # noqa: E731
    monkeypatch.setattr(child, "probes", lambda: {"a.b": Probe("a.b", "in words", body)})
    said = child.found_by("cpu", "a.b")["text"]
    assert said == "aten::nonzero has a shape that depends on data (made by aten::lt.Tensor)"


def test_a_simulated_device_is_marked(monkeypatch):
    monkeypatch.setattr(child, "probes", lambda: {"a.b": Probe("a.b", "in words", lambda rt: None)})
    monkeypatch.setattr(gs.get_runtime("cpu"), "simulated", True, raising=False)
    assert child.found_by("cpu", "a.b")["simulated"] is True


# Processes.


@pytest.mark.parametrize(
    ("body", "says"),
    [
        (lambda: os.kill(os.getpid(), signal.SIGSEGV), "died of SIGSEGV"),
        (lambda: time.sleep(60), "did not end within 1 seconds and was killed"),
        (lambda: sys.exit(3), "ended with code 1: SystemExit: 3"),
        (lambda: _raise(KeyError("lost")), "KeyError: 'lost'"),
    ],
    ids=["crash", "hang", "exit", "error"],
)
def test_a_process_that_does_not_answer_is_told_by_how_it_ended(monkeypatch, body, says):
    monkeypatch.setattr(child, "found_by", lambda runtime, row: body())
    hangs = "did not end" in says
    (answer,) = nursery.answers("cpu", ["a.b"], 1.0 if hangs else 50.0, jobs=1)
    assert says in answer["ended"]
    assert answer["seconds"] < 50


def test_what_a_probe_prints_is_not_its_answer(monkeypatch, capfd):
    def found_by(runtime, row):
        os.write(1, b'{"status": "failed"}\n')
        return {"status": "supported", "runtime": runtime, "row": row}

    monkeypatch.setattr(child, "found_by", found_by)
    (answer,) = nursery.answers("cpu", ["a.b"], 30.0, jobs=1)
    assert answer["found"] == {"status": "supported", "runtime": "cpu", "row": "a.b"}
    assert "failed" not in capfd.readouterr().out


def test_each_probe_has_a_process_of_its_own_and_as_many_run_at_a_time_as_asked_for(monkeypatch):
    def found_by(runtime, row):
        begin = time.monotonic()
        time.sleep(0.2)
        return {"process": os.getpid(), "begin": begin, "end": time.monotonic()}

    monkeypatch.setattr(child, "found_by", found_by)
    found = [answer["found"] for answer in nursery.answers("cpu", [f"a.{i}" for i in range(7)], 50.0, jobs=3)]
    assert len({one["process"] for one in found}) == 7
    together = [sum(other["begin"] < one["end"] and one["begin"] < other["end"] for other in found) for one in found]
    assert max(together) > 1
    assert max(sum(other["begin"] <= one["begin"] < other["end"] for other in found) for one in found) <= 3


def test_a_crash_leaves_the_other_rows_alone(monkeypatch):
    monkeypatch.setattr(child, "found_by", lambda runtime, row: os.abort() if row == "a.bad" else {"status": row})
    found = {a["row"]: a for a in nursery.answers("cpu", ["a.one", "a.bad", "a.two"], 50.0, jobs=2)}
    assert "died of SIGABRT" in found["a.bad"]["ended"]
    assert [found[row]["found"]["status"] for row in ("a.one", "a.two")] == ["a.one", "a.two"]


def _gone(process):
    try:
        os.kill(process, 0)
    except ProcessLookupError:
        return True
    stat = Path(f"/proc/{process}/stat")  # one that ended and that nobody has waited for is gone too
    return stat.exists() and stat.read_text().rpartition(")")[2].split()[0] == "Z"


def test_no_child_outlives_who_asked_nor_what_it_started(monkeypatch, tmp_path):
    note = tmp_path / "processes"

    def found_by(runtime, row):
        started = subprocess.Popen(["sleep", "600"])
        with note.open("a") as file:
            file.write(f"{os.getpid()} {started.pid}\n")
        if row == "a.waits":
            time.sleep(600)
        return {}

    monkeypatch.setattr(child, "found_by", found_by)
    with contextlib.closing(nursery.answers("cpu", ["a.ends", "a.waits"], 600.0, jobs=2)) as answered:
        assert next(answered)["row"] == "a.ends"
        end = time.monotonic() + 50
        while len(note.read_text().split()) < 4 and time.monotonic() < end:
            time.sleep(0.02)
    processes = [int(word) for word in note.read_text().split()]
    assert len(processes) == 4
    while not all(map(_gone, processes)) and time.monotonic() < end:
        time.sleep(0.02)
    assert [p for p in processes if not _gone(p)] == []


@pytest.mark.parametrize("runtime", ["cpu", "cuda"])
def test_what_is_imported_before_the_fork_starts_no_device_and_no_thread(runtime):
    """A process that has asked a driver for its devices cannot fork children that use them."""
    program = f"""
import gc, os, sys, threading, torch
asked, threads = [], len(os.listdir("/proc/self/task")) if os.path.exists("/proc/self/task") else 0
for name in ("is_available", "device_count", "init", "_lazy_init", "current_device", "get_device_properties"):
    setattr(torch.cuda, name, lambda *args, name=name: asked.append(name))
from graphsafe.capabilities import nursery
nursery.preload({runtime!r}, 155)
assert asked == [], asked
assert not threads or len(os.listdir("/proc/self/task")) == threads
assert threading.enumerate() == [threading.main_thread()]
assert gc.get_freeze_count()
adapters = [m for m in sys.modules if m.split(".")[0] in ("graphsafe_cpu", "graphsafe_cuda", "graphsafe_npu")]
assert adapters == [], adapters
assert ("graphsafe_kernels.tables.kernels" in sys.modules) == ({runtime!r} != "cpu")
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stderr


def fake_answers(asked):
    """Answers of the process that probes, as they would come."""

    def ask(runtime, rows, time_limit, jobs):
        for row in rows:
            asked.append(row)
            told = {"ended": "the process died of SIGABRT: CUDA error: an illegal memory access was encountered"}
            if row == "environment":
                told = {"found": {"environment": {"device": "abacus", "driver": None}}}
            elif row == "capture.replay":
                told = {"found": {"status": "supported", "text": "2 launches", "simulated": False}}
            elif row == "capture.events":
                told = {"found": {"status": "unsupported", "text": "no clock", "simulated": False, "rule": "GS106",
                                  "category": "unsupported graph operator"}}  # fmt: skip
            yield {"row": row, "seconds": 1.0, **told}

    return ask


@pytest.fixture
def answers(monkeypatch):
    asked = []
    monkeypatch.setattr(run, "_ask", fake_answers(asked))
    monkeypatch.setattr(run, "_known", {})
    return asked


def test_a_crash_is_a_failed_row_with_category_text_and_explanation(answers):
    row = gs.capabilities("cpu", rows=["capture.recovery"])["capture.recovery"]
    assert (row.status, row.rule) == ("failed", "GS501")
    assert row.category == "pre-existing eager backend failure"
    assert "SIGABRT" in row.text
    assert "cudaErrorIllegalAddress (700)" in row.explanation


def test_require_names_what_is_lacking_and_remembers(answers):
    gs.require("capture.replay", runtime="cpu")
    asked = len(answers)
    with pytest.raises(gs.UnsupportedError) as caught:
        gs.require("capture.replay", "capture.events", "capture.recovery", runtime="cpu")
    assert caught.value.rule.id == "GS106"
    assert "capture.events: unsupported: no clock" in caught.value.what
    assert "capture.recovery: failed: the process died of SIGABRT" in caught.value.what
    assert "capture.replay" not in caught.value.what
    assert sorted(answers[asked:]) == ["capture.events", "capture.recovery", "environment"]
    asked = len(answers)
    gs.require("capture.replay", runtime="cpu")
    assert len(answers) == asked


def test_a_row_that_does_not_exist_is_refused_before_anything_is_probed(answers):
    for ask in (lambda: gs.require("capture.repaly", runtime="cpu"), lambda: gs.capabilities("cpu", rows=["repaly"])):
        with pytest.raises(gs.ArgumentError):
            ask()
    with pytest.raises(gs.ArgumentError, match=r"capture\.replay"):
        gs.require("capture.repaly", runtime="cpu")
    with pytest.raises(gs.ArgumentError):
        gs.require(runtime="cpu")
    assert answers == []


def test_rows_that_compile_what_others_share_come_first_and_the_matrix_keeps_its_order(answers):
    rows = ["capture.replay", "chunk_kda.packed", "chunk_kda.dense", "layers.GatedDeltaNet", "capture.events"]
    found = gs.capabilities("cpu", rows=rows, jobs=1)
    assert answers == [
        "environment", "chunk_kda.packed", "layers.GatedDeltaNet", "chunk_kda.dense", "capture.replay",
        "capture.events",
    ]  # fmt: skip
    assert [row.name for row in found] == [
        "capture.replay", "capture.events", "chunk_kda.packed", "chunk_kda.dense", "layers.GatedDeltaNet",
    ]  # fmt: skip
    everything = [probed.name for probed in run.selected(())]
    assert sorted(run._in_turn(everything)) == sorted(everything)


def test_rows_that_come_before_the_environment_wait_for_it(monkeypatch):
    def ask(runtime, rows, time_limit, jobs):
        told = list(fake_answers([])(runtime, rows, time_limit, jobs))
        yield from (*told[1:], told[0])

    monkeypatch.setattr(run, "_ask", ask)
    seen = []
    gs.capabilities("cpu", rows=["capture"], on_row=lambda matrix, row: seen.append(matrix.environment["device"]))
    assert set(seen) == {"abacus"}


def test_a_runtime_that_does_not_start_is_told_by_its_environment(monkeypatch):
    def ask(runtime, rows, time_limit, jobs):
        yield {"row": "environment", "seconds": 1.0, "ended": "the process died of SIGSEGV"}
        pytest.fail("nothing is probed after that")

    monkeypatch.setattr(run, "_ask", ask)
    with pytest.raises(gs.RuntimeMissingError, match="SIGSEGV"):
        gs.capabilities("cpu")


def test_an_unknown_runtime_is_refused(answers):
    with pytest.raises(gs.RuntimeMissingError, match="abacus"):
        gs.capabilities("abacus")
    assert answers == []


def test_a_runtime_that_is_not_here_says_what_it_lacks(monkeypatch):
    def ask(runtime, rows, time_limit, jobs):
        yield {"row": "environment", "seconds": 1.0, "found": child.found_by("abacus", "environment")}

    monkeypatch.setattr(run, "_ask", ask)
    with pytest.raises(gs.RuntimeMissingError) as caught:
        gs.capabilities("cuda", rows=["capture"])
    assert caught.value.what.startswith("no runtime 'abacus'; known: cpu")
    assert caught.value.remedy


# Forms.


def matrix():
    rows = [
        Row("capture.replay", "replays", "supported", "2 launches", simulated=True),
        Row("capture.events", "times | it", "failed", "a\nb", "GS501", "pre-existing eager backend failure", "It is.",
            simulated=True),
    ]  # fmt: skip
    return Matrix("npu", {"device": "abacus (simulated)", "driver": None}, rows)


def test_every_row_of_a_simulated_device_says_so_in_every_form():
    told = matrix().as_dict()
    assert told["simulated"] is True
    assert [row["simulated"] for row in told["rows"]] == [True, True]
    page = matrix().markdown()
    assert page.startswith("# Capabilities of `npu`, simulated\n")
    assert page.count("(simulated) |") == 3
    assert "| `capture.events` | times \\| it | failed (simulated) | GS501: pre-existing eager" in page
    assert "a b It is. |" in page
    assert "| driver | - |" in page
    assert told["counts"] == {"supported": 1, "unsupported": 0, "failed": 1}
    with pytest.raises(KeyError, match=r"capture\.events"):
        matrix()["nothing"]


@pytest.mark.parametrize("form", ["--json", "--markdown", None])
def test_the_command_prints_each_form_and_fails_where_a_row_failed(monkeypatch, form):
    monkeypatch.setattr("graphsafe.cli.doctor.capabilities", lambda *args, **kwargs: matrix())
    done = CliRunner().invoke(app, ["doctor", *([form] if form else [])], env={"COLUMNS": "200"})
    assert done.exit_code == 1
    if form == "--json":
        assert json.loads(done.stdout) == matrix().as_dict()
    elif form == "--markdown":
        assert done.stdout == matrix().markdown()
    else:
        for word in ("capture.events", "failed (simulated)", "GS501", "It is.", "1 supported, 0 unsupported, 1 failed"):
            assert word in done.stdout


def test_the_list_probes_nothing(answers):
    done = CliRunner().invoke(app, ["doctor", "--list", "--rows", "tables"])
    assert done.exit_code == 0
    assert [line.partition(":")[0] for line in done.stdout.splitlines()] == [
        "tables.int32", "tables.int64", "tables.lowest-level",
    ]  # fmt: skip
    assert answers == []


@pytest.mark.parametrize("name", ["page.md", "page.json"])
def test_a_file_has_the_rows_so_far(answers, tmp_path, name):
    rows = ["--rows", "capture.replay", "--rows", "capture.events", "--jobs", "1"]
    done = CliRunner().invoke(app, ["doctor", "--device", "cpu", "--out", str(tmp_path / name), *rows])
    assert done.exit_code == 0, done.output
    assert "2/2 capture.events: unsupported" in done.stderr
    text = (tmp_path / name).read_text()
    if name.endswith("json"):
        assert [row["name"] for row in json.loads(text)["rows"]] == ["capture.replay", "capture.events"]
    else:
        assert text.startswith("# Capabilities of `cpu`")
        assert "| `capture.events` |" in text


# The real thing.


def test_each_device_is_probed_and_a_failed_capture_harms_no_other_row(graphsafe_device):
    rows = ["metadata.nonzero", "capture.recovery", "capture.replay", "tables.int32"]
    found = gs.capabilities(graphsafe_device, rows=rows, jobs=2)
    assert {row.name: (row.status, row.rule) for row in found} == {
        "capture.replay": ("supported", None),
        "capture.recovery": ("supported", None),
        "metadata.nonzero": ("unsupported", "GS102"),
        "tables.int32": ("supported", None),
    }
    gs.require("capture.replay", runtime=graphsafe_device)


def test_the_command_probes_this_machine():
    rows = ["capture.replay", "metadata.nonzero", "tables.int32", "causal_conv1d.packed", "distributed.*"]
    asked = [part for row in rows for part in ("--rows", row)]
    done = CliRunner().invoke(app, ["doctor", "--device", "cpu", "--json", *asked])
    assert done.exit_code == 0, done.output
    found = json.loads(done.stdout)
    assert found["environment"]["torch"]
    assert {row["name"]: (row["status"], row["rule"]) for row in found["rows"]} == {
        "capture.replay": ("supported", None),
        "metadata.nonzero": ("unsupported", "GS102"),
        "tables.int32": ("supported", None),
        "causal_conv1d.packed": ("supported", None),
        "distributed.collective": ("unsupported", "GS601"),
    }


@pytest.mark.parametrize("name", OPERATORS)
def test_every_parameter_of_an_operator_has_a_row(name):
    operator = OPERATORS[name]
    function = getattr(importlib.import_module(operator.module), name)
    parameters = {p.name for p in inspect.signature(function).parameters.values() if p.kind is not p.VAR_KEYWORD}
    shown = set(operator.required).union(*(option.parameters() for option in operator.rows.values()))
    assert parameters - shown == set()
    assert shown - parameters == set()


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_committed_pages_have_the_rows_of_the_command(page):
    text = page.read_text(encoding="utf-8")
    assert "Written by `graphsafe doctor --device" in text
    found = [line.split("`")[1] for line in text.splitlines() if line.startswith("| `")]
    known = list(probes())
    assert [name for name in known if name in found] == found
    assert len(found) >= 0.9 * len(known), "too old: write it anew"
    if page.stem == "cpu":
        assert found == known
