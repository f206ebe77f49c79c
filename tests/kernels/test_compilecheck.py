"""The compile check: it needs no device, and it fails where a kernel spills, does not fit or does not compile.

That every shipped configuration passes is not tested here but by the command itself, in ``tox -e compile``.
"""

from __future__ import annotations

import os
import subprocess
import sys
import textwrap

import pytest

from graphsafe_kernels.policy import KINDS
from graphsafe_kernels.shipped import MODULES, configurations


def run(*arguments, **environment):
    env = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"} | environment
    return subprocess.run([sys.executable, *arguments], capture_output=True, text=True, env=env, timeout=900)


@pytest.mark.parametrize("target", ["sm_80", "sm_90", "sm_100"])
def test_every_family_ships_configurations(target):
    names = {shipped.kernel.__name__ for shipped in configurations(KINDS[target])}
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

    @triton.jit
    def greedy_kernel(x, y, N: tl.constexpr):
        i = tl.arange(0, N)
        a = tl.load(x + i[:, None] * N + i[None, :])
        tl.store(y + i[:, None] * N + i[None, :], tl.trans(a) + tl.cumsum(a, 0))

    types = {{name: "*fp32" for name in "xy" if name in {kernel}.arg_names}}
    compilecheck.SHARED[90] = {shared}
    sizes = {{"N": {n}}}
    compilecheck.configurations = lambda policy: [Shipped({kernel}, "N", types, sizes, warps=1, registers={registers})]
    sys.argv = ["compilecheck", "--target", "sm_90"]
    compilecheck.app()
    """
)


@pytest.mark.parametrize(
    ("kernel", "n", "shared", "registers", "code", "word"),
    [("spilling_kernel", 64, 232448, 0, 0, "0 of them"), ("spilling_kernel", 16384, 232448, 0, 1, "1 of them"),
     ("spilling_kernel", 2048, 232448, 0, 0, "0 of them"), ("spilling_kernel", 2048, 232448, 32, 1, "1 of them"),
     ("broken_kernel", 64, 232448, 0, 1, "CompilationError"), ("greedy_kernel", 32, 232448, 0, 0, "0 of them"),
     ("greedy_kernel", 32, 512, 0, 1, "sm_90 has 512")],
    ids=["clean", "spills", "unbounded", "bounded", "broken", "fits", "does not fit"],
)  # fmt: skip
def test_the_exit_status(tmp_path, kernel, n, shared, registers, code, word):
    script = tmp_path / "check.py"
    script.write_text(SCRIPT.format(kernel=kernel, n=n, shared=shared, registers=registers))
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
