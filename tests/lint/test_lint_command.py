"""``graphsafe lint``: text for people, JSON for scripts, exit codes for CI."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

HERE = Path(__file__).parent
SOURCE = (HERE / "lint_programs.py").read_text().splitlines()
READ = next(number for number, text in enumerate(SOURCE, 1) if "cu_seqlens.tolist()" in text)


def run(*args):
    environment = {**os.environ, "COLUMNS": "200", "OMP_NUM_THREADS": "1"}
    return subprocess.run(
        [sys.executable, "-m", "graphsafe", "lint", *args], capture_output=True, text=True, cwd=HERE, env=environment
    )


def test_clean_is_code_0():
    done = run("lint_programs:no_arguments")
    assert done.returncode == 0, done.stderr
    assert "0 findings" in done.stdout


def test_findings_are_code_1_in_a_table_with_file_line_and_remedy():
    done = run("lint_programs:varlen", "--arguments", "packed")
    assert done.returncode == 1, done.stderr
    for text in (f"lint_programs.py:{READ}", "GS101 host-read", "unsupported graph operator", "argument 'cu_seqlens'",
                 "Keep the value on the device", "2 findings", "2 layouts"):  # fmt: skip
        assert text in done.stdout, (text, done.stdout)


def test_json_is_one_object_and_what_the_target_prints_is_not_in_it():
    done = run("lint_programs:repeats", "--arguments", "lint_programs:arguments", "--json")
    assert done.returncode == 1, done.stderr
    report = json.loads(done.stdout)
    assert report["target"] == "lint_programs:repeats"
    assert report["clean"] is False
    (finding,) = report["findings"]
    assert finding["rule"] == "GS101"
    assert finding["count"] == 2
    assert finding["file"].endswith("lint_programs.py")
    assert finding["category"] == "unsupported graph operator"
    assert "tensor([1., 2., 3., 4.])" in done.stderr


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (("lint_programs",), "MODULE:NAME is needed"),
        (("no_such_module:fn",), "'no_such_module' cannot be imported: ModuleNotFoundError"),
        (("lint_programs:no_such_name",), "has no 'no_such_name'"),
        (("lint_programs:weight",), "which cannot be called"),
        (("lint_programs:fails", "--arguments", "arguments"), "the body failed eagerly: RuntimeError"),
        (("lint_programs:fails", "--arguments", "Counts"), "a tuple or a dict of arguments is needed"),
        (("lint_programs:fails",), "do not fit"),
    ],
)
def test_what_cannot_be_run_is_code_2(arguments, says):
    done = run(*arguments)
    assert done.returncode == 2, done.stdout
    assert says in done.stderr
    assert "Traceback" not in done.stderr
