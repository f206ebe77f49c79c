"""A model built from flash-linear-attention's layers: replaced layer by layer, values, state dict and all.

The package needs a GPU to compute, so its layers are played here by modules with its names, attributes and parameters;
``benchmarks/models.py`` adapts the real ones.
"""

from __future__ import annotations

import pytest
import torch
from torch import nn

import graphsafe as gs
from graphsafe.errors import GraphSafeError
from graphsafe_kernels.integrations import adapt
from graphsafe_kernels.layers import GatedDeltaNet as Own
from graphsafe_kernels.layers import KimiDeltaAttention as OwnKimi

HIDDEN, HEADS, WIDTH = 12, 2, 4


class _Norm(nn.Module):
    def __init__(self, width, eps, activation):
        super().__init__()
        self.weight, self.eps, self.activation = nn.Parameter(torch.randn(width)), eps, activation


def stand_in(name, layer, **attributes):
    """A module called ``fla.layers.name`` with the parameters of one of this project's layers, apart."""
    cls = type(name, (nn.Module,), {"__module__": f"fla.layers.{name.lower()}"})
    module = cls()
    for key, value in {"hidden_size": HIDDEN, "head_dim": WIDTH, "num_heads": HEADS, "num_v_heads": HEADS,
                       "mode": "chunk", "use_short_conv": True, "allow_neg_eigval": False, "conv_size": 4,
                       "conv_bias": False, **attributes}.items():
        setattr(module, key, value)
    for path, value in layer.state_dict().items():
        parent = module
        *folders, leaf = path.split(".")
        for folder in folders:
            if folder not in dict(parent.named_children()):
                parent.add_module(folder, nn.Module())
            parent = getattr(parent, folder)
        parent.register_parameter(leaf, nn.Parameter(value.clone()))
    norm = _Norm(1, layer.o_norm.eps, layer.o_norm.activation)
    norm.weight = module.o_norm.weight
    module.o_norm = norm
    return module


class Block(nn.Module):
    def __init__(self, attn):
        super().__init__()
        self.attn = attn

    def forward(self, x, **kwargs):
        return x + self.attn(x, **kwargs)[0]


class Model(nn.Module):
    def __init__(self, *mixers):
        super().__init__()
        self.embeddings = nn.Embedding(16, HIDDEN)
        self.layers = nn.ModuleList(Block(m) for m in mixers)

    def forward(self, input_ids, use_cache=None, **kwargs):
        x = self.embeddings(input_ids)
        for layer in self.layers:
            x = layer(x, use_cache=use_cache, **kwargs)
        return x


def layers():
    torch.manual_seed(0)
    gdn = Own(hidden_size=HIDDEN, head_dim=WIDTH, num_heads=HEADS, expand_v=2, norm_eps=0.01,
              output_gate_activation="sigmoid", layer_idx=0)
    kda = OwnKimi(hidden_size=HIDDEN, head_dim=WIDTH, num_heads=HEADS, lower_bound=-4.0, safe_gate=True, layer_idx=1)
    return gdn, kda


def make():
    gdn, kda = layers()
    return Model(stand_in("GatedDeltaNet", gdn, expand_v=2.0, use_gate=True, layer_idx=0),
                 stand_in("KimiDeltaAttention", kda, expand_v=1.0, lower_bound=-4.0, safe_gate=True, layer_idx=1))


def test_layers_are_replaced_and_the_state_dict_is_the_same():
    model = make()
    before = {k: v.clone() for k, v in model.state_dict().items()}
    assert adapt(model) is model
    assert [type(b.attn) for b in model.layers] == [Own, OwnKimi]
    after = model.state_dict()
    assert after.keys() == before.keys()
    assert all(torch.equal(after[k], v) for k, v in before.items())
    ids = torch.randint(16, (1, 9))
    want = model.embeddings(ids)
    for layer in layers():
        want = want + layer(want)[0]
    assert torch.allclose(model(ids), want, rtol=1e-5, atol=1e-6)


def test_an_adapted_model_is_captured():
    model, bucket = adapt(make()), gs.Bucket(tokens=64, sequences=4)

    @gs.graphed(runtime=gs.get_runtime("cpu"), buckets=[bucket], on_overflow="error")
    def forward(ids, cu_seqlens, tables):
        return model(ids, tables=tables)

    for lengths in ([9, 0, 30], [64], [1, 2, 3, 4]):
        ids, cu = torch.randint(16, (1, sum(lengths))), torch.tensor([0, *lengths]).cumsum(0)
        samples = [model(s) for s in ids.split(lengths, 1)]
        assert torch.allclose(forward(ids, cu), torch.cat(samples, 1), rtol=1e-4, atol=1e-5)
    assert forward.stats.captures == 1
    assert forward.verify(ids, cu)


def test_precision_is_kept_parameter_by_parameter():
    model = make().to(torch.bfloat16)
    attn = model.layers[0].attn
    attn.A_log.data, attn.dt_bias.data = attn.A_log.data.float(), attn.dt_bias.data.float()
    adapt(model)
    new = model.layers[0].attn
    assert new.in_proj.weight.dtype == torch.bfloat16
    assert new.A_log.dtype == new.dt_bias.dtype == torch.float32


def test_what_cannot_be_replaced_is_refused_and_nothing_is_changed():
    gdn, _ = layers()
    attention = type("Attention", (nn.Module,), {"__module__": "fla.layers.attn"})()
    model = Model(stand_in("GatedDeltaNet", gdn, expand_v=2.0, use_gate=True, layer_idx=0), attention)
    with pytest.raises(GraphSafeError, match="Attention") as caught:
        adapt(model)
    assert caught.value.rule.name == "unsupported"
    assert type(model.layers[0].attn) is not Own
    model = make()
    model.layers[1].attn.dt_bias.requires_grad_(False)
    with pytest.raises(GraphSafeError, match="dt_bias"):
        adapt(model)
    assert type(model.layers[0].attn) is not Own
