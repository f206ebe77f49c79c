"""Serve prompts: prefill in packed batches through a few captured graphs, long prompts piece by piece through states.

    python examples/serve.py
    python examples/serve.py --layer kda --requests 60 --json

Requests of very different lengths wait in a queue. Each round takes the next piece of as many of them as fit the
largest bucket, packs them, and replays the smallest bucket's graph that holds the round; a request's states go out of
one round and into its next. One burst in the middle has more requests than any bucket has room for: it runs eagerly,
with the same numbers, and is counted. At the end every request's logits are compared with its prompt alone, in one
piece, without a graph, and a table shows the latencies of each bucket, replayed and eager.
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import time
from collections import deque
from dataclasses import dataclass
from typing import Any

import torch
from byte_model import ByteModel, States
from rich.console import Console
from rich.table import Table

import graphsafe as gs
from graphsafe_kernels.layers import LayerState


@dataclass
class Request:
    """A prompt, how much of it is done, the states behind that, and at last the logits of the next byte."""

    prompt: torch.Tensor
    states: States
    done: int = 0
    logits: torch.Tensor | None = None

    @property
    def left(self) -> int:
        return int(self.prompt.shape[0]) - self.done


@dataclass
class Round:
    """What one round did: the bucket that served it (None: eager), tokens, sequences, seconds; the same eager."""

    bucket: str | None
    tokens: int
    sequences: int
    seconds: float
    eager_seconds: float


class Server:
    """Prefill of a model in graphs, one for each bucket."""

    def __init__(self, model: ByteModel, runtime: Any, buckets: list[gs.Bucket]) -> None:
        self.model, self.runtime, self.rounds = model, runtime, list[Round]()
        self.largest = max(buckets)

        @torch.no_grad()
        def prefill(ids: torch.Tensor, states: States, cu_seqlens: torch.Tensor,
                    tables: gs.ChunkTables) -> tuple[torch.Tensor, States | None]:
            rows, new = model(ids, tables, states, keep_states=True)
            # the last row of each sequence, found on the device
            last = (cu_seqlens[1:].long() - 1).clamp(min=0)
            return model.logits(rows[0].index_select(0, last)), new

        self.prefill = gs.graphed(prefill, runtime=runtime, buckets=buckets, on_overflow="eager",
                                  inputs={"states": "sequences"})

    def warm_up(self) -> None:
        """Capture every bucket before the first request arrives."""
        for bucket in self.prefill.buckets:
            self.prefill.capture(*self._batch([torch.zeros(bucket.tokens, dtype=torch.long)], [self._fresh()]))

    def request(self, prompt: torch.Tensor) -> Request:
        return Request(prompt, self._fresh())

    def _fresh(self) -> States:
        return self.model.zero_states(1)

    def _batch(self, pieces: list[torch.Tensor],
               states: list[States]) -> tuple[torch.Tensor, States, torch.Tensor]:
        device = self.runtime.device
        ids = torch.cat(pieces)[None].to(device)
        ends = torch.tensor([0, *(p.shape[0] for p in pieces)]).cumsum(0)
        together = tuple(
            LayerState(torch.cat([s.recurrent_state for s in layer]), torch.cat([s.conv_state for s in layer]))
            for layer in zip(*states, strict=True)
        )
        return ids, together, ends.int().to(device)

    def round(self, requests: list[Request], sizes: list[int]) -> None:
        """Prefill the next ``sizes[i]`` tokens of each request."""
        pieces = [r.prompt[r.done : r.done + size] for r, size in zip(requests, sizes, strict=True)]
        batch = self._batch(pieces, [r.states for r in requests])
        eager_seconds, _ = self._timed(lambda *b: self.prefill.function(*b, self.tables(b)), batch)
        seconds, (logits, states) = self._timed(self.prefill, batch)
        for i, (request, size) in enumerate(zip(requests, sizes, strict=True)):
            request.done += size
            # what a graph returns is its own memory: keep a copy
            request.states = tuple(LayerState(*(t[i : i + 1].clone() for t in layer)) for layer in states)
            if request.left == 0:
                request.logits = logits[i].clone()
        fitting = [b for b in self.prefill.buckets if b.fits(sum(sizes), len(sizes))]
        name = f"{fitting[0].tokens}x{fitting[0].sequences}" if fitting else None
        self.rounds.append(Round(name, sum(sizes), len(sizes), seconds, eager_seconds))

    def tables(self, batch: Any) -> gs.ChunkTables:
        """The tables of a batch at its own size, for the eager comparison."""
        bucket = gs.Bucket(int(batch[0].shape[1]), int(batch[2].shape[0]) - 1)
        return self.runtime.tables(bucket).build(batch[2])

    def _timed(self, function: Any, batch: Any) -> tuple[float, Any]:
        self.runtime.synchronize()
        start = time.perf_counter()
        result = function(*batch)
        self.runtime.synchronize()
        return time.perf_counter() - start, result

    def serve(self, waiting: deque[Request]) -> None:
        """Rounds until nobody waits: a long prompt shares each round with the requests behind it."""
        while waiting:
            taken, sizes, room = [], [], self.largest.tokens
            while waiting and room and len(taken) < self.largest.sequences:
                # half of a round at most, so that a long prompt holds nobody up
                size = min(waiting[0].left, room, max(1, self.largest.tokens // 2))
                taken.append(waiting.popleft())
                sizes.append(size)
                room -= size
            self.round(taken, sizes)
            waiting.extend(r for r in taken if r.left)


def table_of(rounds: list[Round]) -> Table:
    table = Table("bucket", "rounds", "tokens", "sequences", "replay p50 ms", "p95", "eager p50 ms", "p95",
                  title="latency of a round")
    for name in sorted({r.bucket for r in rounds}, key=lambda b: (b is None, int((b or "0x").split("x")[0]))):
        mine = [r for r in rounds if r.bucket == name]
        cells = []
        for times in ([r.seconds for r in mine], [r.eager_seconds for r in mine]):
            ordered = sorted(times)
            cells += [f"{statistics.median(ordered) * 1e3:.2f}", f"{ordered[int(0.95 * (len(ordered) - 1))] * 1e3:.2f}"]
        table.add_row(name or "overflow, eager", str(len(mine)), str(sum(r.tokens for r in mine)),
                      str(sum(r.sequences for r in mine)), *cells)
    return table


def main(arguments: list[str] | None = None) -> dict[str, Any]:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", help="cpu, cuda or npu; the best one present")
    parser.add_argument("--layer", choices=("gdn", "kda"), default="gdn")
    parser.add_argument("--requests", type=int, default=40)
    parser.add_argument("--longest", type=int, default=1500, help="tokens of the longest prompt")
    parser.add_argument("--buckets", default="128x4,256x8,512x16", help="TOKENSxSEQUENCES, separated by commas")
    parser.add_argument("--hidden", type=int, default=64)
    parser.add_argument("--layers", type=int, default=2)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    args = parser.parse_args(arguments)
    runtime = gs.get_runtime(args.device)
    torch.manual_seed(args.seed)
    model = ByteModel(args.layer, args.hidden, args.layers).to(runtime.device).eval()
    buckets = [gs.Bucket(*map(int, b.split("x"))) for b in args.buckets.split(",")]
    server = Server(model, runtime, buckets)
    server.warm_up()

    rng = random.Random(args.seed)
    lengths = [max(1, int(args.longest ** rng.uniform(0.2, 1))) for _ in range(args.requests)]
    requests = [server.request(torch.randint(256, (length,))) for length in lengths]
    half = len(requests) // 2
    server.serve(deque(requests[:half]))
    burst = [server.request(torch.randint(256, (3,))) for _ in range(server.largest.sequences + 1)]
    server.round(burst, [r.left for r in burst])
    server.serve(deque(requests[half:]))

    worst = 0.0
    for request in requests + burst:
        batch = server._batch([request.prompt], [server._fresh()])
        alone = server.prefill.function(*batch, server.tables(batch))[0][0]
        assert request.logits is not None
        worst = max(worst, (request.logits - alone).abs().max().item() / alone.abs().max().item())
    if not worst < 1e-3:
        raise SystemExit(f"logits differ from those of a prompt alone by {worst}")
    stats = server.prefill.stats
    found = {
        "requests": len(requests) + len(burst), "rounds": len(server.rounds), "captures": stats.captures,
        "replays": stats.replays, "overflows": dict(stats.overflows), "in pieces": sum(
            n > server.largest.tokens // 2 for n in lengths),
        "largest difference": worst, "tokens used of held": round(stats.tokens_used / max(1, stats.tokens_held), 3),
        "static bytes": server.prefill.price().bytes,
    }
    if args.json:
        print(json.dumps(found))
    else:
        console = Console()
        console.print(table_of(server.rounds))
        console.print(found)
    return found


if __name__ == "__main__":
    main()
