"""torch operators on tensors of the simulated device.

Device memory is host memory, so an operator runs as torch's CPU kernel on CPU tensors that view the same bytes: at
once, or, on a capturing stream, as a recorded job over raw addresses that every replay runs again.

Requirements
------------
1. Every aten operator that torch_npu has a kernel for, and every one that has only a CPU kernel, is served; operators
   that torch composes of others, and torch_npu replaces, get torch's composition back.
2. Allocation, views, storages and reads of one value stay torch_npu's own. So do copies that neither cast nor stride on
   the device, with every check that torch_npu and CANN make.
3. Under capture the shape of a result comes from a meta kernel, its memory from torch_npu's pool of the graph; an
   operator whose shape depends on values is refused.
4. Random operators draw from the generator of the device: seeds, states and offsets are followed by eager runs and
   replays alike.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch.utils._pytree import tree_flatten, tree_unflatten

from graphsafe_npu.sim import streams

__all__ = ["install"]

_TORCH_NPUS_OWN = {
    "empty.memory_format", "empty_strided", "resize_", "set_", "set_.source_Storage", "set_.source_Tensor",
    "set_.source_Storage_storage_offset", "is_set_to", "record_stream", "is_pinned", "_pin_memory", "pin_memory",
    "_local_scalar_dense", "view", "as_strided", "_reshape_alias", "squeeze", "squeeze.dim", "unsqueeze", "unfold",
    "view_as_real", "view_as_complex", "_lazy_clone",
}  # fmt: skip
_IMPLICIT, _EXPLICIT = "CompositeImplicitAutograd", "CompositeExplicitAutograd"
_COMPOSED = {"_to_copy", "clone", "empty_like", "contiguous"}
"""Operators torch composes below autograd, whose composition serves here too."""


class _View(NamedTuple):
    """A tensor as an address and a geometry."""

    address: int
    nbytes: int
    dtype: torch.dtype
    shape: torch.Size
    stride: tuple[int, ...]
    offset: int


def _is_npu(x: Any) -> bool:
    return isinstance(x, torch.Tensor) and x.device.type == "npu"


def _view_of(t: torch.Tensor) -> _View:
    storage = t.untyped_storage()
    return _View(storage.data_ptr(), storage.nbytes(), t.dtype, t.size(), t.stride(), int(t.storage_offset()))


def _on_host(v: _View) -> torch.Tensor:
    """A CPU tensor over the same bytes."""
    if v.nbytes == 0:
        return torch.empty_strided(v.shape, v.stride, dtype=v.dtype)
    raw = torch.frombuffer((ctypes.c_char * v.nbytes).from_address(v.address), dtype=torch.uint8)
    return torch.empty(0, dtype=v.dtype).set_(raw.untyped_storage(), v.offset, v.shape, v.stride)


def _call(op: Any, leaves: Sequence[Any], spec: Any, device: str, *, zeros: bool = False) -> Any:
    """Run ``op`` elsewhere: tensors of the device and the device itself are replaced, generators left out."""

    def there(x: Any) -> Any:
        if isinstance(x, _View):
            return _on_host(x)
        if _is_npu(x):
            made = torch.empty_strided(x.size(), x.stride(), dtype=x.dtype, device=device)
            return made.zero_() if zeros else made
        if isinstance(x, torch.device):
            return torch.device(device) if x.type == "npu" else x
        return None if isinstance(x, torch.Generator) else x

    args, kwargs = tree_unflatten([there(x) for x in leaves], spec)
    with torch._C._AutoDispatchBelowAutograd():
        return op(*args, **kwargs)


_ODD = (0x9E3779B97F4A7C15, 0xBF58476D1CE4E5B9)
"""Two odd constants that spread a seed and an offset over 64 bits (the increments of splitmix64)."""


def _drawing(run: Callable[[], Any], generator: torch.Generator) -> Any:
    """Run a CPU kernel that draws, from the state of ``generator``, and advance that by one Philox step."""
    host = torch.default_generator
    kept = host.get_state()
    offset = int(generator.get_offset())
    host.manual_seed((int(generator.initial_seed()) * _ODD[0] + offset * _ODD[1]) % 2**63)
    try:
        return run()
    finally:
        host.set_state(kept)
        generator.set_offset(offset + 4)


def _results(value: Any) -> list[Any]:
    return tree_flatten(value)[0]


class _Simulated:
    """One operator as a kernel of the device."""

    def __init__(self, op: Any) -> None:
        self.op = op
        self.schema = op._schema
        returns = [r.alias_info is not None for r in self.schema.returns]
        self.written = [a.name for a in self.schema.arguments if a.alias_info and a.alias_info.is_write]
        self.in_place = all(returns) and bool(self.written)  # and with out=
        self.sizes_results = self.in_place and not self.schema.name.split("::")[1].endswith("_")
        self.for_the_host = any("Tensor" not in str(r.type) for r in self.schema.returns)
        self.random = torch.Tag.nondeterministic_seeded in op.tags

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        npu: Any = torch.npu  # type: ignore[attr-defined]
        handle = streams.current_handle()
        capturing = npu.is_current_stream_capturing()
        if self.for_the_host:
            npu.current_stream().synchronize()  # refused under capture, as on the device
        leaves, spec = tree_flatten((args, kwargs))
        if capturing:
            leaves = [self._frozen(x) for x in leaves]
        operands = [_view_of(x) if _is_npu(x) else x for x in leaves]
        run = self._runner(operands, spec, leaves)
        shapes = self._shapes(leaves, spec, capturing) if capturing or self.sizes_results else None
        if self.in_place:
            return self._in_place(args, kwargs, leaves, spec, shapes, handle)
        return self._new(run() if shapes is None else shapes, shapes is None, run, handle)

    def _frozen(self, x: Any) -> Any:
        if isinstance(x, torch.Tensor) and x.device.type == "cpu":
            if x.dim() > 0:
                raise RuntimeError(f"{self.op}: a CPU tensor of shape {tuple(x.shape)} in a captured operator")
            return x.clone()  # a scalar: its value is recorded
        return x

    def _runner(self, operands: list[Any], spec: Any, leaves: list[Any]) -> Callable[[], Any]:
        def run() -> Any:
            return _call(self.op, operands, spec, "cpu")

        if not self.random:
            return run
        given = next((x for x in leaves if isinstance(x, torch.Generator) and x.device.type == "npu"), None)
        npu: Any = torch.npu  # type: ignore[attr-defined]
        generator = npu.default_generators[npu.current_device()] if given is None else given
        return lambda: _drawing(run, generator)

    def _shapes(self, leaves: list[Any], spec: Any, capturing: bool) -> Any:
        """What the operator would return, without data."""
        try:
            return _call(self.op, leaves, spec, "meta")
        except NotImplementedError:
            if not capturing or self.in_place:
                return None
            if torch.Tag.dynamic_output_shape in self.op.tags:
                what = f"{self.op}: the shape of the result depends on values: it cannot be captured"
                raise RuntimeError(what) from None
            return _call(self.op, leaves, spec, "cpu", zeros=True)  # there is no meta kernel

    def _in_place(self, args: Any, kwargs: Any, leaves: list[Any], spec: Any, shapes: Any, handle: int) -> Any:
        named = dict(zip([a.name for a in self.schema.arguments], args, strict=False), **kwargs)
        outs = [named.get(name) for name in self.written]
        for out, shape in zip(outs, _results(shapes), strict=False):
            if not isinstance(out, torch.Tensor) or not isinstance(shape, torch.Tensor):
                continue
            if _is_npu(out) and out.shape != shape.shape:
                out.resize_(shape.shape)
        run = self._runner([_view_of(x) if _is_npu(x) else x for x in leaves], spec, leaves)

        def job() -> None:
            run()

        streams.submit(job, handle)
        if not self.schema.returns:
            return None
        return outs[0] if len(self.schema.returns) == 1 else tuple(outs)

    def _new(self, like: Any, done: bool, run: Callable[[], Any], handle: int) -> Any:
        """Allocate the results through torch_npu and submit their computation; ``like`` holds them if ``done``."""
        flat, spec = tree_flatten(like)
        if any(isinstance(x, torch.Tensor) and x.layout is not torch.strided for x in flat):
            npu: Any = torch.npu  # type: ignore[attr-defined]
            npu.current_stream().synchronize()  # the host has to know how many elements there are
            raise NotImplementedError(f"{self.op}: sparse tensors are not simulated")
        made = [
            torch.empty_strided(x.size(), x.stride(), dtype=x.dtype, device="npu") if isinstance(x, torch.Tensor) else x
            for x in flat
        ]
        targets = [_view_of(x) if isinstance(x, torch.Tensor) else None for x in made]

        def job() -> None:
            for target, value in zip(targets, flat if done else _results(run()), strict=True):
                # a result that nobody asked for may be None or empty where a meta kernel tells a shape
                if target is not None and value is not None and value.numel():
                    _on_host(target).copy_(value)

        streams.submit(job, handle)
        return tree_unflatten(made, spec)


def _copy(real: Any, convert: Callable[..., Any]) -> Callable[..., Any]:
    """``copy_``: plain transfers are torch_npu's own; casts and strides, which need the device's operators, are not."""

    def empty(shape: torch.Size, dtype: torch.dtype, device: str) -> torch.Tensor:
        return torch.empty(shape, dtype=dtype, device=device)

    def copy_(keys: Any, dst: torch.Tensor, src: torch.Tensor, non_blocking: bool = False) -> Any:
        same = dst.dtype == src.dtype and dst.shape == src.shape
        plain = same and all(t.is_contiguous() and not t.is_conj() and not t.is_neg() for t in (dst, src))
        if plain or dst.numel() == 0:
            return real.call_boxed(keys, dst, src, non_blocking)
        if _is_npu(dst) and _is_npu(src):
            return convert(dst, src)
        if _is_npu(dst):  # transfer as it is, then convert there
            source = src.resolve_conj().resolve_neg().contiguous()
            return convert(dst, real.call_boxed(keys, empty(src.shape, src.dtype, "npu"), source, non_blocking))
        there = convert(empty(dst.shape, dst.dtype, "npu"), src)
        if dst.is_contiguous():
            return real.call_boxed(keys, dst, there, non_blocking)
        return dst.copy_(real.call_boxed(keys, empty(dst.shape, dst.dtype, "cpu"), there, False))

    return copy_


def _lstm_cell(
    igates: torch.Tensor,
    hgates: torch.Tensor,
    cx: torch.Tensor,
    b_ih: torch.Tensor | None = None,
    b_hh: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """``_thnn_fused_lstm_cell``, which torch calls on every device but the CPU, in plain operators."""
    gates = sum((b for b in (b_ih, b_hh) if b is not None), igates + hgates)
    write, keep, new, read = gates.chunk(4, 1)
    cy = keep.sigmoid() * cx + write.sigmoid() * new.tanh()
    return read.sigmoid() * cy.tanh(), cy, gates


def _gru_cell(
    igates: torch.Tensor,
    hgates: torch.Tensor,
    hx: torch.Tensor,
    b_ih: torch.Tensor | None = None,
    b_hh: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """``_thnn_fused_gru_cell``, likewise."""
    from_input = (igates if b_ih is None else igates + b_ih).chunk(3, 1)
    from_state = (hgates if b_hh is None else hgates + b_hh).chunk(3, 1)
    reset, update = ((a + b).sigmoid() for a, b in zip(from_input[:2], from_state[:2], strict=True))
    new = (from_input[2] + reset * from_state[2]).tanh()
    return new + update * (hx - new), igates + hgates


_CELLS = {"_thnn_fused_lstm_cell": _lstm_cell, "_thnn_fused_gru_cell": _gru_cell}
_library: list[torch.library.Library] = []


def _overload(full: str) -> Any:
    packet, _, overload = full.removeprefix("aten::").partition(".")
    return getattr(getattr(torch.ops.aten, packet, None), overload or "default", None)


def install() -> None:
    """Register the kernels; torch_npu has to be loaded."""
    lib = torch.library.Library("aten", "IMPL")
    _library.append(lib)
    dispatch: Any = torch._C
    has, kernel_of = dispatch._dispatch_has_kernel_for_dispatch_key, torch.library.get_kernel
    for full in dispatch._dispatch_get_all_op_names():
        name = full.removeprefix("aten::")
        op = _overload(full) if full.startswith("aten::") else None
        if op is None or name in _TORCH_NPUS_OWN or name in ("copy_", *_CELLS) or torch.Tag.inplace_view in op.tags:
            continue
        on_npu = has(full, "PrivateUse1")
        composite = _IMPLICIT if has(full, _IMPLICIT) else _EXPLICIT if has(full, _EXPLICIT) else None
        if on_npu and composite and (composite == _IMPLICIT or name in _COMPOSED):
            composed = kernel_of(full, "PrivateUse2")  # a back end without kernels resolves to the composition

            def torchs_way(keys: Any, *args: Any, composed: Any = composed, **kwargs: Any) -> Any:
                return composed.call_boxed(keys, *args, **kwargs)

            lib.impl(name, torchs_way, "PrivateUse1", with_keyset=True)
            if composite == _IMPLICIT:
                lib.impl(name, torchs_way, "AutogradPrivateUse1", with_keyset=True)
        elif (on_npu or (has(full, "CPU") and not composite)) and not _makes_a_view(op):
            lib.impl(name, _Simulated(op), "PrivateUse1")
    copy = _copy(kernel_of("aten::copy_", "PrivateUse1"), _Simulated(torch.ops.aten.copy_.default))
    lib.impl("copy_", copy, "PrivateUse1", with_keyset=True)
    for name, cell in _CELLS.items():
        for key in ("PrivateUse1", "AutogradPrivateUse1"):
            lib.impl(name, cell, key)
    lib.impl("_fused_sdp_choice", lambda *args, **kwargs: 0, "PrivateUse1")  # attention in plain operators


def _makes_a_view(op: Any) -> bool:
    return any(r.alias_info and not r.alias_info.is_write for r in op._schema.returns)
