"""Constructors and state dicts are those of flash-linear-attention 0.6.0: its checkpoints load."""

from __future__ import annotations

import inspect
import math

import pytest
import torch

from graphsafe.errors import ArgumentError, GraphSafeError
from graphsafe_kernels.layers import GatedDeltaNet, KimiDeltaAttention

GDN_DEFAULT = {
    "A_log": (6,), "dt_bias": (6,), "q_proj.weight": (1536, 2048), "k_proj.weight": (1536, 2048),
    "v_proj.weight": (3072, 2048), "a_proj.weight": (6, 2048), "b_proj.weight": (6, 2048),
    "q_conv1d.weight": (1536, 1, 4), "k_conv1d.weight": (1536, 1, 4), "v_conv1d.weight": (3072, 1, 4),
    "g_proj.weight": (3072, 2048), "o_norm.weight": (512,), "o_proj.weight": (2048, 3072),
}
GDN_GROUPED = {
    "A_log": (4,), "dt_bias": (4,), "q_proj.weight": (16, 32), "k_proj.weight": (16, 32), "v_proj.weight": (48, 32),
    "a_proj.weight": (4, 32), "b_proj.weight": (4, 32), "q_conv1d.weight": (16, 1, 3), "q_conv1d.bias": (16,),
    "k_conv1d.weight": (16, 1, 3), "k_conv1d.bias": (16,), "v_conv1d.weight": (48, 1, 3), "v_conv1d.bias": (48,),
    "g_proj.weight": (48, 32), "o_norm.weight": (12,), "o_proj.weight": (32, 48),
}
GDN_BARE = {
    "A_log": (2,), "dt_bias": (2,), "q_proj.weight": (16, 32), "k_proj.weight": (16, 32), "v_proj.weight": (32, 32),
    "a_proj.weight": (2, 32), "b_proj.weight": (2, 32), "o_norm.weight": (16,), "o_proj.weight": (32, 32),
}
KDA_DEFAULT = {
    "A_log": (16,), "dt_bias": (2048,), "q_proj.weight": (2048, 2048), "k_proj.weight": (2048, 2048),
    "v_proj.weight": (2048, 2048), "q_conv1d.weight": (2048, 1, 4), "k_conv1d.weight": (2048, 1, 4),
    "v_conv1d.weight": (2048, 1, 4), "f_proj.0.weight": (128, 2048), "f_proj.1.weight": (2048, 128),
    "b_proj.weight": (16, 2048), "g_proj.0.weight": (128, 2048), "g_proj.1.weight": (2048, 128),
    "g_proj.1.bias": (2048,), "o_norm.weight": (128,), "o_proj.weight": (2048, 2048),
}
KDA_GROUPED = {
    "A_log": (4,), "dt_bias": (32,), "q_proj.weight": (16, 32), "k_proj.weight": (16, 32), "v_proj.weight": (64, 32),
    "q_conv1d.weight": (16, 1, 2), "q_conv1d.bias": (16,), "k_conv1d.weight": (16, 1, 2), "k_conv1d.bias": (16,),
    "v_conv1d.weight": (64, 1, 2), "v_conv1d.bias": (64,), "f_proj.0.weight": (16, 32), "f_proj.1.weight": (32, 16),
    "b_proj.weight": (4, 32), "g_proj.0.weight": (16, 32), "g_proj.1.weight": (64, 16), "g_proj.1.bias": (64,),
    "o_norm.weight": (16,), "o_proj.weight": (32, 64),
}
KDA_BARE = {
    "A_log": (2,), "dt_bias": (16,), "q_proj.weight": (16, 32), "k_proj.weight": (16, 32), "v_proj.weight": (16, 32),
    "f_proj.0.weight": (8, 32), "f_proj.1.weight": (16, 8), "b_proj.weight": (2, 32), "g_proj.0.weight": (8, 32),
    "g_proj.1.weight": (16, 8), "g_proj.1.bias": (16,), "o_norm.weight": (8,), "o_proj.weight": (32, 16),
}
SMALL = {"hidden_size": 32, "head_dim": 8, "num_heads": 2}
STATE_DICTS = {
    "gdn-default": (GatedDeltaNet, {}, GDN_DEFAULT),
    "gdn-grouped": (GatedDeltaNet, {**SMALL, "num_v_heads": 4, "expand_v": 1.5, "conv_size": 3, "conv_bias": True,
                                    "output_gate_activation": "sigmoid"}, GDN_GROUPED),
    "gdn-bare": (GatedDeltaNet, {**SMALL, "use_gate": False, "use_short_conv": False}, GDN_BARE),
    "kda-default": (KimiDeltaAttention, {}, KDA_DEFAULT),
    "kda-grouped": (KimiDeltaAttention, {**SMALL, "num_v_heads": 4, "expand_v": 2, "conv_size": 2, "conv_bias": True},
                    KDA_GROUPED),
    "kda-bare": (KimiDeltaAttention, {**SMALL, "use_short_conv": False, "safe_gate": True, "lower_bound": -5.0},
                 KDA_BARE),
}


@pytest.mark.parametrize("name", STATE_DICTS)
def test_state_dict_keys_and_shapes(name):
    cls, arguments, expected = STATE_DICTS[name]
    with torch.device("meta"):
        layer = cls(**arguments)
    assert {key: tuple(value.shape) for key, value in layer.state_dict().items()} == expected


ARGUMENTS = {
    GatedDeltaNet: {
        "hidden_size": 2048, "expand_v": 2, "head_dim": 256, "num_heads": 6, "num_v_heads": None, "mode": "chunk",
        "use_gate": True, "use_short_conv": True, "allow_neg_eigval": False, "conv_size": 4, "conv_bias": False,
        "layer_idx": None, "norm_eps": 1e-5, "output_gate_activation": "swish",
    },
    KimiDeltaAttention: {
        "hidden_size": 2048, "expand_v": 1, "head_dim": 128, "num_heads": 16, "num_v_heads": None, "mode": "chunk",
        "use_short_conv": True, "allow_neg_eigval": False, "safe_gate": False, "lower_bound": None, "conv_size": 4,
        "conv_bias": False, "layer_idx": None, "norm_eps": 1e-5,
    },
}


@pytest.mark.parametrize("cls", ARGUMENTS)
def test_constructor_arguments_in_order_with_their_defaults(cls):
    parameters = [p for p in inspect.signature(cls).parameters.values() if p.kind is not p.VAR_KEYWORD]
    assert [(p.name, p.default) for p in parameters] == list(ARGUMENTS[cls].items())


@pytest.mark.parametrize("cls", ARGUMENTS)
def test_call_arguments_in_order(cls):
    names = list(inspect.signature(cls.forward).parameters)[1:6]
    assert names == ["hidden_states", "attention_mask", "past_key_values", "use_cache", "output_attentions"]


@pytest.mark.parametrize("cls", ARGUMENTS)
def test_gate_parameters_start_in_their_ranges_without_weight_decay(cls):
    torch.manual_seed(0)
    layer = cls(hidden_size=4, head_dim=4, num_heads=512)
    low = 0 if cls is GatedDeltaNet else 1
    decay, step = layer.A_log.exp(), torch.nn.functional.softplus(layer.dt_bias)
    assert low <= decay.min() <= low + 0.5
    assert decay.max() <= 16.0001
    assert decay.mean().item() == pytest.approx((low + 16) / 2, abs=1)
    assert step.min() >= 0.000999
    assert step.max() <= 0.1001
    assert step.log().mean().item() == pytest.approx((math.log(0.001) + math.log(0.1)) / 2, abs=0.2)
    marked = {name for name, p in layer.named_parameters() if getattr(p, "_no_weight_decay", False)}
    assert marked == {"A_log", "dt_bias"}
    assert layer.A_log.dtype == layer.dt_bias.dtype == torch.float32


def test_a_safe_gate_starts_at_unit_scale():
    layer = KimiDeltaAttention(hidden_size=4, head_dim=4, num_heads=2, safe_gate=True, lower_bound=-5.0)
    assert torch.count_nonzero(layer.A_log) == 0


REFUSED = [
    ("unsupported", "use_fast_conv1d", {"use_fast_conv1d": True}),
    ("argument", "mode='parallel'", {"mode": "parallel"}),
    ("argument", "num_v_heads=3", {"num_v_heads": 3}),
    ("argument", "num_v_heads=1", {"num_v_heads": 1}),
    ("argument", "expand_v=1.3", {"expand_v": 1.3}),
]


@pytest.mark.parametrize("cls", ARGUMENTS)
@pytest.mark.parametrize(("rule", "text", "change"), REFUSED, ids=[r[1] for r in REFUSED])
def test_constructor_arguments_that_cannot_be_served_are_refused_by_name(cls, rule, text, change):
    with pytest.raises(GraphSafeError, match=text) as caught:
        cls(**{**SMALL, **change})
    assert caught.value.rule.name == rule


def test_an_unknown_output_gate_is_refused():
    with pytest.raises(ArgumentError, match="'relu'"):
        GatedDeltaNet(**SMALL, output_gate_activation="relu")
