"""The README's code runs as it is shown, and its commands are those that CI runs."""

from __future__ import annotations

import configparser
import re
from pathlib import Path

import pytest
import torch

ROOT = Path(__file__).parents[2]
README = (ROOT / "README.md").read_text()


def blocks(language):
    return re.findall(rf"```{language}\n(.*?)```", README, flags=re.DOTALL)


def test_python_blocks_run_in_order(capsys):
    torch.manual_seed(0)
    namespace: dict = {}
    for number, code in enumerate(blocks("python")):
        # its own file name, so that errors and the caller's line name the block
        exec(compile(code, f"README.md, python block {number + 1}", "exec"), namespace)
    stats = namespace["forward"].stats
    assert (stats.captures, stats.replays, dict(stats.overflows)) == (1, 1, {"tokens": 1})
    assert namespace["step"].stats.replays == 3
    assert (namespace["packed_step"].stats.captures, namespace["packed_step"].stats.replays) == (1, 3)
    assert "captures=1" in capsys.readouterr().out


def test_commands_are_tox_environments_and_ci_runs_the_tests():
    tox = configparser.ConfigParser(interpolation=None)
    tox.read(ROOT / "tox.ini")
    commands = "\n".join(blocks("sh"))
    used = re.findall(r"tox run -e (\w+)", commands)
    assert used == ["demo", "tests"]
    assert all(f"testenv:{name}" in tox for name in used)
    assert re.search(r"tox run -e [\w,]*\btests\b", (ROOT / ".ci" / "run").read_text())


def test_the_error_shown_is_the_error_raised():
    import graphsafe as gs

    shown = next(b for b in blocks("text") if "GS101" in b)
    runtime = gs.get_runtime("cpu")
    x = torch.ones(2)

    def without_places(text):
        return re.sub(r"where: .*|at \S+:\d+ in \w+", "", text).strip()

    with pytest.raises(gs.UnsupportedError) as caught, runtime.capture():
        x.sum().item()
    assert without_places(shown) == without_places(str(caught.value))
