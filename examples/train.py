"""Train a byte-level language model on real text, every step one captured graph: micro-batches, clipping, AdamW.

    python examples/train.py                                   # on the best device present
    python examples/train.py --layer kda --precision autocast --accumulate 2 --steps 40 --json

The text is the functions of Python's standard library, packed into batches of very different layouts. The same model is
trained a second time without a graph, and a third time from a checkpoint written in the middle; the losses of all three
are equal bit for bit, or the command fails and says where they part.

Precisions: ``fp32``; ``bf16``: parameters, gradients and optimizer in bf16; ``autocast``: fp32 parameters and
optimizer, matrix products in bf16.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import math
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from byte_model import ByteModel
from rich.console import Console
from rich.table import Table

import graphsafe as gs
from graphsafe.demo.corpus import IGNORED, Batch, functions, packed


class Run:
    """One model in training, captured or eager, from a seed or from a checkpoint."""

    def __init__(self, args: argparse.Namespace, runtime: Any, checkpoint: Path | None = None) -> None:
        torch.manual_seed(args.seed)
        self.args, self.device = args, runtime.device
        dtype = torch.bfloat16 if args.precision == "bf16" else torch.float32
        self.model = ByteModel(args.layer, args.hidden, args.layers).to(runtime.device, dtype)
        # on a device a graph needs the optimizer's own counters there
        capturable = {"fused": True} if runtime.device.type == "cpu" else {"fused": True, "capturable": True}
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=args.lr, weight_decay=0.01, **capturable)
        self.done = 0
        if checkpoint is not None:
            saved = torch.load(checkpoint, map_location=runtime.device)
            self.model.load_state_dict(saved["model"])
            self.optimizer.load_state_dict(saved["optimizer"])
            self.done = saved["done"]
        bucket = gs.Bucket(tokens=args.tokens, sequences=args.sequences)
        paths = [f"batch[{i}].targets" for i in range(args.accumulate)] if args.accumulate > 1 else ["batch.targets"]
        self.step = gs.TrainStep(self.model, self.loss, self.optimizer, runtime=runtime, bucket=bucket,
                                 accumulate=args.accumulate, max_grad_norm=1.0, on_overflow="error",
                                 inputs={path: gs.Input("tokens", pad=IGNORED) for path in paths})

    def loss(self, model: ByteModel, batch: Batch, tables: gs.ChunkTables) -> torch.Tensor:
        """Mean cross-entropy of the next byte over the positions that have one, in nats."""
        autocast = contextlib.nullcontext()
        if self.args.precision == "autocast":
            autocast = torch.autocast(self.device.type, torch.bfloat16)
        with autocast:
            rows, _ = model(batch.ids, tables)
            logits = model.logits(rows)
        return F.cross_entropy(logits[0].float(), batch.targets[0], ignore_index=IGNORED)

    def train(self, batches: list[Any], *, captured: bool) -> list[float]:
        """The losses of the steps that are left."""
        step = self.step if captured else self.step.eager
        losses = [step(batch).detach().float().mean().item() for batch in batches[self.done :]]
        self.done = len(batches)
        return losses

    def save(self, path: Path) -> None:
        """Model, optimizer and how many steps are done: all that a later run needs."""
        state = {"model": self.model.state_dict(), "optimizer": self.optimizer.state_dict(), "done": self.done}
        torch.save(state, path)


def steps_of(args: argparse.Namespace, device: torch.device) -> list[Any]:
    """One packed batch a step, or a list of ``--accumulate`` of them."""
    bucket = gs.Bucket(tokens=args.tokens, sequences=args.sequences)
    count = args.steps * args.accumulate
    batches = list(packed(functions((count + 1) * bucket.tokens, args.seed), bucket, device))[:count]
    if args.accumulate == 1:
        return batches
    return [batches[i : i + args.accumulate] for i in range(0, count, args.accumulate)]


def compare(name: str, got: list[float], want: list[float]) -> None:
    for i, (a, b) in enumerate(zip(got, want, strict=True)):
        if a != b or not math.isfinite(a):
            raise SystemExit(f"{name}: the loss of step {i} is {a!r}, captured it was {b!r}")


def main(arguments: list[str] | None = None) -> dict[str, Any]:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", help="cpu, cuda or npu; the best one present")
    parser.add_argument("--layer", choices=("gdn", "kda"), default="gdn")
    parser.add_argument("--precision", choices=("fp32", "bf16", "autocast"), default="autocast")
    parser.add_argument("--accumulate", type=int, default=2, help="micro-batches of a step")
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--tokens", type=int, default=512, help="capacity of a micro-batch")
    parser.add_argument("--sequences", type=int, default=8, help="documents in a micro-batch at most")
    parser.add_argument("--hidden", type=int, default=64)
    parser.add_argument("--layers", type=int, default=2)
    parser.add_argument("--lr", type=float, default=3e-3)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--checkpoint", type=Path, help="where to keep the checkpoint; else it is temporary")
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    args = parser.parse_args(arguments)
    runtime = gs.get_runtime(args.device)
    batches = steps_of(args, runtime.device)
    with tempfile.TemporaryDirectory() as folder:
        checkpoint = args.checkpoint or Path(folder, "checkpoint.pt")
        # the first half, a checkpoint, the second half
        run = Run(args, runtime)
        half = len(batches) // 2
        losses = run.train(batches[:half], captured=True)
        run.save(checkpoint)
        start = time.perf_counter()
        losses += run.train(batches, captured=True)
        seconds = time.perf_counter() - start

        eager = Run(args, runtime)
        start = time.perf_counter()
        compare("eager", eager.train(batches, captured=False), losses)
        eager_seconds = time.perf_counter() - start
        resumed = Run(args, runtime, checkpoint)
        compare("resumed from the checkpoint", resumed.train(batches, captured=True), losses[half:])
    stats = run.step.stats
    found = {
        "losses": losses, "layer": args.layer, "precision": args.precision, "accumulate": args.accumulate,
        "captures": stats.captures, "replays": stats.replays, "operations in the graph": stats.launches,
        "seconds a step captured": seconds / max(1, len(batches) - half),
        "seconds a step eager": eager_seconds / len(batches),
        "price in bytes": run.step.price().bytes, "parameters": sum(p.numel() for p in run.model.parameters()),
    }
    if args.json:
        print(json.dumps(found))
        return found
    columns = ("step", "loss captured", "equal to eager", "equal when resumed")
    table = Table(*columns, title=f"{args.layer}, {args.precision}")
    for i in sorted({*range(0, len(losses), max(1, len(losses) // 10)), len(losses) - 1}):
        table.add_row(str(i), f"{losses[i]:.6f}", "yes", "yes" if i >= half else "-")
    console = Console()
    console.print(table)
    console.print({name: value for name, value in found.items() if name != "losses"})
    return found


if __name__ == "__main__":
    main()
