"""A layer is section 4 of the mathematics: written out here token by token, with gradients by autograd."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from layer_cases import CASES, HIDDEN, assert_close, make_layer, randn, random_state, run, tensors, with_tensors

from graphsafe_kernels.layers import GatedDeltaNet, LayerState


def convolve(p, name, projected, state):
    """SiLU of the short convolution of ``projected`` [T, D] after ``state`` [D, W], and the new state."""
    if f"{name}_conv1d.weight" not in p:
        return F.silu(projected), None
    weight, bias = p[f"{name}_conv1d.weight"], p.get(f"{name}_conv1d.bias", 0)
    history = torch.cat([state.T, projected])
    taps = weight.shape[2]
    z = torch.stack([(history[t + 1 : t + 1 + taps] * weight[:, 0].T).sum(0) for t in range(projected.shape[0])])
    return F.silu(z + bias), history[-taps:].T


def unit(x):
    return x / torch.sqrt((x * x).sum(-1, keepdim=True) + 1e-6)


def gates(layer, p, x, arguments):
    """The log decay [T, HV, K] (one value per head repeated over K for GatedDeltaNet) and the output gate's factor."""
    heads, width = layer.num_v_heads, layer.head_k_dim
    scale = layer.A_log.exp()[:, None]
    if isinstance(layer, GatedDeltaNet):
        g = -scale * F.softplus(F.linear(x, p["a_proj.weight"]) + layer.dt_bias)[..., None]
        g = g.expand(-1, heads, width)
    else:
        z = F.linear(F.linear(x, p["f_proj.0.weight"]), p["f_proj.1.weight"]) + layer.dt_bias
        z = z.unflatten(-1, (heads, width))
        g = -scale * F.softplus(z) if layer.lower_bound is None else layer.lower_bound * torch.sigmoid(scale * z)
    if not arguments.get("use_gate", True):
        return g, 1
    if isinstance(layer, GatedDeltaNet):
        z = F.linear(x, p["g_proj.weight"])
    else:
        z = F.linear(F.linear(x, p["g_proj.0.weight"]), p["g_proj.1.weight"], p["g_proj.1.bias"])
    z = z.unflatten(-1, (heads, layer.head_v_dim))
    default = "swish" if isinstance(layer, GatedDeltaNet) else "sigmoid"
    return g, F.silu(z) if arguments.get("output_gate_activation", default) == "swish" else torch.sigmoid(z)


def by_hand(layer, x, state, arguments):
    """One sequence x [T, hidden] from a state without a sequence dimension: the output and the new state.

    ``arguments`` are the constructor's: what they say is not taken from the layer. Parameters are those of the state
    dict, separate and under flash-linear-attention's names.
    """
    p = layer.state_dict(keep_vars=True)
    channels = (layer.key_dim, layer.key_dim, layer.value_dim)
    conv = (None,) * 3 if state.conv_state is None else state.conv_state.split(channels, 0)
    (q, cq), (k, ck), (v, cv) = (convolve(p, n, F.linear(x, p[f"{n}_proj.weight"]), s)
                                 for n, s in zip("qkv", conv, strict=True))
    q, k = (unit(t.unflatten(-1, (-1, layer.head_k_dim))) for t in (q, k))
    v = v.unflatten(-1, (-1, layer.head_v_dim))
    g, factor = gates(layer, p, x, arguments)
    beta = (2 if arguments.get("allow_neg_eigval") else 1) * torch.sigmoid(F.linear(x, p["b_proj.weight"]))
    shared = layer.num_v_heads // layer.num_heads
    outputs, states = [], []
    for h in range(layer.num_v_heads):
        s, o = state.recurrent_state[h].T, []
        for t in range(x.shape[0]):
            key, query = k[t, h // shared], q[t, h // shared]
            s = g[t, h].exp()[:, None] * s
            s = s + beta[t, h] * torch.outer(key, v[t, h] - s.T @ key)
            o.append(layer.head_k_dim**-0.5 * s.T @ query)
        outputs.append(torch.stack(o))
        states.append(s.T)
    o = torch.stack(outputs, 1)
    o = o / torch.sqrt((o * o).mean(-1, keepdim=True) + arguments.get("norm_eps", 1e-5)) * layer.o_norm.weight * factor
    new = LayerState(torch.stack(states), torch.cat([cq, ck, cv]) if layer.use_short_conv else None)
    return layer.o_proj(o.flatten(1)), new


@pytest.mark.parametrize("case", CASES)
def test_a_layer_computes_section_4(case):
    layer = make_layer(case)
    x, dy = randn(2, 9, HIDDEN), randn(2, 9, HIDDEN, seed=1)
    state, dstate = random_state(layer, 2), random_state(layer, 2, 20)
    got = run(layer, x, dy, state, dstate)

    leaf, start = x.requires_grad_(), with_tensors(state, [t.requires_grad_() for t in tensors(state)])
    results = [by_hand(layer, leaf[n], with_tensors(start, [t[n] for t in tensors(start)]), CASES[case][1])
               for n in range(2)]
    output = torch.stack([o for o, _ in results])
    new = [torch.stack(pair) for pair in zip(*(tensors(s) for _, s in results), strict=True)]
    inputs = {"x": leaf, **{f"state {i}": t for i, t in enumerate(tensors(start))}, **dict(layer.named_parameters())}
    grads = torch.autograd.grad([output, *new], list(inputs.values()), [dy, *tensors(dstate)])
    want = {"output": output.detach(), **{f"new state {i}": t.detach() for i, t in enumerate(new)},
            **{f"gradient of {name}": g for name, g in zip(inputs, grads, strict=True)}}
    assert_close(got, want)
