"""The states of a layer between two calls, as a value or in a flash-linear-attention cache.

Requirements
------------
1. ``LayerState`` is a plain named tuple of tensors: a static input or output of a graph like any other.
2. A cache object is read and updated by the protocol of flash-linear-attention 0.6.0: ``len(cache)``,
   ``cache[layer_idx]`` (a dict), ``cache.update(layer_idx=, recurrent_state=, conv_state=, offset=)``. It holds the
   convolution's state as three tensors, of q, k and v; a ``LayerState`` as one.
3. A cache object is host state that a replay would not touch, so graph mode refuses it.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch

from graphsafe.errors import error

__all__ = ["LayerState", "read_state", "write_state"]


class LayerState(NamedTuple):
    """What a layer hands from one call to the next, for N sequences.

    ``recurrent_state`` ``[N, HV, V, K]`` in fp32 (fp64 for fp64); ``conv_state`` ``[N, D, W]`` in the activations'
    dtype, whose D channels are those of q, k and v in this order, or None where the layer has no short convolution.
    """

    recurrent_state: torch.Tensor
    conv_state: torch.Tensor | None


def read_state(past_key_values: Any, layer_idx: int | None, *, use_graph: bool) -> LayerState | None:
    """The state that a call starts from, or None for zeros."""
    if past_key_values is None or isinstance(past_key_values, LayerState):
        return past_key_values
    if use_graph:
        raise error("unsupported", f"past_key_values is a {type(past_key_values).__name__} with use_graph=True",
                    why="A cache object is updated by Python, which a replay does not run.",
                    remedy="Pass a LayerState (layer.zero_state(sequences) makes one) and take the new one from the "
                           "third value returned.")
    if layer_idx is None:
        raise error("argument", "past_key_values was passed to a layer made without layer_idx",
                    remedy="Construct the layer with layer_idx=..., or pass a LayerState.")
    if len(past_key_values) <= layer_idx:
        return None
    stored = past_key_values[layer_idx]
    if stored is None or stored["recurrent_state"] is None:
        return None
    conv_state = stored["conv_state"]
    return LayerState(stored["recurrent_state"], torch.cat(conv_state, 1) if isinstance(conv_state, tuple) else
                      conv_state)


def write_state(past_key_values: Any, layer_idx: int | None, new: LayerState | None, tokens: int,
                channels: tuple[int, int, int]) -> Any:
    """What a call returns as its third value: the cache, updated unless ``new`` is None, or else ``new``.

    ``channels``: of q, k and v.
    """
    if past_key_values is None or isinstance(past_key_values, LayerState):
        return new
    if new is not None:
        conv_state = None if new.conv_state is None else new.conv_state.split(channels, 1)
        past_key_values.update(layer_idx=layer_idx, recurrent_state=new.recurrent_state, conv_state=conv_state,
                               offset=tokens)
    return past_key_values
