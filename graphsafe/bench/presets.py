"""The lists of cases that have a name.

Requirements
------------
1. Every figure that the project's documents quote comes from a preset, so that anybody can run it again.
2. ``quick`` ends in under three minutes on two cores of a CPU and covers every kind of case.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

from graphsafe.bench.cases import GDN_NORM, KDA_GATE, SIX_SWITCHES, Case
from graphsafe.errors import error

__all__ = ["PRESETS", "preset"]

_BOTH = ("forward", "forward+backward")
_FILLS = (0.1, 0.25, 0.5, 1.0)


def _delta(operator: str, tokens: int, sequences: int, direction: str, **changes: Any) -> Case:
    heads = {"gdn": {"heads": 16, "value_heads": 32}, "kda": {"heads": 32, "value_heads": 32}}[operator]
    options = GDN_NORM if operator == "gdn" else KDA_GATE
    return Case(operator, tokens, sequences, direction=direction, **{**heads, "options": options, **changes})


def _quick() -> Iterable[Case]:
    small: dict[str, Any] = {
        "dtype": "float32",
        "heads": 1,
        "value_heads": 2,
        "key_dim": 32,
        "value_dim": 32,
        "group": "quick",
    }
    layer = {**small, "hidden": 64, "depth": 1}
    for operator in ("gdn", "kda"):
        for fill in (0.25, 1.0):
            yield _delta(operator, 512, 4, "forward", **{**small, "fill": fill})
        yield _delta(operator, 512, 4, "forward+backward", **{**small, "fill": 0.5})
    yield Case("conv", 512, 4, direction="forward+backward", width=64, dtype="float32", fill=0.5, group="quick")
    yield Case("tables", 4096, 32, fill=0.25, group="quick")
    yield Case("gdn-layer", 256, 4, direction="forward+backward", fill=0.5, **layer)
    yield Case("kda-layer", 256, 4, direction="forward", fill=0.5, **layer)
    yield Case("gdn-step", 256, 4, direction="step", fill=0.5, **layer)
    for tokens in (64, 128, 256, 512, 1024):
        yield _delta("gdn", tokens, 1, "forward", **{**small, "group": "quick lengths"})


def _rfc() -> Iterable[Case]:
    for direction in _BOTH:
        for fill in _FILLS:
            for operator in ("gdn", "kda"):
                yield _delta(operator, 4096, 32, direction, fill=fill, group="rfc")
            yield Case("conv", 4096, 32, direction=direction, fill=fill, group="rfc")
    for fill in _FILLS:
        yield Case("tables", 4096, 32, fill=fill, group="rfc")


def _heads() -> Iterable[Case]:
    for split in (1, 2, 4, 8):
        for direction in _BOTH:
            yield _delta(
                "gdn", 8192, 1, direction, heads=16 // split, value_heads=32 // split, group="heads: Qwen3-Next"
            )
            yield _delta(
                "kda", 8192, 1, direction, heads=32 // split, value_heads=32 // split, group="heads: Kimi Linear"
            )


def _lengths() -> Iterable[Case]:
    for operator in ("gdn", "kda"):
        for direction in _BOTH:
            for power in range(8, 16):
                yield _delta(operator, 2**power, 1, direction, group="lengths")


def _conv() -> Iterable[Case]:
    for direction in _BOTH:
        for width in (2048, 4096, 8192):
            for taps in (2, 3, 4):
                yield Case("conv", 4096, 32, direction=direction, width=width, taps=taps, group="conv")


def _layers() -> Iterable[Case]:
    gdn: dict[str, Any] = {"heads": 16, "value_heads": 32}
    kda: dict[str, Any] = {"heads": 32, "value_heads": 32}
    for tokens, sequences in ((1024, 4), (4096, 32)):
        for direction in _BOTH:
            yield Case("gdn-layer", tokens, sequences, direction=direction, fill=0.5, group="layers", **gdn)
            yield Case("kda-layer", tokens, sequences, direction=direction, fill=0.5, group="layers", **kda)
        yield Case("gdn-step", tokens, sequences, direction="step", fill=0.5, group="steps", **gdn)
        yield Case("kda-step", tokens, sequences, direction="step", fill=0.5, group="steps", **kda)


def _ascendc() -> Iterable[Case]:
    """The shapes and switches of the AscendC comparison, their GDN twins, and what a comparison must not leave out."""
    for heads in (96, 48, 24, 12, 64, 32, 16, 8):
        for direction in _BOTH:
            one = {"heads": heads, "value_heads": heads, "group": "ascendc"}
            yield _delta("kda", 8192, 1, direction, **{**one, "options": SIX_SWITCHES})
            yield _delta("gdn", 8192, 1, direction, **one)
    for operator in ("gdn", "kda"):
        for direction in _BOTH:
            small = {"heads": 4, "value_heads": 4, "group": "ascendc: generic"}
            yield _delta(operator, 63, 1, direction, **{**small, "states": False})
            yield _delta(operator, 1000, 1, direction, **{**small, "value_heads": 8})
            yield _delta(operator, 1024, 4, direction, **small)
            yield _delta(operator, 2048, 16, direction, **{**small, "layout": "short-tail"})
            yield _delta(operator, 4096, 256, direction, **small)
    yield from _switches()


def _peers() -> Iterable[Case]:
    """What this project and the libraries beside it are compared on: full buckets of even sequences."""
    even: dict[str, Any] = {"layout": "even", "group": "peers"}
    for direction in _BOTH:
        for tokens, sequences in ((1024, 4), (4096, 1), (4096, 32), (8192, 1)):
            yield _delta("gdn", tokens, sequences, direction, **even)
        yield _delta("gdn", 8192, 1, direction, heads=4, value_heads=8, **even)
        for tokens, sequences in ((512, 1), (1024, 4), (4096, 1), (4096, 32), (8192, 1)):
            yield _delta("kda", tokens, sequences, direction, **even)
        for tokens, sequences in ((1024, 4), (4096, 1), (4096, 32), (8192, 1)):
            yield Case("conv", tokens, sequences, direction=direction, **even)


def _switches() -> Iterable[Case]:
    """Each switch of the comparison by itself, and all of them."""
    sigmoid: dict[str, Any] = {"use_beta_sigmoid_in_kernel": True}
    shared: list[dict[str, Any]] = [{}, GDN_NORM, sigmoid, {**sigmoid, "allow_neg_eigval": True}]
    gate: dict[str, Any] = {"use_gate_in_kernel": True}
    bounded = {**gate, "lower_bound": -5.0}
    alone: list[dict[str, Any]] = [gate, bounded, {**bounded, "safe_gate": True}, {"disable_recompute": True}]
    for operator, listed in (("gdn", shared), ("kda", [*shared, *alone, SIX_SWITCHES])):
        for options in listed:
            small: dict[str, Any] = {"heads": 2, "value_heads": 2, "options": options, "group": "ascendc: switches"}
            yield _delta(operator, 200, 3, "forward+backward", **small)


def _full() -> Iterable[Case]:
    for name in ("peers", "rfc", "heads", "lengths", "conv", "layers"):
        yield from PRESETS[name]()


PRESETS: dict[str, Callable[[], Iterable[Case]]] = {
    "quick": _quick,
    "peers": _peers,
    "rfc": _rfc,
    "heads": _heads,
    "lengths": _lengths,
    "conv": _conv,
    "layers": _layers,
    "ascendc": _ascendc,
    "full": _full,
}
"""Name -> its cases. ``full`` is all but ``quick`` and ``ascendc``."""


def preset(name: str) -> list[Case]:
    """The cases called ``name``; raises rule ``argument`` with the known names for another."""
    if name not in PRESETS:
        raise error("argument", f"no preset {name!r}; there are {', '.join(PRESETS)}")
    return list({case.key: case for case in PRESETS[name]()}.values())
