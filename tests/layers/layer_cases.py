"""Small layers of both kinds in fp64, and one way to run them forward and backward."""

from __future__ import annotations

from itertools import accumulate
from typing import Any

import torch

from graphsafe_kernels.layers import GatedDeltaNet, KimiDeltaAttention, LayerState

F64 = torch.float64
NAN = float("nan")
HIDDEN = 6

CASES: dict[str, tuple[type, dict[str, Any]]] = {
    "gdn": (GatedDeltaNet, {"expand_v": 1.5, "num_heads": 2, "head_dim": 4, "norm_eps": 0.01}),
    "gdn-grouped-bias": (GatedDeltaNet, {"num_heads": 1, "num_v_heads": 3, "head_dim": 4, "conv_bias": True,
                                         "output_gate_activation": "sigmoid", "allow_neg_eigval": True}),
    "gdn-bare": (GatedDeltaNet, {"num_heads": 2, "head_dim": 3, "use_gate": False, "use_short_conv": False,
                                 "expand_v": 1, "norm_eps": 0.02}),
    "kda": (KimiDeltaAttention, {"num_heads": 2, "head_dim": 4, "norm_eps": 0.03}),
    "kda-grouped-bounded": (KimiDeltaAttention, {"num_heads": 1, "num_v_heads": 2, "head_dim": 4, "expand_v": 2,
                                                 "conv_bias": True, "conv_size": 3, "safe_gate": True,
                                                 "lower_bound": -4.0}),
    "kda-bare": (KimiDeltaAttention, {"num_heads": 2, "head_dim": 4, "use_short_conv": False,
                                      "allow_neg_eigval": True}),
}


def make_layer(case: str, **changes: Any) -> GatedDeltaNet | KimiDeltaAttention:
    """The layer of a case with every parameter at random, so that none hides behind a zero or a one."""
    cls, arguments = CASES[case]
    with torch.random.fork_rng():
        torch.manual_seed(sorted(CASES).index(case))
        layer = cls(hidden_size=HIDDEN, **{"layer_idx": 0, **arguments, **changes}).to(F64)
        with torch.no_grad():
            for name, parameter in layer.named_parameters():
                if "norm" in name or "bias" in name:
                    parameter.copy_(torch.randn_like(parameter))
                elif parameter.dim() > 1:
                    parameter.copy_(torch.randn_like(parameter) * 0.5)
    return layer


def boundaries(lengths: list[int]) -> torch.Tensor:
    return torch.tensor([0, *accumulate(lengths)], dtype=torch.int32)


def randn(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=F64)


def behind(t: torch.Tensor, rows: int, value: float = NAN) -> torch.Tensor:
    """A packed batch [1, T, ...] with rows of ``value`` appended."""
    return torch.cat([t, torch.full((1, rows, *t.shape[2:]), value, dtype=t.dtype)], 1)


def tensors(state: LayerState | None) -> list[torch.Tensor]:
    """The tensors of a state, recurrent first."""
    return [] if state is None else [t for t in state if t is not None]


def with_tensors(state: LayerState, new: list[torch.Tensor]) -> LayerState:
    """A state like ``state`` made of ``new``, in the order of :func:`tensors`."""
    return LayerState(new[0], None if state.conv_state is None else new[1])


def random_state(layer: GatedDeltaNet | KimiDeltaAttention, sequences: int, seed: int = 1) -> LayerState:
    zero = layer.zero_state(sequences)
    return with_tensors(zero, [randn(*t.shape, seed=seed + i) for i, t in enumerate(tensors(zero))])


def select(state: LayerState, sequences: slice) -> LayerState:
    """Some sequences of a state."""
    return with_tensors(state, [t[sequences] for t in tensors(state)])


def run(layer: GatedDeltaNet | KimiDeltaAttention, x: torch.Tensor, dy: torch.Tensor,
        state: LayerState | None = None, dstate: LayerState | None = None, **arguments: Any) -> dict[str, torch.Tensor]:
    """Everything a call computes, by name: output, new state, and the gradients of x, the state and all parameters."""
    leaf = x.detach().requires_grad_()
    start = None if state is None else with_tensors(state, [t.detach().requires_grad_() for t in tensors(state)])
    output, none, new = layer(leaf, past_key_values=start, use_cache=True, **arguments)
    assert none is None
    inputs = {"x": leaf, **{f"state {i}": t for i, t in enumerate(tensors(start))}, **dict(layer.named_parameters())}
    roots, grads = [output], [dy]
    if dstate is not None:
        roots += tensors(new)
        grads += tensors(dstate)
    got = torch.autograd.grad(roots, list(inputs.values()), grads)
    return {"output": output.detach(), **{f"new state {i}": t.detach() for i, t in enumerate(tensors(new))},
            **{f"gradient of {name}": g for name, g in zip(inputs, got, strict=True)}}


def assert_close(got: dict[str, torch.Tensor], want: dict[str, torch.Tensor], atol: float = 1e-10) -> None:
    """Same names, same shapes, no NaN, and no difference above ``atol`` (relative above 1)."""
    assert got.keys() == want.keys()
    for name, w in want.items():
        g = got[name]
        assert g.shape == w.shape, name
        assert torch.isfinite(g).all(), f"{name} is not finite"
        if w.numel():
            assert ((g - w).abs() / w.abs().clamp(min=1)).max().item() <= atol, name
