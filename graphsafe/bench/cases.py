"""What is measured: one operator, layer or training step at one bucket, one batch and one set of options.

Requirements
------------
1. A case is plain data: it goes to JSON and back unchanged, and its ``key`` names it across runs and machines.
2. A case says the bucket (T_max, N_max, BT) and the batch in it (fill and layout); the same case always makes the same
   lengths.
3. A user's file is a JSON list of such objects; a field that is unknown or wrong is refused by name.
"""

from __future__ import annotations

import dataclasses
import json
import random
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from graphsafe.bucket import Bucket
from graphsafe.errors import error

__all__ = ["DIRECTIONS", "DTYPES", "GDN_NORM", "KDA_GATE", "LAYOUTS", "OPERATORS", "SIX_SWITCHES", "Case", "read_cases"]

OPERATORS = ("gdn", "kda", "conv", "tables", "gdn-layer", "kda-layer", "gdn-step", "kda-step")
DIRECTIONS = ("forward", "forward+backward", "step")
SHORT = {"forward": "fwd", "forward+backward": "fwd+bwd", "step": "step"}
LAYOUTS = ("even", "random", "short-tail")
DTYPES = ("float16", "bfloat16", "float32")
_SHAPE = {
    "gdn": ("heads", "value_heads", "key_dim", "value_dim"),
    "kda": ("heads", "value_heads", "key_dim", "value_dim"),
    "conv": ("width", "taps"),
    "tables": (),
    "layer": ("heads", "value_heads", "key_dim", "value_dim", "hidden"),
    "step": ("heads", "value_heads", "key_dim", "value_dim", "hidden", "depth"),
}


KDA_GATE: dict[str, Any] = {
    "use_qk_l2norm_in_kernel": True,
    "use_gate_in_kernel": True,
    "safe_gate": True,
    "lower_bound": -5.0,
}
"""KDA as Kimi Linear calls it."""

GDN_NORM: dict[str, Any] = {"use_qk_l2norm_in_kernel": True}
"""GDN as Qwen3-Next calls it, its decay given."""

SIX_SWITCHES: dict[str, Any] = {**KDA_GATE, "use_beta_sigmoid_in_kernel": True, "disable_recompute": True}
"""KDA with all switches of the AscendC comparison."""

_USUAL: Mapping[str, Mapping[str, Any]] = {"gdn": GDN_NORM, "kda": KDA_GATE, "conv": {}}
_SWITCHES = {
    "use_qk_l2norm_in_kernel": "l2norm",
    "use_gate_in_kernel": "gate",
    "safe_gate": "safe",
    "lower_bound": "bound",
    "use_beta_sigmoid_in_kernel": "sigmoid",
    "allow_neg_eigval": "negative",
    "disable_recompute": "keep",
}


@dataclass(frozen=True)
class Case:
    """One thing to measure. ``tokens``, ``sequences``, ``chunk_size``: the bucket; ``fill``: the share of both that is
    live; ``layout``: ``even`` lengths, ``random`` cuts, or ``short-tail`` (every sequence ends one token into a chunk).

    ``heads``, ``value_heads``, ``key_dim``, ``value_dim``: delta rule. ``width``, ``taps``: convolution. ``hidden``,
    ``depth``: layers and steps. ``states``: initial and final states are passed. ``options``: further keyword arguments
    of the operator. ``group``: the series a case belongs to in a report.
    """

    operator: str
    tokens: int
    sequences: int = 1
    fill: float = 1.0
    direction: str = "forward"
    layout: str = "random"
    dtype: str = "bfloat16"
    heads: int = 16
    value_heads: int = 32
    key_dim: int = 128
    value_dim: int = 128
    width: int = 8192
    taps: int = 4
    hidden: int = 2048
    depth: int = 2
    states: bool = True
    chunk_size: int = 64
    options: Mapping[str, Any] = field(default_factory=dict)
    group: str = "own"

    def __post_init__(self) -> None:
        for name, allowed in (
            ("operator", OPERATORS),
            ("direction", DIRECTIONS),
            ("layout", LAYOUTS),
            ("dtype", DTYPES),
        ):
            if getattr(self, name) not in allowed:
                raise error("argument", f"Case({name}={getattr(self, name)!r}): one of {', '.join(allowed)} is needed")
        if not 0 < self.fill <= 1:
            raise error("argument", f"Case(fill={self.fill!r}): a share above 0, at most 1, is needed")
        for name in ("heads", "value_heads", "key_dim", "value_dim", "width", "taps", "hidden", "depth"):
            value = getattr(self, name)
            if not isinstance(value, int) or value < 1:
                raise error("argument", f"Case({name}={value!r}): a positive integer is needed")
        if self.is_step != (self.direction == "step"):
            raise error(
                "argument", f"Case(operator={self.operator!r}, direction={self.direction!r}) do not go together"
            )
        if self.operator == "tables" and self.direction != "forward":
            raise error("argument", "Case(operator='tables'): chunk tables have a forward only")
        if self.live_tokens < self.live_sequences:
            raise error("argument", f"{self}: {self.live_tokens} tokens cannot be {self.live_sequences} sequences")
        _ = self.bucket

    @property
    def bucket(self) -> Bucket:
        return Bucket(self.tokens, self.sequences, self.chunk_size)

    @property
    def is_step(self) -> bool:
        return self.operator.endswith("-step")

    @property
    def is_layer(self) -> bool:
        return self.operator.endswith("-layer")

    @property
    def rule(self) -> str:
        """``gdn`` or ``kda`` for an operator, layer or step of a delta rule."""
        return self.operator.split("-")[0]

    @property
    def live_tokens(self) -> int:
        return max(1, round(self.fill * self.tokens))

    @property
    def live_sequences(self) -> int:
        return max(1, round(self.fill * self.sequences))

    @property
    def live_slots(self) -> int:
        """Chunks of the batch's own lengths."""
        return sum(-(-n // self.chunk_size) for n in self.lengths())

    def lengths(self, number: int = 0) -> list[int]:
        """The sequences' lengths of batch ``number``: positive, their sum ``live_tokens``."""
        total, n = self.live_tokens, self.live_sequences
        if self.layout == "random":
            cuts = sorted(random.Random(1000 * number + n).sample(range(1, total), n - 1)) if n > 1 else []
            return [b - a for a, b in zip([0, *cuts], [*cuts, total], strict=True)]
        lengths = [total // n + (i < total % n) for i in range(n)]
        if self.layout == "short-tail" and n > 1:
            bt = self.chunk_size
            lengths = [max(1, (length - 1) // bt * bt + 1) for length in lengths]
            lengths[-1] += total - sum(lengths)
        if number % 2:
            lengths.reverse()
        return lengths

    @property
    def shape(self) -> dict[str, int]:
        """The sizes that matter to this operator, by name."""
        kind = "layer" if self.is_layer else "step" if self.is_step else self.operator
        return {name: getattr(self, name) for name in _SHAPE[kind]}

    @property
    def label(self) -> str:
        """A short name for tables and plots, with what is not usual: another layout than ``random``, other options."""
        text = f"{self.operator} {self.tokens}x{self.sequences}"
        if self.fill < 1:
            text += f" {self.fill:.0%}"
        if self.sequences > 1 and self.layout != "random":
            text += f" {self.layout}"
        return ", ".join(filter(None, (text, self.size_label, self._options_label, SHORT[self.direction])))

    @property
    def _options_label(self) -> str:
        if self.options == _USUAL.get(self.operator, self.options):
            return ""
        if self.options == SIX_SWITCHES:
            return "six switches"
        return " ".join(_SWITCHES.get(name, name) for name, value in self.options.items() if value) or "plain"

    @property
    def size_label(self) -> str:
        """``H/HVxK`` heads, or ``D width W taps``."""
        if "heads" in self.shape:
            return f"{self.heads}/{self.value_heads}x{self.key_dim}"
        return f"D {self.width} W {self.taps}" if "width" in self.shape else ""

    @property
    def series(self) -> str:
        """What stays the same when only the length changes: the cases of one break-even curve."""
        same = {k: v for k, v in self.as_dict().items() if k not in ("tokens", "group")}
        return json.dumps(same, sort_keys=True)

    @property
    def key(self) -> str:
        """The case across runs: all that defines it, without the group it was listed under."""
        return json.dumps({k: v for k, v in self.as_dict().items() if k != "group"}, sort_keys=True)

    def as_dict(self) -> dict[str, Any]:
        """Plain values, without what makes no difference: sizes that this operator does not have, one layout of one."""
        unused = {name for names in _SHAPE.values() for name in names} - set(self.shape)
        if self.operator in ("tables", "gdn-layer", "kda-layer", "gdn-step", "kda-step"):
            unused |= {"states", "options"}
        if self.operator == "tables":
            unused |= {"dtype"}
        if self.sequences == 1:
            unused |= {"layout"}
        return {k: v for k, v in dataclasses.asdict(self).items() if k not in unused}

    @classmethod
    def from_dict(cls, values: object) -> Case:
        """The case of a JSON object; unknown fields are refused by name."""
        if not isinstance(values, dict):
            raise error("argument", f"a case is a JSON object; got {values!r}")
        names = {f.name: f for f in dataclasses.fields(cls)}
        unknown = sorted(set(values) - set(names))
        if unknown:
            raise error("argument", f"a case has no {', '.join(unknown)}; its fields are {', '.join(names)}")
        missing = [name for name in ("operator", "tokens") if name not in values]
        if missing:
            raise error("argument", f"a case needs {' and '.join(missing)}; got {values!r}")
        return cls(**values)


def read_cases(path: Path) -> list[Case]:
    """The cases of a user's file: a JSON list of objects."""
    try:
        listed = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as problem:
        raise error("argument", f"{path.name} cannot be read as JSON: {problem}") from problem
    if not isinstance(listed, list) or not listed:
        raise error("argument", f"{path.name} holds no list of cases")
    return [Case.from_dict({"group": path.stem, **item} if isinstance(item, dict) else item) for item in listed]
