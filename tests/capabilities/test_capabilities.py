"""The capability matrix: statuses, processes, forms, and that the rows cover every option."""

from __future__ import annotations

import importlib
import inspect
import json
import os
import signal
import sys
import time
from pathlib import Path
from typing import ClassVar

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
    begin = time.monotonic()
    hangs = "did not end" in says
    assert says in nursery.ask("cpu", "a.b", 1.0 if hangs else 50.0)["ended"]
    assert time.monotonic() - begin < 50


def test_what_a_probe_prints_is_not_its_answer(monkeypatch, capfd):
    def found_by(runtime, row):
        os.write(1, b'{"status": "failed"}\n')
        return {"status": "supported", "runtime": runtime, "row": row}

    monkeypatch.setattr(child, "found_by", found_by)
    assert nursery.ask("cpu", "a.b", 30.0) == {"found": {"status": "supported", "runtime": "cpu", "row": "a.b"}}
    assert "failed" not in capfd.readouterr().out


class _Answers:
    """A nursery that has the answers already."""

    asked: ClassVar[list[str]] = []

    def ask(self, runtime, row, time_limit):
        self.asked.append(row)
        if row == "environment":
            return {"environment": {"device": "abacus", "driver": None}}, ""
        if row == "capture.replay":
            return {"status": "supported", "text": "2 launches", "simulated": False}, ""
        if row == "capture.events":
            return {"status": "unsupported", "text": "no clock", "simulated": False, "rule": "GS106",
                    "category": "unsupported graph operator"}, ""  # fmt: skip
        return None, "the process died of SIGABRT: CUDA error: an illegal memory access was encountered"

    def close(self):
        pass


@pytest.fixture
def answers(monkeypatch):
    monkeypatch.setattr(run, "_Nursery", _Answers)
    monkeypatch.setattr(run, "_known", {})
    monkeypatch.setattr(_Answers, "asked", [])
    return _Answers.asked


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
    found = gs.capabilities("cpu", rows=["capture.replay", "chunk_kda.packed", "capture.events"], jobs=1)
    assert answers == ["environment", "chunk_kda.packed", "capture.replay", "capture.events"]
    assert [row.name for row in found] == ["capture.replay", "capture.events", "chunk_kda.packed"]


def test_an_unknown_runtime_is_refused(answers):
    with pytest.raises(gs.RuntimeMissingError, match="abacus"):
        gs.capabilities("abacus")
    assert answers == []


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
