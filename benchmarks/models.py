"""Whole models on one GPU: 12 layers trained step by step, and a prefill of a ``transformers`` model.

    python benchmarks/models.py --warm 15 --json models.json
    python benchmarks/models.py --device cpu --small        # the same steps on a CPU, to try the script

Section *train*: 12 layers of each kind (hidden 1024, heads of 128, MLP of 4096, bf16, vocabulary 32000), packed batches
of 4096 tokens, AdamW, clipping: 200 steps eager and captured from the same parameters, losses compared bit for bit;
tokens a second over the second half of the steps; memory against the price told beforehand.

Section *prefill*: Qwen3.5's text model with random weights (hidden 2048, 16 layers, every fourth with full attention,
1.2 billion parameters, bf16), one prompt: adapted eager, adapted captured, and unmodified, which takes
flash-linear-attention's operators where they are installed. Milliseconds, medians of the arms in turn, device idle
before each sample; what that library chooses at its first call it chooses at the longest prompt.

A section that fails is told, and the others go on.
"""

from __future__ import annotations

import argparse
import copy
import functools
import gc
import json
import multiprocessing
import os
import random
import sys
import time
import traceback
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import peers
import torch
import torch.nn.functional as F
from layers import KINDS, Clock, error, host_launches
from rich.console import Console
from torch import nn

import graphsafe as gs
from graphsafe_kernels.integrations import adapt

IGNORED = -100
PROMPTS = (512, 1024, 4096, 8192)


class Block(nn.Module):
    def __init__(self, kind: str, hidden: int, heads: int, width: int) -> None:
        super().__init__()
        cls, options = KINDS[kind]
        sizes: dict[str, Any] = {"num_heads": heads, "num_v_heads": heads, "head_dim": width, "expand_v": 1}
        self.norm, self.mlp_norm = nn.RMSNorm(hidden), nn.RMSNorm(hidden)
        self.mixer = cls(hidden_size=hidden, **options | sizes)
        self.up, self.down = nn.Linear(hidden, 8 * hidden, bias=False), nn.Linear(4 * hidden, hidden, bias=False)

    def forward(self, x: torch.Tensor, tables: gs.ChunkTables) -> torch.Tensor:
        x = x + self.mixer(self.norm(x), tables=tables, use_graph=True)[0]
        gate, value = self.up(self.mlp_norm(x)).chunk(2, -1)
        return x + self.down(F.silu(gate) * value)


class Stack(nn.Module):
    def __init__(self, kind: str, depth: int, hidden: int, heads: int, width: int, vocabulary: int) -> None:
        super().__init__()
        self.embedding = nn.Embedding(vocabulary, hidden)
        self.blocks = nn.ModuleList(Block(kind, hidden, heads, width) for _ in range(depth))
        self.norm, self.head = nn.RMSNorm(hidden), nn.Linear(hidden, vocabulary, bias=False)

    def forward(self, ids: torch.Tensor, tables: gs.ChunkTables) -> torch.Tensor:
        x = self.embedding(ids)
        for block in self.blocks:
            x = block(x, tables)
        logits: torch.Tensor = self.head(self.norm(x))
        return logits


def loss_fn(model: nn.Module, batch: dict[str, torch.Tensor], tables: gs.ChunkTables) -> torch.Tensor:
    logits = model(batch["ids"], tables)
    return F.cross_entropy(logits[0], batch["targets"][0], ignore_index=IGNORED)


def batches(count: int, bucket: gs.Bucket, vocabulary: int, device: torch.device) -> list[dict[str, torch.Tensor]]:
    """Packed batches of the bucket's size, each of another layout; a target is its token plus one: it can be learnt."""
    rng, generator = random.Random(0), torch.Generator().manual_seed(0)
    found = []
    for _ in range(count):
        cuts = sorted(rng.sample(range(1, bucket.tokens), bucket.sequences - 1))
        ids = torch.randint(vocabulary, (1, bucket.tokens), generator=generator)
        cu = torch.tensor([0, *cuts, bucket.tokens], dtype=torch.int32)
        batch = {"ids": ids, "targets": (ids + 1) % vocabulary, "cu_seqlens": cu}
        found.append({name: t.to(device) for name, t in batch.items()})
    return found


def sizes_of(small: bool) -> tuple[gs.Bucket, tuple[int, int, int, int, int]]:
    """Bucket; depth, hidden, heads, width and vocabulary."""
    if small:
        return gs.Bucket(tokens=128, sequences=4), (2, 32, 2, 16, 64)
    return gs.Bucket(tokens=4096, sequences=16), (12, 1024, 8, 128, 32000)


def train(kind: str, args: argparse.Namespace, rt: Any) -> dict[str, Any]:
    small = args.small
    bucket, sizes = sizes_of(small)
    steps = 4 if small else args.steps
    data = batches(min(steps, 20), bucket, sizes[-1], rt.device)
    row: dict[str, Any] = {"kind": kind, "tokens": bucket.tokens, "steps": steps}
    losses: dict[str, torch.Tensor] = {}
    for mode in ("captured", "eager"):
        torch.manual_seed(0)
        dtype = torch.float32 if small else torch.bfloat16
        model = Stack(kind, *sizes).to(rt.device, dtype)
        options: dict[str, Any] = {"fused": True} | ({"capturable": True} if rt.device.type == "cuda" else {})
        optimizer = torch.optim.AdamW(model.parameters(), lr=3e-4, **options)
        step = gs.TrainStep(model, loss_fn, optimizer, runtime=rt, bucket=bucket, max_grad_norm=1.0,
                            on_overflow="error", inputs={"batch['targets']": gs.Input("tokens", pad=IGNORED)})
        if rt.device.type == "cuda":
            torch.cuda.synchronize()
            torch.cuda.reset_peak_memory_stats()
            before = torch.cuda.memory_allocated()
        figures = step.capture(data[0]) if mode == "captured" else None
        run = step if mode == "captured" else step.eager
        seen, start = [], 0.0
        for i in range(steps):
            if i == steps // 2:
                rt.synchronize()
                start = time.perf_counter()
            seen.append(run(data[i % len(data)]).detach().clone())
        rt.synchronize()
        row[mode] = {"tokens a second": round((steps - steps // 2) * bucket.tokens / (time.perf_counter() - start))}
        losses[mode] = torch.stack(seen).float().cpu()
        if rt.device.type == "cuda":
            row[mode]["peak bytes above the model"] = torch.cuda.max_memory_allocated() - before
        if figures is not None:
            row["price"] = {"promised": step.price().bytes, "arena": figures[0].arena_bytes,
                            "pool": figures[0].pool_bytes}
            if rt.device.type == "cuda":
                row["captured"]["host launches"] = host_launches(functools.partial(step, data[0]))
        step.close()
        del model, optimizer, step, run, seen
        gc.collect()
    row["losses equal"] = bool(torch.equal(losses["captured"], losses["eager"]))
    differing = (losses["captured"] != losses["eager"]).nonzero()
    row["first difference"] = int(differing[0]) if len(differing) else None
    row["losses"] = [losses["captured"][i].item() for i in (0, steps // 2, steps - 1)]
    return row


def qwen(small: bool, device: torch.device, layers: int) -> Any:
    """Qwen3.5's text model at random."""
    os.environ["FLA_DISABLE_BACKEND_DISPATCH"] = "1"  # that library's own kernels, which transformers imports
    from transformers import Qwen3_5ForCausalLM, Qwen3_5TextConfig

    shape: dict[str, Any] = {
        "vocab_size": 32000, "hidden_size": 2048, "intermediate_size": 6144, "num_attention_heads": 16,
        "num_key_value_heads": 4, "head_dim": 128, "linear_num_key_heads": 16, "linear_num_value_heads": 32,
        "linear_key_head_dim": 128, "linear_value_head_dim": 128,
    }
    if small:
        shape |= {"vocab_size": 64, "hidden_size": 32, "intermediate_size": 48, "num_attention_heads": 4,
                  "head_dim": 16, "linear_num_key_heads": 2, "linear_num_value_heads": 4, "linear_key_head_dim": 8,
                  "linear_value_head_dim": 8}
    kinds = ["full_attention" if i % 4 == 3 else "linear_attention" for i in range(layers)]
    config = Qwen3_5TextConfig(**shape, num_hidden_layers=layers, layer_types=kinds, pad_token_id=None,
                               bos_token_id=None, eos_token_id=None)
    torch.manual_seed(0)
    with torch.device(device):
        return Qwen3_5ForCausalLM(config).to(torch.float32 if small else torch.bfloat16).eval()


def last_logits(model: Any, ids: torch.Tensor, **packed: Any) -> torch.Tensor:
    """Of the last token alone, as a prefill wants them."""
    with torch.no_grad():
        logits: torch.Tensor = model(input_ids=ids, logits_to_keep=1, **packed).logits
        return logits


def prompts(small: bool, device: torch.device) -> dict[int, torch.Tensor]:
    """By length, the longest first."""
    torch.manual_seed(1)
    lengths = (64, 32) if small else sorted(PROMPTS, reverse=True)
    return {t: torch.randint(64 if small else 32000, (1, t), device=device) for t in lengths}


def prefill(args: argparse.Namespace, rt: Any) -> Iterator[list[dict[str, Any]]]:
    """The rows so far, after each length."""
    unmodified = qwen(args.small, rt.device, 4 if args.small else 16)
    adapted = adapt(copy.deepcopy(unmodified))
    parameters = sum(p.numel() for p in unmodified.parameters())
    clock, rows = Clock(rt.device, args.samples), list[dict[str, Any]]()
    for tokens, ids in prompts(args.small, rt.device).items():
        cu = torch.tensor([0, tokens], dtype=torch.int32, device=rt.device)

        @gs.graphed(runtime=rt, buckets=[gs.Bucket(tokens=tokens, sequences=1)], on_overflow="error")
        def captured(ids: torch.Tensor, cu_seqlens: torch.Tensor, tables: gs.ChunkTables) -> torch.Tensor:
            return last_logits(adapted, ids, tables=tables)

        arms: dict[str, Callable[[], torch.Tensor]] = {
            "unmodified": functools.partial(last_logits, unmodified, ids, use_cache=False),
            "eager": functools.partial(last_logits, adapted, ids, cu_seqlens=cu),
            "captured": functools.partial(captured, ids, cu),
        }
        got = arms["captured"]().clone()
        row: dict[str, Any] = {
            "tokens": tokens, "parameters": parameters, "against unmodified": error(got, arms["unmodified"]()),
            "replay equals eager": bool(torch.equal(got, captured.eager(ids, cu))), **clock.medians(arms),
        }
        if clock.cuda:
            row["launches"] = {name: host_launches(run) for name, run in arms.items()}
        captured.close()
        rows.append(row)
        yield rows


def compile_training(kind: str, device: str, small: bool) -> str:
    """Compile one block's kernels, in a process of its own; what went wrong."""
    try:
        rt, (bucket, (_, *sizes)) = gs.get_runtime(device), sizes_of(small)
        model = Stack(kind, 1, *sizes).to(rt.device, torch.float32 if small else torch.bfloat16)
        batch = batches(1, bucket, sizes[-1], rt.device)[0]
        loss_fn(model, batch, rt.tables(bucket).build(batch["cu_seqlens"])).backward()
        rt.synchronize()
    except Exception as problem:  # told here, and again where it is measured
        return f"train {kind}: {problem!r}"[:300]
    return ""


def compile_prefill(device: str, small: bool, rank: int | None, of: int) -> str:
    """Compile a few layers' kernels: this project's, or share ``rank`` of the other library's choices."""
    try:
        rt = gs.get_runtime(device)
        model = qwen(small, rt.device, 4)
        if rank is None:
            adapt(model)
        for tokens, ids in prompts(small, rt.device).items():
            if rank is None:
                cu = torch.tensor([0, tokens], dtype=torch.int32, device=rt.device)
                last_logits(model, ids, cu_seqlens=cu)
            else:
                peers.compile_choices(functools.partial(last_logits, model, ids, use_cache=False), rank, of)
        rt.synchronize()
    except Exception as problem:
        return f"prefill {rank}: {problem!r}"[:300]
    return ""


def compile_all(processes: int, sections: list[str], kinds: list[str], args: argparse.Namespace) -> list[str]:
    """Fill the compiler's cache by several processes at once; what went wrong."""
    results = os.environ.get("FLA_CACHE_RESULTS")
    os.environ["FLA_CACHE_RESULTS"] = "0"  # of the processes below: nothing they measure is worth keeping
    try:
        with multiprocessing.get_context("spawn").Pool(processes, maxtasksperchild=1) as pool:
            found = []
            if "train" in sections:
                found += [pool.apply_async(compile_training, (kind, args.device, args.small)) for kind in kinds]
            if "prefill" in sections:
                ranks = [None, *(range(processes) if args.device == "cuda" else ())]
                found += [pool.apply_async(compile_prefill, (args.device, args.small, r, processes)) for r in ranks]
            return [problem for problem in (f.get() for f in found) if problem]
    finally:
        if results is None:
            del os.environ["FLA_CACHE_RESULTS"]
        else:
            os.environ["FLA_CACHE_RESULTS"] = results


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--section", action="append", choices=("train", "prefill"))
    parser.add_argument("--kind", action="append", choices=("gdn", "kda"))
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--samples", type=int, default=10)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--warm", type=int, default=0, help="processes that compile everything beforehand")
    parser.add_argument("--warm-only", action="store_true", help="compile and stop")
    parser.add_argument("--small", action="store_true", help="tiny sizes in fp32")
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    began = time.time()
    found: dict[str, Any] = {}
    sections, kinds = args.section or ["prefill", "train"], args.kind or ["gdn", "kda"]

    def keep(name: str, value: Any) -> None:
        found[name] = value
        print(f"[{time.time() - began:4.0f}s]", end=" ")
        Console(width=110).print({name: value})
        if args.json:
            args.json.write_text(json.dumps(found, indent=1))

    def attempt(name: str, run: Callable[[], Any]) -> None:
        try:
            result = run()
            for value in result if isinstance(result, Iterator) else [result]:
                keep(name, value)
        except Exception as problem:  # the other sections are worth their time
            traceback.print_exc()
            keep(f"{name} failed", repr(problem)[:300])
        gc.collect()

    if args.warm:
        keep("warm", compile_all(args.warm, sections, kinds, args))
    if args.warm_only:
        return
    rt = gs.get_runtime(args.device)
    if args.device == "cuda":
        peers.choose_briefly()
        keep("device", {"name": torch.cuda.get_device_name(), "torch": torch.__version__})
    if "prefill" in sections:
        attempt("prefill", lambda: prefill(args, rt))
    if "train" in sections:
        for kind in kinds:
            attempt(f"train {kind}", functools.partial(train, kind, args, rt))
    sys.exit(any(name.endswith("failed") for name in found))


if __name__ == "__main__":
    main()
