"""Real text of very different lengths: the functions of the Python standard library on this machine, as bytes.

Requirements
------------
1. The documents depend on the installed standard library alone, in a fixed order; a seed shuffles them.
2. ``packed`` fills batches up to a bucket's capacity and wastes nothing: a document longer than a bucket is cut.
"""

from __future__ import annotations

import ast
import random
import sysconfig
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import torch

from graphsafe.bucket import Bucket
from graphsafe.errors import error

__all__ = ["Batch", "functions", "packed"]

IGNORED = -100
"""The target of a position that has no next byte; ``cross_entropy`` leaves it out."""
_SHORTEST = 16


@dataclass
class Batch:
    """A packed batch: ``ids`` and ``targets`` ``[1, T]`` int64, ``cu_seqlens`` ``[N + 1]`` int32."""

    ids: torch.Tensor
    targets: torch.Tensor
    cu_seqlens: torch.Tensor


def functions(wanted_bytes: int, seed: int) -> list[bytes]:
    """Function sources of the standard library, shuffled, at least ``wanted_bytes`` in all."""
    paths = sorted(Path(sysconfig.get_paths()["stdlib"]).glob("*.py"))
    random.Random(seed).shuffle(paths)
    found: list[bytes] = []
    size = 0
    for path in paths:
        if size >= wanted_bytes:
            break
        new = list(_functions_of(path))
        found += new
        size += sum(len(text) for text in new)
    if size < wanted_bytes:
        raise error("argument", f"the standard library has {size} bytes of functions; {wanted_bytes} were asked for")
    random.Random(seed).shuffle(found)
    return found


def _functions_of(path: Path) -> Iterator[bytes]:
    text = path.read_bytes()
    try:
        tree = ast.parse(text)
    except (SyntaxError, ValueError):  # test inputs of the library that are broken on purpose
        return
    lines = text.splitlines(keepends=True)
    for node in ast.walk(tree):
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)) and node.end_lineno is not None:
            source = b"".join(lines[node.lineno - 1 : node.end_lineno])
            if len(source) >= _SHORTEST:
                yield source


def packed(documents: list[bytes], bucket: Bucket, device: torch.device) -> Iterator[Batch]:
    """Batches of consecutive documents, each as full as the bucket allows."""
    pieces: list[bytes] = []
    for document in documents:
        for start in range(0, len(document), bucket.tokens):
            piece = document[start : start + bucket.tokens]
            if not bucket.fits(sum(map(len, pieces)) + len(piece), len(pieces) + 1):
                yield _batch(pieces, device)
                pieces = []
            pieces.append(piece)
    if pieces:
        yield _batch(pieces, device)


def _batch(pieces: list[bytes], device: torch.device) -> Batch:
    ids = torch.tensor(list(b"".join(pieces)), dtype=torch.int64)
    ends = torch.tensor([0, *(len(p) for p in pieces)]).cumsum(0)
    targets = torch.roll(ids, -1)
    targets[ends[1:] - 1] = IGNORED
    return Batch(ids[None].to(device), targets[None].to(device), ends.to(torch.int32).to(device))
