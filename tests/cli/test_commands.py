"""The command line: what it prints, where, and how it ends."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

from graphsafe.bucket import Bucket
from graphsafe.pricing import operator_price


def run(*arguments):
    return subprocess.run([sys.executable, "-m", "graphsafe", *arguments], capture_output=True, text=True, timeout=300)


@pytest.mark.parametrize("layer", ["gdn", "kda"])
def test_demo_json_is_one_object_and_nothing_else(layer):
    done = run("demo", "--device", "cpu", "--steps", "3", "--layer", layer, "--json")
    assert done.returncode == 0, done.stderr
    figures = json.loads(done.stdout)
    assert done.stdout.count("\n") == 1
    assert figures["captures"] == 1
    assert figures["losses_bitwise_equal"]
    assert figures["parameters_bitwise_equal"]
    assert figures["arena_bytes"] == figures["price_bytes"]
    assert figures["host_calls_replayed"] < 30 < figures["host_calls_eager"]
    assert len(figures["steps"]) == 3
    assert figures["layouts"] >= 2
    assert figures["steps"][-1]["loss_captured"] < figures["steps"][0]["loss_captured"]
    assert {"seconds_captured_p50", "seconds_captured_p95", "seconds_eager_p50", "seconds_eager_p95"} <= figures.keys()


def test_demo_table_names_every_figure_and_progress_goes_to_stderr():
    done = run("demo", "--device", "cpu", "--steps", "2")
    assert done.returncode == 0, done.stderr
    for text in ("bitwise equal in every step", "host calls a step, eager", "host calls a step, replayed", "captures",
                 "static memory, price", "tokens used", "slots used", "these times cannot show"):
        assert text in " ".join(done.stdout.split()), text
    assert "warm up and capture" not in done.stdout


def test_an_unknown_device_is_refused_with_what_is_known():
    done = run("demo", "--device", "abacus")
    assert done.returncode == 2
    assert "no runtime 'abacus'; known: cpu, cuda, npu" in done.stderr
    assert "Traceback" not in done.stderr
    assert done.stdout == ""


def test_what_was_typed_wrong_is_said_without_the_commands_own_source():
    done = run("lint", "model")
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr == "graphsafe: target 'model': MODULE:NAME is needed, pkg.mod:fn for example\n"
    done = run("bench", "--preset", "quik")
    assert done.stderr.startswith("graphsafe: no preset 'quik'; there are quick, ")
    assert done.stderr.count("\n") == 1
    done = run("doctor", "--rows", "capture.repaly")
    assert done.stderr.splitlines() == [
        "graphsafe: no row 'capture.repaly'",
        "Perhaps capture.replay, capture.recovery, capture.shared-pool; graphsafe doctor --list shows all.",
    ]


def test_an_error_of_the_users_own_code_has_its_line(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "model.py").write_text("def fails():\n    return [][1]\n")
    done = run("lint", "model:fails")
    assert done.returncode == 2
    assert f"where:  {tmp_path / 'model.py'}:2 in fails" in done.stderr


def test_price_totals_what_it_lists():
    done = run("price", "--bucket", "4096x32", "--heads", "32", "--json")
    priced = json.loads(done.stdout)
    assert priced["bytes"] == sum(t["bytes"] for t in priced["tensors"])
    assert priced["slots"] == 95
    assert priced["bytes"] == operator_price(Bucket(4096, 32), operator="kda", heads=32).bytes


def test_price_counts_the_workspace_of_a_kind():
    from typer.testing import CliRunner

    from graphsafe.cli.app import app

    invoke = lambda *more: CliRunner().invoke(app, ["price", "--bucket", "4096x32", "--json", *more])  # noqa: E731
    without, with_it, nvidia = (
        json.loads(invoke(*more).stdout)["bytes"] for more in ((), ("--kind", "ascend910b"), ("--kind", "sm_90"))
    )
    assert nvidia == without < with_it
    assert "ascend910b" in str(invoke("--kind", "sm_3").exception)


def test_price_refuses_a_malformed_bucket():
    done = run("price", "--bucket", "4096")
    assert done.returncode == 2
    assert "TOKENSxSEQUENCES is needed" in done.stderr


@pytest.mark.parametrize("unequal", ["losses_bitwise_equal", "parameters_bitwise_equal"])
def test_demo_ends_with_code_1_when_the_arms_differ(monkeypatch, unequal):
    from typer.testing import CliRunner

    from graphsafe.cli import demo as command
    from graphsafe.cli.app import app
    from graphsafe.demo.run import DemoFigures, StepFigures

    zeros = {name: 0 for name in DemoFigures.__dataclass_fields__}
    step = StepFigures(1.0, 1.5, 0.1, 0.1, 8, 1, 1)
    filled = {"bucket_tokens": 8, "bucket_sequences": 1, "bucket_slots": 1, "device": "cpu", "layer": "gdn"}
    equal = {"losses_bitwise_equal": True, "parameters_bitwise_equal": True, unequal: False}
    figures = DemoFigures(**{**zeros, **filled, **equal, "steps": (step,)})
    monkeypatch.setattr(command, "run_demo", lambda *_, **__: figures)
    done = CliRunner().invoke(app, ["demo"])
    assert done.exit_code == 1
    assert "DIFFERENT" in done.output


def test_the_arms_of_the_demo_are_compared_not_assumed(monkeypatch):
    from graphsafe.demo import run as demo_run

    original = demo_run._timed

    def spoilt(arm, batch, runtime):
        loss, seconds = original(arm, batch, runtime)
        return (loss if isinstance(arm, demo_run.TrainStep) else loss + 1e-6), seconds

    monkeypatch.setattr(demo_run, "_timed", spoilt)
    figures = demo_run.run_demo("gdn", "cpu", 1)
    assert not figures.losses_bitwise_equal
    assert figures.parameters_bitwise_equal
