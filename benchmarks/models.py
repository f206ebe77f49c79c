"""Whole models on one GPU: 12 layers trained step by step, and a prefill of a ``transformers`` model.

    python benchmarks/models.py --json models.json
    python benchmarks/models.py --device cpu --small        # the same steps on a CPU, to try the script

Section *train*: 12 layers of each kind (hidden 1024, heads of 128, MLP of 4096, bf16, vocabulary 32000), packed batches
of 4096 tokens, AdamW, clipping: 200 steps eager and captured from the same parameters, losses compared bit for bit;
tokens a second over the second half of the steps; memory against the price told beforehand.

Section *prefill*: Qwen3.5's text model with random weights (hidden 2048, 16 layers, every fourth with full attention,
1.2 billion parameters, bf16), one prompt: adapted eager, adapted captured, and unmodified, which takes
flash-linear-attention's operators where they are installed. Milliseconds, medians, device idle before each sample.
"""

from __future__ import annotations

import argparse
import functools
import json
import random
import time
from typing import Any

import torch
import torch.nn.functional as F
from layers import Clock, error, host_launches, serve_by_kernels
from rich.console import Console
from torch import nn

import graphsafe as gs
from graphsafe_kernels.integrations import adapt
from graphsafe_kernels.layers import GatedDeltaNet, KimiDeltaAttention

IGNORED = -100


class Block(nn.Module):
    def __init__(self, kind: str, hidden: int, heads: int, width: int) -> None:
        super().__init__()
        cls = GatedDeltaNet if kind == "gdn" else KimiDeltaAttention
        self.norm, self.mlp_norm = nn.RMSNorm(hidden), nn.RMSNorm(hidden)
        self.mixer = cls(hidden_size=hidden, num_heads=heads, head_dim=width, expand_v=1)
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


def train(kind: str, args: argparse.Namespace, rt: Any) -> dict[str, Any]:
    small = args.small
    bucket = gs.Bucket(tokens=128, sequences=4) if small else gs.Bucket(tokens=4096, sequences=16)
    sizes = (2, 32, 2, 16, 64) if small else (12, 1024, 8, 128, 32000)
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
        del model, optimizer, step, run
    row["losses equal"] = bool(torch.equal(losses["captured"], losses["eager"]))
    differing = (losses["captured"] != losses["eager"]).nonzero()
    row["first difference"] = int(differing[0]) if len(differing) else None
    row["losses"] = [losses["captured"][i].item() for i in (0, steps // 2, steps - 1)]
    return row


def prefill(args: argparse.Namespace, rt: Any) -> list[dict[str, Any]]:
    from transformers import Qwen3_5ForCausalLM, Qwen3_5TextConfig

    small = args.small
    shape: dict[str, Any] = {
        "vocab_size": 32000, "hidden_size": 2048, "intermediate_size": 6144, "num_hidden_layers": 16,
        "num_attention_heads": 16, "num_key_value_heads": 4, "head_dim": 128, "linear_num_key_heads": 16,
        "linear_num_value_heads": 32, "linear_key_head_dim": 128, "linear_value_head_dim": 128,
    }
    if small:
        shape |= {"vocab_size": 64, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 4,
                  "num_attention_heads": 4, "head_dim": 16, "linear_num_key_heads": 2, "linear_num_value_heads": 4,
                  "linear_key_head_dim": 8, "linear_value_head_dim": 8}
    kinds = ["full_attention" if i % 4 == 3 else "linear_attention" for i in range(shape["num_hidden_layers"])]
    config = Qwen3_5TextConfig(**shape, layer_types=kinds, pad_token_id=None, bos_token_id=None, eos_token_id=None)
    torch.manual_seed(0)
    with torch.device(rt.device):
        model = Qwen3_5ForCausalLM(config).to(torch.float32 if small else torch.bfloat16).eval()
    parameters = sum(p.numel() for p in model.parameters())
    rows = []
    clock = Clock(rt.device, args.samples)
    prompts = {t: torch.randint(shape["vocab_size"], (1, t), device=rt.device)
               for t in ((32, 64) if small else (512, 1024, 4096, 8192))}
    with torch.no_grad():
        def unmodified(ids: torch.Tensor) -> torch.Tensor:
            # only the last token's logits are wanted
            return model(input_ids=ids, use_cache=False, logits_to_keep=1).logits

        for tokens, ids in prompts.items():
            run = lambda ids=ids: unmodified(ids)  # noqa: E731
            rows.append({"tokens": tokens, "parameters": parameters, **clock.medians({"unmodified": run})})
            rows[-1]["logits"] = run().clone()
            if clock.cuda:
                rows[-1]["launches"] = {"unmodified": host_launches(run)}
        adapt(model)
        for row, (tokens, ids) in zip(rows, prompts.items(), strict=True):
            bucket = gs.Bucket(tokens=tokens, sequences=1)
            cu = torch.tensor([0, tokens], dtype=torch.int32, device=rt.device)

            @gs.graphed(runtime=rt, buckets=[bucket], on_overflow="error")
            def captured(ids: torch.Tensor, cu_seqlens: torch.Tensor, tables: gs.ChunkTables) -> torch.Tensor:
                return model(input_ids=ids, tables=tables, logits_to_keep=1).logits

            def eager(ids: torch.Tensor = ids, cu: torch.Tensor = cu) -> torch.Tensor:
                return model(input_ids=ids, cu_seqlens=cu, logits_to_keep=1).logits

            replay = lambda ids=ids, cu=cu, captured=captured: captured(ids, cu)  # noqa: E731
            got = replay().clone()
            row["against unmodified"] = error(got, row.pop("logits"))
            row["replay equals eager"] = bool(torch.equal(got, captured.eager(ids, cu)))
            row |= clock.medians({"eager": eager, "captured": replay})
            if clock.cuda:
                row["launches"] |= {"eager": host_launches(eager), "captured": host_launches(replay)}
            captured.close()
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--section", action="append", choices=("train", "prefill"))
    parser.add_argument("--kind", action="append", choices=("gdn", "kda"))
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--samples", type=int, default=10)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--small", action="store_true", help="tiny sizes in fp32")
    parser.add_argument("--json")
    args = parser.parse_args()
    if args.device != "cpu":
        serve_by_kernels()
    rt = gs.get_runtime(args.device)
    found: dict[str, Any] = {}

    def keep(name: str, value: Any) -> None:
        found[name] = value
        Console(width=110).print({name: value})
        if args.json:
            with open(args.json, "w") as f:
                json.dump(found, f, indent=1)

    sections = args.section or ("train", "prefill")
    if "prefill" in sections:
        keep("prefill", prefill(args, rt))
    if "train" in sections:
        for kind in args.kind or ("gdn", "kda"):
            keep(f"train {kind}", train(kind, args, rt))


if __name__ == "__main__":
    main()
