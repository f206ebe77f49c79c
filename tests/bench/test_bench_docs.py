"""``docs/bench.md`` names what exists: every preset, arm, derived figure, bound and provider."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
from bench_fakes import result, small

from graphsafe.bench.cases import Case
from graphsafe.bench.checks import bound_of
from graphsafe.bench.figures import figures
from graphsafe.bench.modes import CONTROLS, MODES
from graphsafe.bench.presets import PRESETS
from graphsafe_kernels.providers import ENVIRONMENT_VARIABLE, known_providers

TEXT = (Path(__file__).parents[2] / "docs" / "bench.md").read_text()


def test_presets_arms_and_providers_are_those_that_exist() -> None:
    section = TEXT[TEXT.index("| preset |") : TEXT.index("## Modes")]
    assert re.findall(r"^\| `(\w+)` \|", section, flags=re.MULTILINE) == list(PRESETS)
    section = TEXT[TEXT.index("| arm |") : TEXT.index("## Right before fast")]
    arms = re.findall(r"^\| ([a-z][a-z-]+)(?: \(control\))? \|", section, flags=re.MULTILINE)
    assert arms == ["arm", *MODES, *CONTROLS]
    assert all(f"`{name}`" in TEXT for name in known_providers())
    assert ENVIRONMENT_VARIABLE in TEXT


def test_the_example_of_ones_own_cases_can_be_measured() -> None:
    (block,) = re.findall(r"```json\n(.*?)```", TEXT, flags=re.DOTALL)
    cases = [Case.from_dict(item) for item in json.loads(block)]
    assert [case.operator for case in cases] == ["gdn", "conv"]


@pytest.mark.parametrize(
    "figure",
    sorted(f for f in set(figures(result())) - {"speedup", "update_us", "arena_over_price"} if "certain" not in f),
)
def test_every_figure_has_its_definition(figure: str) -> None:
    written = {
        "graph_bytes": "arena + pool of the graph",
        "eager_peak_bytes": "what eager-live holds at its peak",
        "memory_overhead_bytes": "graph memory overhead",
    }
    assert written.get(figure, f"`{figure}`") in TEXT


@pytest.mark.parametrize(
    ("case", "name", "row", "column"),
    [
        ({}, "o", "GDN, KDA: o, final state", 0),
        ({"dtype": "bfloat16"}, "o", "GDN, KDA: o, final state", 1),
        ({"dtype": "bfloat16"}, "dq", "their dq, dk, dv, dinitial_state", 1),
        ({"dtype": "bfloat16"}, "dg", "their dg, dbeta, dA_log, ddt_bias", 1),
        ({"operator": "conv"}, "y", "convolution, all", 0),
        ({"operator": "gdn-layer", "dtype": "bfloat16"}, "y", "layers and steps: output, loss", 1),
        ({"operator": "gdn-layer", "dtype": "bfloat16"}, "dx", "their gradients", 1),
    ],
)
def test_bounds_are_those_in_force(case: dict[str, str], name: str, row: str, column: int) -> None:
    cells = next(line for line in TEXT.splitlines() if line.startswith(f"| {row} |")).split("|")
    assert float(cells[2 + column]) == bound_of(small(**case), name)
