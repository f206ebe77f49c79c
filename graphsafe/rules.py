"""The rules a graph keeps, numbered. Every error of this project names one.

The hundreds digit is the category: 1 unsupported operator, 2 address or lifetime, 3 metadata, 4 padding, 5 eager
back end, 6 distributed. Numbers are never reused.
"""

from __future__ import annotations

import enum
from dataclasses import dataclass

__all__ = ["RULES", "Category", "Rule", "rule"]


class Category(str, enum.Enum):
    """The six kinds of failure that the graph contract tells apart."""

    UNSUPPORTED = "unsupported graph operator"
    LIFETIME = "graph address or lifetime"
    METADATA = "stale or dynamically generated metadata"
    PADDING = "sentinel, offset or padding correctness"
    BACKEND = "pre-existing eager backend failure"
    DISTRIBUTED = "distributed rank, port or collective"

    def __str__(self) -> str:
        return self.value


_CATEGORY_OF_HUNDRED = dict(enumerate(Category, start=1))


@dataclass(frozen=True)
class Rule:
    """One rule: its ``id`` (``GS101``), short ``name``, what it demands, why, and the usual remedy."""

    id: str
    name: str
    demand: str
    why: str
    remedy: str

    @property
    def category(self) -> Category:
        return _CATEGORY_OF_HUNDRED[int(self.id[2])]

    def __str__(self) -> str:
        return f"{self.id} {self.name}"


_ALL = (
    Rule(
        "GS101",
        "host-read",
        "The host does not read the device inside a capture.",
        "A replay runs no Python: the value read now would be frozen into every later replay, and a device refuses "
        "the read while it captures.",
        "Keep the value on the device (torch.where, a mask, an index tensor), or read it before the capture.",
    ),
    Rule(
        "GS102",
        "data-dependent-shape",
        "No shape inside a capture depends on data.",
        "A graph has fixed shapes and addresses; a shape taken from data would be frozen at its captured size.",
        "Use a fixed capacity and a mask (torch.where, masked_fill), or pass the size explicitly.",
    ),
    Rule(
        "GS103",
        "host-data",
        "No tensor is made from host values inside a capture.",
        "The host value would be frozen into the graph, and the copy from pageable memory breaks a device capture.",
        "Make the tensor before the capture, or use a factory that fills on the device (torch.full, torch.arange).",
    ),
    Rule(
        "GS104",
        "unregistered-generator",
        "Random numbers come from the default generator or a registered one.",
        "A generator the runtime does not know would draw the same numbers at each replay, or be left advanced by the "
        "capture.",
        "Register it with runtime.register_generator(generator) before the capture, or use the default generator.",
    ),
    Rule(
        "GS105",
        "rng-state",
        "The state of a generator is neither read nor set inside a capture.",
        "Setting a seed or a state is host work that a replay does not repeat.",
        "Seed before the capture; for activation checkpointing pass preserve_rng_state=False.",
    ),
    Rule(
        "GS106",
        "unsupported",
        "An operator asked for use_graph=True serves the request or refuses it.",
        "Turning eager silently inside a graph would freeze one batch's work.",
        "Change the option named, or run this call outside graph mode with use_graph=False.",
    ),
    Rule(
        "GS107",
        "other-device",
        "Work inside a capture stays on the runtime's device.",
        "A copy to another device is a host synchronisation, or is not recorded at all.",
        "Move the tensor before the capture, or keep the computation on the runtime's device.",
    ),
    Rule(
        "GS108",
        "argument",
        "Arguments have the shapes, types and values the operator documents.",
        "A call with it cannot mean what was asked, and found late it would corrupt memory or results.",
        "Pass what the documentation of the function named asks for.",
    ),
    Rule(
        "GS109",
        "runtime-missing",
        "The runtime asked for is known, installed and usable.",
        "Nothing is chosen silently in place of what was asked for.",
        "Install the adapter or choose a runtime that is present.",
    ),
    Rule(
        "GS110",
        "not-capturable",
        "Only device work that can be recorded happens inside a capture.",
        "Work that the runtime cannot record would be missing from every replay.",
        "Move it out of the captured body.",
    ),
    Rule(
        "GS111",
        "cold-kernel",
        "Every kernel is compiled and tuned before a capture.",
        "Compiling loads code and tuning measures time: neither can be recorded, and the driver breaks the capture.",
        "Warm up with the same shapes, dtypes and options (runtime.warm_up does), then capture.",
    ),
    Rule(
        "GS112",
        "bad-allowance",
        "A comment that allows a finding names a known rule and gives a reason.",
        "What is allowed without a reason cannot be judged by the next reader, and a misspelt rule allows nothing.",
        "Write '# graphsafe: allow GS101 why this is fine here', with a rule that 'graphsafe lint' reports.",
    ),
    Rule(
        "GS201",
        "input-rebound",
        "A bound input keeps its storage between capture and replay.",
        "The graph works on the captured address; another tensor in its place is ignored.",
        "Copy into the original tensor (t.copy_(new)), or do not bind the argument, so that each call copies it.",
    ),
    Rule(
        "GS202",
        "input-died",
        "Every tensor the graph reads outlives it.",
        "The captured address now belongs to nobody or to another tensor.",
        "Hold the tensor for as long as the graph, or let the arena own it.",
    ),
    Rule(
        "GS203",
        "tensor-escapes",
        "No tensor born inside a capture is kept, except the declared outputs.",
        "Its memory belongs to the graph's pool: later replays overwrite it without a word.",
        "Return it from the body, allocate it before the capture, or let the arena own it.",
    ),
    Rule(
        "GS204",
        "arena-sealed",
        "A sealed arena does not grow.",
        "Memory made after the capture is not what the graph reads.",
        "Allocate everything before the capture and before arena.seal().",
    ),
    Rule(
        "GS205",
        "concurrent-capture",
        "One capture runs at a time in a process.",
        "Devices do not isolate captures of different threads from each other.",
        "Finish the other capture first; capture from one thread.",
    ),
    Rule(
        "GS206",
        "out-of-order",
        "A graph is captured, then updated, then replayed, and not used after it is closed.",
        "There is nothing valid to run.",
        "Capture first; after a failed capture, capture again with a new graph.",
    ),
    Rule(
        "GS207",
        "storage-replaced",
        "The storage of a tensor the graph reads is not resized or exchanged.",
        "The graph works on the captured address, not on the tensor's present storage.",
        "Write new values in place with copy_, and leave .data, set_ and resize_ alone.",
    ),
    Rule(
        "GS208",
        "arena-closed",
        "A closed arena hands out and updates nothing.",
        "Its memory has been given back.",
        "Use the arena inside its with block, or keep it open for the life of the graph.",
    ),
    Rule(
        "GS209",
        "capture-leftover",
        "State changed by warm-up or capture is put back.",
        "Training or generation would go on from a state the caller never asked for.",
        "Make the change through tensors, which are restored, or outside the captured body.",
    ),
    Rule(
        "GS210",
        "input-written",
        "An input that is copied at each call is not written in place by the body.",
        "The graph would write its own copy; the caller's tensor would stay as it was.",
        "Bind the argument (inputs={name: 'bound'}), or return the new value.",
    ),
    Rule(
        "GS301",
        "frozen-scalar",
        "A Python value that changes between calls is not frozen into a graph.",
        "The graph holds the value it was captured with and would ignore the new one.",
        "Pass it as a tensor, or declare it with static_argnames so that each value has a graph of its own.",
    ),
    Rule(
        "GS302",
        "metadata-changed",
        "Sequence boundaries do not change between forward and backward.",
        "The backward would use another layout than the forward.",
        "Write new cu_seqlens only after the backward has run.",
    ),
    Rule(
        "GS303",
        "tables",
        "Tables agree with the bucket in shape, dtype, device and layout.",
        "A kernel would read rows that are not there, or tables of another batch.",
        "Build them with runtime.tables(bucket), from the same cu_seqlens.",
    ),
    Rule(
        "GS304",
        "host-randomness",
        "Host random numbers are not frozen into a graph.",
        "The number drawn while capturing would be used by every replay.",
        "Draw on the device, or pass the number in as a tensor.",
    ),
    Rule(
        "GS305",
        "capacity",
        "A batch fits a bucket.",
        "The graph's memory and grids end at the bucket's capacity.",
        "Add a larger bucket, split the batch, or choose on_overflow='eager'.",
    ),
    Rule(
        "GS306",
        "structure",
        "The arguments of a call have the structure the graph was captured with.",
        "A graph has a fixed set of inputs of fixed dtypes and shapes.",
        "Pass the same nesting, dtypes and trailing shapes as at capture, or capture another callable.",
    ),
    Rule(
        "GS401",
        "padding-nonzero",
        "Rows beyond the live total are exactly zero.",
        "Leftovers in padding leak into sums, gradients and later batches.",
        "Mask the rows, or clear them in the kernel that owns the slot.",
    ),
    Rule(
        "GS402",
        "canary",
        "Nothing writes outside the tensors of an arena.",
        "A write past a tensor's end corrupts a neighbour without a word.",
        "Check the offsets and masks of the kernel that writes the tensor named.",
    ),
    Rule(
        "GS403",
        "replay-differs",
        "A replay writes the same bits as eager on the same inputs.",
        "Something in the graph is stale, unordered or not recorded.",
        "Look for frozen values, state outside the graph and work on other streams; lint names them.",
    ),
    Rule(
        "GS404",
        "padding-read",
        "What padding holds does not change a result.",
        "A row that belongs to nobody was used.",
        "Mask with tables.live(tokens) what sums over tokens; in a kernel, mask block loads before any arithmetic.",
    ),
    Rule(
        "GS501",
        "eager-failed",
        "The body runs eagerly before it is captured.",
        "It failed without any graph; capture is not the cause.",
        "Fix the eager error shown; then capture.",
    ),
    Rule(
        "GS601",
        "collective",
        "No collective is captured.",
        "A collective in one rank's graph waits for the same in every other's: a rank that captures, replays or turns "
        "eager out of step stops all of them, and no rank can see that coming.",
        "Run collectives between replays, on what the graphs return; capture what lies between them.",
    ),
)

RULES: dict[str, Rule] = {r.name: r for r in _ALL}


def rule(key: str) -> Rule:
    """Look a rule up by name (``host-read``) or id (``GS101``); a KeyError lists what is known."""
    if key in RULES:
        return RULES[key]
    for r in _ALL:
        if r.id == key:
            return r
    raise KeyError(f"no rule {key!r}; known: {', '.join(f'{r.id} {r.name}' for r in _ALL)}")
