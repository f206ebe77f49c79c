"""``graphsafe price``: the bytes of a bucket before anything is allocated."""

from __future__ import annotations

import importlib
import json
from enum import Enum
from typing import Annotated

import torch
import typer
from rich.console import Console
from rich.table import Table

from graphsafe.bucket import Bucket
from graphsafe.errors import error
from graphsafe.pricing import Price, operator_price

__all__ = ["parse_bucket", "price"]


class Operator(str, Enum):
    gdn = "gdn"
    kda = "kda"


class Dtype(str, Enum):
    bfloat16 = "bfloat16"
    float16 = "float16"
    float32 = "float32"


def parse_bucket(text: str, chunk_size: int) -> Bucket:
    """``4096x32`` as a bucket of 4,096 tokens in 32 sequences."""
    parts = text.lower().split("x")
    if len(parts) != 2 or not all(p.isdigit() for p in parts):
        raise error("argument", f"bucket {text!r}: TOKENSxSEQUENCES is needed, 4096x32 for example")
    return Bucket(int(parts[0]), int(parts[1]), chunk_size)


def price(
    bucket: Annotated[str, typer.Option(help="Capacity as TOKENSxSEQUENCES.")] = "4096x32",
    heads: Annotated[int, typer.Option(min=1, help="Query/key heads.")] = 32,
    value_heads: Annotated[int | None, typer.Option(min=1, help="Value heads; as many as heads if not given.")] = None,
    key_dim: Annotated[int, typer.Option(min=1, help="Width of a key head.")] = 128,
    value_dim: Annotated[int, typer.Option(min=1, help="Width of a value head.")] = 128,
    operator: Annotated[Operator, typer.Option(help="The operator whose tensors are priced.")] = Operator.kda,
    dtype: Annotated[Dtype, typer.Option(help="Type of the activations.")] = Dtype.bfloat16,
    chunk_size: Annotated[int, typer.Option(help="Tokens of a chunk.")] = 64,
    backward: Annotated[bool, typer.Option("--backward", help="Include the gradients.")] = False,
    kind: Annotated[str | None, typer.Option(help="Include the kernels' workspace on a device of this kind.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
) -> None:
    """Print the static memory of a bucket: operands, states, tables, results, and gradients if wanted."""
    capacity = parse_bucket(bucket, chunk_size)
    priced = operator_price(
        capacity,
        operator=operator.value,
        heads=heads,
        value_heads=value_heads,
        key_dim=key_dim,
        value_dim=value_dim,
        dtype=getattr(torch, dtype.value),
        backward=backward,
        workspace=0 if kind is None else _workspace(kind),
    )
    typer.echo(_json(capacity, priced)) if as_json else Console().print(_table(capacity, operator.value, priced))


def _workspace(kind: str) -> int:
    """Bytes of workspace that a launch of this project's kernels takes at most."""
    kinds = importlib.import_module("graphsafe_kernels.policy").KINDS
    if kind not in kinds:
        raise error("argument", f"device kind {kind!r}", remedy=f"Known: {', '.join(kinds)}.")
    workspace: int = kinds[kind].cores * kinds[kind].workspace
    return workspace


def _json(bucket: Bucket, priced: Price) -> str:
    lines = [
        {"name": i.name, "shape": i.shape, "dtype": str(i.dtype).removeprefix("torch."), "bytes": i.bytes}
        for i in priced.lines
    ]
    return json.dumps(
        {
            "tokens": bucket.tokens,
            "sequences": bucket.sequences,
            "slots": bucket.slots,
            "bytes": priced.bytes,
            "tensors": lines,
        }
    )


def _table(bucket: Bucket, operator: str, priced: Price) -> Table:
    table = Table(title=f"{operator}, bucket {bucket}: {bucket.slots} slots", show_footer=True)
    table.add_column("tensor", footer="total")
    table.add_column("shape")
    table.add_column("dtype")
    table.add_column("bytes", justify="right", footer=f"{priced.bytes:,}")
    for line in priced.lines:
        table.add_row(line.name, str(list(line.shape)), str(line.dtype).removeprefix("torch."), f"{line.bytes:,}")
    return table
