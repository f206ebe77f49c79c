"""The compile check: it needs no device, and it fails where a kernel spills or does not compile."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import textwrap

import pytest

from graphsafe_kernels.shipped import MODULES


def run(*arguments, **environment):
    env = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"} | environment
    return subprocess.run([sys.executable, *arguments], capture_output=True, text=True, env=env, timeout=900)


def test_every_shipped_configuration_compiles_without_spills():
    done = run("-m", "graphsafe_kernels.compilecheck", "--target", "sm_90", "--json")
    rows = json.loads(done.stdout)
    assert [r for r in rows if not r["ok"]] == []
    assert done.returncode == 0
    assert all(r["registers"] > 0 for r in rows)
    names = {r["kernel"] for r in rows}
    assert {"chunk_tables_kernel", "conv_forward_kernel", "conv_backward_kernel", "conv_reduce_kernel"} <= names
    assert len(MODULES) <= len(names)


SCRIPT = textwrap.dedent(
    """
    import sys
    import triton, triton.language as tl
    from graphsafe_kernels import compilecheck
    from graphsafe_kernels.shipped import Shipped

    @triton.jit
    def spilling_kernel(x, N: tl.constexpr):
        i = tl.arange(0, N)
        v = tl.load(x + i)
        for r in range(8):
            v += tl.cumsum(v, 0)
            tl.store(x + r * N + i, v)

    @triton.jit
    def broken_kernel(x, N: tl.constexpr):
        tl.store(x, undefined_name)

    compilecheck.configurations = lambda policy: [Shipped({kernel}, "N", {{"x": "*fp32"}}, {{"N": {n}}}, warps=1)]
    sys.argv = ["compilecheck", "--target", "sm_90"]
    compilecheck.app()
    """
)


@pytest.mark.parametrize(
    ("kernel", "n", "code", "word"),
    [("spilling_kernel", 64, 0, "0 of them"), ("spilling_kernel", 16384, 1, "1 of them"),
     ("broken_kernel", 64, 1, "CompilationError")],
    ids=["clean", "spills", "broken"],
)  # fmt: skip
def test_the_exit_status(tmp_path, kernel, n, code, word):
    script = tmp_path / "check.py"
    script.write_text(SCRIPT.format(kernel=kernel, n=n))
    done = run(str(script), COLUMNS="200")
    assert done.returncode == code, done.stderr
    assert word in done.stdout


def test_an_unknown_target_is_named():
    done = run("-m", "graphsafe_kernels.compilecheck", "--target", "sm_3")
    assert done.returncode == 2
    assert "sm_3" in done.stderr
    assert "sm_90" in done.stderr


def test_interpreted_kernels_are_refused():
    done = run("-m", "graphsafe_kernels.compilecheck", "--target", "sm_90", TRITON_INTERPRET="1")
    assert done.returncode == 2
    assert "TRITON_INTERPRET" in done.stderr
