"""The Python of the pages in docs/ runs as it is shown; the README's has a test of its own.

A page whose code is a file of the reader's, or a fragment, is run the way its text says.
"""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import graphsafe as gs
from graphsafe_kernels.integrations import fla_names

DOCS = Path(__file__).parents[2] / "docs"
TESTED = {"bench.md", "capabilities/README.md", "lint.md", "models.md", "testing.md"}


def blocks(page, language="python"):
    return re.findall(rf"```{language}\n(.*?)```", (DOCS / page).read_text(encoding="utf-8"), flags=re.DOTALL)


def run(page, **names):
    """The names that all Python of a page defines, one block after the other."""
    torch.manual_seed(0)
    namespace = dict(names)
    for number, code in enumerate(blocks(page)):
        # its own file name, so that errors and the caller's line name the block
        exec(compile(code, f"docs/{page}, python block {number + 1}", "exec"), namespace)
    return namespace


def test_every_page_with_python_is_run_here():
    pages = {str(p.relative_to(DOCS)) for p in DOCS.rglob("*.md")}
    assert {page for page in pages if blocks(page)} == TESTED


def test_models():
    try:
        names = run("models.md")
    finally:
        fla_names.remove_fla_names()
    assert names["prefill"].stats.replays == 1
    assert names["chunk_gated_delta_rule"].__module__.startswith("graphsafe_kernels")


def test_capabilities():
    assert run("capabilities/README.md")["matrix"]["tables.int32"].status == "supported"


def test_providers():
    """With a provider that this machine has in the place of the one that is shown."""
    (code,) = blocks("bench.md")
    assert code.count('provider="fla"') == 1
    q, k, v = (torch.randn(1, 8, 1, 8) for _ in range(3))
    names = {"q": q, "k": k, "v": v, "g": -torch.rand(1, 8, 1, 8), "beta": torch.rand(1, 8, 1)}
    exec(compile(code.replace('provider="fla"', 'provider="graphsafe"'), "docs/bench.md", "exec"), names)
    assert names["o"].shape == v.shape
    with pytest.raises(gs.UnsupportedError, match="fla"):
        exec(compile(code, "docs/bench.md", "exec"), names)


def test_lint(tmp_path, monkeypatch):
    """The model is clean by each of the commands shown, and a loss that is allowed is no finding."""
    program, allowed = blocks("lint.md")
    (tmp_path / "model.py").write_text(program)
    (tmp_path / "allowed.py").write_text(
        "import torch\n\ndef step():\n    total = torch.ones(2).sum()\n" + "".join(f"    {x}\n" for x in
                                                                                allowed.splitlines()))
    commands = [line.split("#")[0].split() for line in blocks("lint.md", "sh")[0].splitlines()]
    assert len(commands) == 3
    for command in [*commands, ["graphsafe", "lint", "allowed:step"]]:
        done = subprocess.run([sys.executable, "-m", *command], capture_output=True, text=True, cwd=tmp_path)
        assert done.returncode == 0, done.stdout + done.stderr


def test_a_captured_test(tmp_path):
    """As a project's own test, with a layer of this one."""
    conftest, test = blocks("testing.md")
    (tmp_path / "conftest.py").write_text(conftest)
    layer = ("from graphsafe_kernels.layers import GatedDeltaNet\n\n"
             "class MyLayer(GatedDeltaNet):\n    def __init__(self):\n"
             "        super().__init__(hidden_size=64, head_dim=8, num_heads=2)\n\n"
             "    def forward(self, x, **layout):\n        return super().forward(x, use_graph=True, **layout)[0]\n\n")
    (tmp_path / "test_mine.py").write_text(layer + test)
    done = subprocess.run([sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "test_mine.py"],
                          capture_output=True, text=True, cwd=tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "1 passed" in done.stdout
