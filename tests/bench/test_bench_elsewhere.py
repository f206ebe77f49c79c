"""Compiled on a pretended GPU, packed, unpacked at another place and found there; never with a pretended choice."""

from __future__ import annotations

import importlib
import json
import os
import subprocess
import sys
import tarfile
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import pytest

ELSEWHERE = Path(__file__).resolve().parents[2] / "benchmarks" / "elsewhere"
SCRIPT = """
import pretended_gpu
pretended_gpu.install(own=False)
import torch, triton, triton.language as tl

@triton.autotune([triton.Config({"N": n}) for n in (16, 32)], key=["size"], cache_results=True)
@triton.jit
def doubling_kernel(x, size, N: tl.constexpr):
    i = tl.arange(0, N)
    tl.store(x + i, 2 * tl.load(x + i, i < size), i < size)

doubling_kernel[(1,)](torch.zeros(32, device="cuda"), 20)
print(len(pretended_gpu.compiled), pretended_gpu.failed)
"""


@pytest.fixture(scope="module")
def packer() -> Iterator[ModuleType]:
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(ELSEWHERE))
        yield importlib.import_module("pack")


def compile_in(cache: Path, script: Path) -> list[str]:
    """The number of kernels that were compiled, and the choices that failed, in a process with this cache."""
    env = {k: v for k, v in os.environ.items() if not k.startswith("TRITON_")}
    env |= {"TRITON_CACHE_DIR": str(cache), "PYTHONPATH": f"{ELSEWHERE}{os.pathsep}{env.get('PYTHONPATH', '')}"}
    done = subprocess.run([sys.executable, str(script)], env=env, capture_output=True, text=True, timeout=500)
    assert done.returncode == 0, done.stderr
    return done.stdout.split()


@pytest.fixture(scope="module")
def script(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("script") / "doubling.py"  # a kernel's source has to lie in a file
    path.write_text(SCRIPT)
    return path


@pytest.fixture(scope="module")
def compiled(script: Path) -> Path:
    cache = script.parent / "cache"
    assert compile_in(cache, script) == ["2", "[]"]
    return cache


def result(cache: Path, milliseconds: float) -> Path:
    """What an autotuner writes that took ``milliseconds`` for each choice."""
    path = cache / "KEY" / "doubling_kernel.autotune.json"
    path.parent.mkdir(parents=True)
    path.write_text(json.dumps({"key": [20], "configs_timings": [[{}, [milliseconds] * 3], [{}, [float("inf")] * 3]]}))
    return path


def test_a_pretended_gpu_compiles_every_choice_and_writes_none(compiled: Path) -> None:
    assert len(list(compiled.glob("*/*.cubin"))) == 2
    assert not list(compiled.glob("*/*.autotune.json"))


def test_what_was_packed_is_found_at_another_place(
    script: Path, compiled: Path, tmp_path: Path, packer: ModuleType
) -> None:
    assert packer.pack(compiled, tmp_path / "all.tar.xz") == 6
    with tarfile.open(tmp_path / "all.tar.xz") as tar:
        names = [Path(name).name for name in tar.getnames()]
    each = ["__grp__doubling_kernel.json", "doubling_kernel.cubin", "doubling_kernel.json"]
    assert sorted(names) == sorted(["keys.json", *each, *each])
    assert packer.unpack(tmp_path / "all.tar.xz", tmp_path / "there", packer.keys()) == 6
    assert packer.unpack(tmp_path / "all.tar.xz", tmp_path / "there", packer.keys()) == 0
    compiled.rename(compiled.with_name("gone"))  # nothing is found in its old place
    assert compile_in(tmp_path / "there", script) == ["0", "[]"]
    compiled.with_name("gone").rename(compiled)


def test_a_pretended_choice_is_not_packed(tmp_path: Path, packer: ModuleType) -> None:
    planted = result(tmp_path / "cache", packer.PRETENDED)
    with pytest.raises(SystemExit, match=planted.name):
        packer.pack(tmp_path / "cache", tmp_path / "all.tar.xz")
    assert not (tmp_path / "all.tar.xz").exists()


def test_a_timed_choice_travels(tmp_path: Path, packer: ModuleType) -> None:
    kept = result(tmp_path / "cache", 0.25)
    assert packer.pack(tmp_path / "cache", tmp_path / "all.tar.xz", choices_only=True) == 1
    packer.unpack(tmp_path / "all.tar.xz", tmp_path / "there", packer.keys())
    assert (tmp_path / "there" / "KEY" / kept.name).read_text() == kept.read_text()


def test_a_pretended_choice_is_not_unpacked(tmp_path: Path, packer: ModuleType) -> None:
    with pytest.MonkeyPatch.context() as patch:  # a pack that another program made
        patch.setattr(packer, "refuse_pretended", lambda name, data: None)
        planted = result(tmp_path / "cache", packer.PRETENDED)
        packer.pack(tmp_path / "cache", tmp_path / "all.tar.xz")
    with pytest.raises(SystemExit, match=planted.name):
        packer.unpack(tmp_path / "all.tar.xz", tmp_path / "there", packer.keys())
    assert not (tmp_path / "there").exists()


def test_keys_that_differ_are_named(tmp_path: Path, packer: ModuleType) -> None:
    (tmp_path / "cache").mkdir()
    packer.pack(tmp_path / "cache", tmp_path / "all.tar.xz")
    with pytest.raises(SystemExit, match="assembler: packed") as refused:
        packer.unpack(tmp_path / "all.tar.xz", tmp_path / "there", packer.keys() | {"assembler": "another"})
    assert "triton: packed" not in str(refused.value)
