"""Ratios of errors over seeds, by which the kernels' benchmarks tell a difference from chance."""

import importlib.util
import math
from pathlib import Path

import pytest

PATH = Path(__file__).resolve().parents[2] / "benchmarks" / "seeds.py"


@pytest.fixture(scope="module")
def seeds():
    spec = importlib.util.spec_from_file_location("seeds", PATH)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def compared(seeds, theirs):
    """What is noted of an arm whose errors are 1, 2 and 4 beside a peer with these."""
    noted = []
    case = lambda seed: type("Case", (), {"call": lambda self, arm, grad: arm(seed)})()  # noqa: E731
    arms = {"graphsafe": lambda seed: 2.0**seed, "peer": lambda seed: theirs[seed]}
    seeds.compare(case, arms, lambda case: None, lambda got, want: {"o": got}, 3, lambda **row: noted.append(row))
    return noted


def test_a_ratio_and_its_standard_error(seeds):
    *means, ratio = compared(seeds, [2.0, 4.0, 8.0])
    assert [m["mean_errors"] for m in means] == ["o 2.33e+00", "o 4.67e+00"]
    assert (ratio["ratio"], ratio["above"]) == ("o 0.500+-0.000", "nothing")


@pytest.mark.parametrize("theirs", [[0.5, 1.0, 2.0], [1.0, math.nan, 4.0]])
def test_more_than_the_peers_or_no_number_is_named(seeds, theirs):
    assert compared(seeds, theirs)[-1]["above"] == "o"


def test_chance_is_not(seeds):
    assert compared(seeds, [0.9, 2.3, 3.9])[-1]["above"] == "nothing"


def test_a_peer_that_fails_is_left_out_and_told(seeds):
    noted = compared(seeds, {0: 1.0})
    assert [row["arm"] for row in noted] == ["peer", "graphsafe"]
    assert "KeyError" in noted[0]["failed"]
