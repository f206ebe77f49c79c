"""``graphsafe explain``: a code, a text or a rule; text and JSON; exit codes."""

from __future__ import annotations

import json

import pytest
from typer.testing import CliRunner

from graphsafe.cli.app import app


def explain(*args):
    return CliRunner().invoke(app, ["explain", *args])


@pytest.mark.parametrize(
    ("problem", "rule", "device"),
    [
        (["901"], "GS110", "cuda"),
        (["700"], "GS501", "cuda"),
        (["EI0002"], "GS601", "npu"),
        (["HCCL", "function", "error"], "GS601", "npu"),
        (["CUDA", "out", "of", "memory"], "GS501", "cuda"),
        (["Trying to backward through the graph a second time"], "GS203", "any"),
        (["GS101"], "GS101", "any"),
        (["host-read"], "GS101", "any"),
    ],
)
def test_json_has_rule_category_meaning_remedy_and_source(problem, rule, device):
    done = explain(*problem, "--json")
    assert done.exit_code == 0, done.output
    found = json.loads(done.stdout)["explanations"]
    assert [(f["rule"], f["device"]) for f in found] == [(rule, device)]
    assert all(f[key] for f in found for key in ("name", "category", "meaning", "remedy", "source"))


def test_text_says_the_same():
    done = explain("904")
    assert done.exit_code == 0, done.output
    for word in ("cuda", "GS110 not-capturable", "(904)", "wait_stream", "cudaError_t"):
        assert word in done.output


def test_what_is_not_known_is_code_1():
    done = explain("31337")
    assert done.exit_code == 1
    assert "nothing is known about '31337'" in done.output
    assert json.loads(explain("31337", "--json").stdout) == {"problem": "31337", "explanations": []}
