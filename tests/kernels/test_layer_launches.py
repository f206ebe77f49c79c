"""What a layer costs: its launches and the bytes it allocates are counted, and held to the figures written here.

Counted are kernels, as Triton tells them, and operators of torch that do work on a device: not views, not allocation.
The figures are of a packed batch with the caller's tables, so that one more launch builds the tables of a whole model.
"""

from __future__ import annotations

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from graphsafe_kernels import backend
from graphsafe_kernels.layers import GatedDeltaNet, KimiDeltaAttention
from graphsafe_kernels.tables import build_tables

TOKENS, HIDDEN = 128, 32
LAYERS = {"gdn": (GatedDeltaNet, {"expand_v": 2}), "kda": (KimiDeltaAttention, {"expand_v": 1})}
FORWARD = ["conv_forward_kernel", "columns_kernel", "prepare_kernel", "forward_chain_kernel", "norm_forward_kernel"]
FREE = {"empty", "new_empty", "empty_like", "empty_strided", "new_empty_strided", "detach", "lift_fresh"}
PRODUCTS = {"mm", "addmm", "bmm", "linear"}


class Work(TorchDispatchMode):
    """Names of the operators that do work, and the bytes of the storages they and allocations make."""

    def __init__(self):
        super().__init__()
        self.operators, self.bytes, self._seen = [], 0, []

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        result = function(*args, **(kwargs or {}))
        name = function._schema.name.split("::")[1]
        views = any(a.alias_info is not None and not a.alias_info.is_write for a in function._schema.arguments)
        if not views and name not in FREE and not name.startswith("_unsafe_view"):
            self.operators.append(name)
        for t in result if isinstance(result, (list, tuple)) else [result]:
            if isinstance(t, torch.Tensor) and not views:
                storage = t.untyped_storage()
                if all(storage.data_ptr() != s.data_ptr() for s in self._seen):
                    self._seen.append(storage)  # kept alive, so that no address comes twice
                    self.bytes += storage.nbytes()
        return result


@pytest.fixture(autouse=True)
def _kernels(monkeypatch):
    """All kernels, whether or not they serve by default."""
    for operator in ("chunk_gated_delta_rule", "chunk_kda"):
        monkeypatch.delitem(backend.DEVICES, operator, raising=False)
    backend._load.cache_clear()
    yield
    backend._load.cache_clear()


def call(kind, device, launches, train):
    make, options = LAYERS[kind]
    layer = make(hidden_size=HIDDEN, head_dim=16, num_heads=2, **options).to(device)
    cu = torch.tensor([0, 50, 101, 101], dtype=torch.int32, device=device)
    tables = build_tables(cu, TOKENS)
    x = torch.randn(1, TOKENS, HIDDEN, device=device, requires_grad=train)
    dy = torch.randn(1, TOKENS, HIDDEN, device=device)
    weights = [p for p in layer.parameters() if train]

    launches.clear()
    with Work() as work, torch.set_grad_enabled(train):
        y = layer(x, tables=tables, use_graph=True)[0]
        if train:
            torch.autograd.grad(y, [x, *weights], dy)
    return work


LAUNCHES = {
    "gdn": {False: (5, 2, 0), True: (15, 6, 0)},
    "kda": {False: (5, 4, 0), True: (17, 12, 1)},
}
"""Kernels, matrix products and other operators (a bias' gradient), without gradients and with the backward."""
BYTES = {"gdn": {False: 4150, True: 8000}, "kda": {False: 4500, True: 10750}}
"""Allocated a token in fp32, of which the output of the fused projection is 800 and 656."""


@pytest.mark.parametrize("train", [False, True], ids=["forward", "training"])
@pytest.mark.parametrize("kind", LAYERS)
def test_launches_and_bytes_of_a_layer(device, launches, kind, train):
    work = call(kind, device, launches, train)
    products = [o for o in work.operators if o in PRODUCTS]
    others = [o for o in work.operators if o not in PRODUCTS]
    if not train:
        assert launches == FORWARD
    for found, most in zip((launches, products, others), LAUNCHES[kind][train], strict=True):
        assert len(found) <= most, found
    assert work.bytes / TOKENS <= BYTES[kind][train]
