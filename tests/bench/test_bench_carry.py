"""Choices timed at some head counts, carried to others: of the same kernel, the nearest, and never across a switch."""

from __future__ import annotations

import hashlib
import importlib
import io
import json
import sys
import tarfile
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

ELSEWHERE = Path(__file__).resolve().parents[2] / "benchmarks" / "elsewhere"
BF16, FP32 = "torch.bfloat16", "torch.float32"


@pytest.fixture(scope="module")
def carry() -> Iterator[ModuleType]:
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(ELSEWHERE))
        yield importlib.import_module("carry")


def named(*values: Any) -> str:
    return json.dumps(list(values), separators=(",", ":"))


USERS = {
    ("rows", named(32, 128, True, BF16)): {"kda"},
    ("rows", named(16, 128, True, BF16)): {"gdn"},
    ("rows", named(8, 128, True, BF16)): {"kda"},
    ("rows", named(12, 128, True, BF16)): {"gdn"},
    ("rows", named(8, 128, True, BF16, BF16)): {"kda"},
    ("rows", named(8, 128, False, BF16)): {"kda"},
    ("other", named(8, 128, True, BF16)): {"kda"},
}
TIMED = {("rows", named(32, 128, True, BF16)): "of kda", ("rows", named(16, 128, True, BF16)): "of gdn"}


@pytest.mark.parametrize(
    ("kernel", "key", "choice"),
    [
        ("rows", named(32, 128, True, BF16), "of kda"),  # timed itself
        ("rows", named(8, 128, True, BF16), "of kda"),  # 16 is nearer, and another operator's
        ("rows", named(12, 128, True, BF16), "of gdn"),
        ("rows", named(8, 128, True, BF16, BF16), "of kda"),  # one more operand
        ("rows", named(8, 128, False, BF16), None),  # another switch is another program
        ("other", named(8, 128, True, BF16), None),
    ],
)
def test_a_key_takes_the_choice_of_its_nearest(carry: ModuleType, kernel: str, key: str, choice: str | None) -> None:
    assert carry.carried(TIMED, USERS, kernel, key) == choice


def test_the_same_dtypes_go_before_the_same_operator_and_that_before_the_nearest(carry: ModuleType) -> None:
    key = named(8, BF16)
    users = {("rows", key): {"kda"}, ("rows", named(64, BF16)): {"kda"}, ("rows", named(32, BF16)): {"gdn"},
             ("rows", named(8, FP32)): {"kda"}}  # fmt: skip
    known = {k: k[1] for k in users if k[1] != key}
    for best in (named(64, BF16), named(32, BF16), named(8, FP32)):
        assert carry.carried(known, users, "rows", key) == best
        del known["rows", best]
    assert carry.carried(known, users, "rows", key) is None


def pack(path: Path, *results: tuple[str, list[Any], dict[str, float]]) -> None:
    """A pack of what an autotuner found: of each kernel and key the milliseconds by choice."""
    with tarfile.open(path, "w:xz") as tar:
        for number, (kernel, key, times) in enumerate(results):
            timings = [[{"num_warps": int(warps)}, [ms, ms, ms]] for warps, ms in times.items()]
            data = json.dumps({"key": key, "configs_timings": timings}).encode()
            info = tarfile.TarInfo(f"{number}/{kernel}.autotune.json")
            info.size = len(data)
            tar.addfile(info, io.BytesIO(data))


def test_files_are_those_that_the_library_reads(
    carry: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    pack(tmp_path / "chosen.tar.xz", ("rows", [32, 128, True, BF16], {"4": 0.3, "8": 0.2}))
    users = {key: operators for key, operators in USERS.items() if key[0] == "rows"}
    monkeypatch.setattr(carry, "asked", lambda names: users)
    monkeypatch.setattr(carry.pretended_gpu, "install", lambda own: None)
    monkeypatch.setattr(sys, "argv", ["carry.py", str(tmp_path / "chosen.tar.xz"), str(tmp_path / "choices"), "task"])
    carry.main()
    stored = json.loads((tmp_path / "choices" / "rows.json").read_text())
    key = [8, 128, True, BF16]
    entry = stored["autotune_entries"][hashlib.md5(named(*key).encode()).hexdigest()]
    assert stored["kernel_name"] == "rows"
    assert entry == {"autotune_key": key, "config": {"num_warps": 8}}  # the fastest of what was timed
    assert len(stored["autotune_entries"]) == len(users) - 1
    about = (tmp_path / "choices" / "about.txt").read_text()
    assert about == "1 of 6 keys timed on the device, 4 carried from the nearest head counts, 1 left to it"
    assert "rows could take at [8,128,false" in capsys.readouterr().out


def test_a_pretended_choice_is_not_carried(carry: ModuleType, tmp_path: Path) -> None:
    pretended = carry.pretended_gpu.PRETENDED
    pack(tmp_path / "chosen.tar.xz", ("rows", [32], {"4": pretended, "8": float("inf")}))
    with pytest.raises(SystemExit, match=r"rows\.autotune\.json"):
        carry.timed(tmp_path / "chosen.tar.xz")
