"""Every example runs, in small, on the device under test; what it promises it checks itself and reports."""

from __future__ import annotations

import importlib
import sys
from pathlib import Path

import pytest

EXAMPLES = Path(__file__).parents[2] / "examples"


@pytest.fixture(scope="module", autouse=True)
def _importable():
    sys.path.insert(0, str(EXAMPLES))
    yield
    sys.path.remove(str(EXAMPLES))


def run(name, *arguments):
    return importlib.import_module(name).main([*arguments, "--json"])


def test_every_example_is_run_here():
    assert {p.stem for p in EXAMPLES.glob("*.py")} == {"byte_model", "serve", "train"}


@pytest.mark.parametrize(("layer", "precision", "accumulate"), [("gdn", "autocast", 2), ("kda", "bf16", 1),
                                                                ("gdn", "fp32", 1)])
def test_training_captured_eager_and_resumed_have_the_same_losses(runtime, layer, precision, accumulate):
    """The example compares all losses bit for bit and fails where two differ."""
    found = run("train", "--device", runtime.device.type, "--layer", layer, "--precision", precision, "--accumulate",
                str(accumulate), "--steps", "4", "--tokens", "96", "--sequences", "4", "--hidden", "32", "--lr", "0.01")
    assert found["captures"] == 1
    assert found["replays"] == 4
    assert len(found["losses"]) == 4
    assert found["losses"][-1] < found["losses"][0]


def test_a_loss_that_differs_fails_the_training_example(runtime):
    train = importlib.import_module("train")
    with pytest.raises(SystemExit, match="resumed: the loss of step 1"):
        train.compare("resumed", [1.0, 2.0], [1.0, 2.5])
    with pytest.raises(SystemExit, match="step 0"):
        train.compare("eager", [float("nan")], [float("nan")])


@pytest.mark.parametrize("layer", ["gdn", "kda"])
def test_serving_uses_every_bucket_counts_overflow_and_equals_prompts_alone(runtime, layer):
    """The example fails where logits differ from those of the prompt alone; every kind of round must have happened."""
    found = run("serve", "--device", runtime.device.type, "--layer", layer, "--requests", "8", "--longest", "150",
                "--buckets", "32x2,64x4", "--hidden", "32")
    assert found["captures"] == 2
    assert found["replays"] == found["rounds"] - 1
    assert found["overflows"] == {"sequences": 1}
    assert found["in pieces"] > 0
