"""Fused in memory, separate in a state dict: projections and convolutions load and save under their own names."""

from __future__ import annotations

import copy
import pickle

import pytest
import torch
from layer_cases import CASES, HIDDEN, make_layer, randn

from graphsafe_kernels.layers import GatedDeltaNet, KimiDeltaAttention
from graphsafe_kernels.layers.fused import ALIGNMENT

each_layer = pytest.mark.parametrize("case", CASES)


@each_layer
def test_a_state_dict_restores_the_layer(case):
    layer, other = make_layer(case), make_layer(case)
    saved = {k: v.clone() for k, v in layer.state_dict().items()}
    with torch.no_grad():
        for p in other.parameters():
            p.fill_(7)
    kept = dict(saved)
    assert other.load_state_dict(saved) == ([], [])
    assert saved.keys() == kept.keys(), "loading leaves the caller's dict alone"
    x = randn(1, 9, HIDDEN)
    assert torch.equal(other(x)[0], layer(x)[0])
    assert all(torch.equal(v, saved[k]) for k, v in other.state_dict().items())


@each_layer
def test_a_model_around_layers_saves_and_loads(case):
    """Prefixes, copies, pickles, other dtypes and ``assign=True``."""
    model = torch.nn.Sequential(make_layer(case), make_layer(case, layer_idx=1))
    saved = model.state_dict()
    assert {k.split(".", 1)[0] for k in saved} == {"0", "1"}
    twin = pickle.loads(pickle.dumps(copy.deepcopy(model)))
    assert all(torch.equal(v, saved[k]) for k, v in twin.state_dict().items())
    narrow = {k: v.float() for k, v in saved.items()}
    twin.load_state_dict(narrow)
    assert twin[0].in_proj.weight.dtype == torch.float64
    with torch.device("meta"):
        empty = torch.nn.Sequential(type(model[0])(hidden_size=HIDDEN, layer_idx=0, **CASES[case][1]))
    empty.load_state_dict({k: v for k, v in narrow.items() if k.startswith("0.")}, assign=True)
    assert empty[0].in_proj.weight.device.type == "cpu"
    assert all(torch.equal(v, narrow[k]) for k, v in empty.state_dict().items())


def test_missing_parts_are_named_and_the_rest_loads():
    layer = make_layer("kda")
    saved = {k: v + 1 for k, v in layer.state_dict().items()}
    before = layer.state_dict()["k_proj.weight"].clone()
    for name in ("k_proj.weight", "f_proj.1.weight"):
        del saved[name]
    with pytest.raises(RuntimeError, match=r"k_proj\.weight"):
        make_layer("kda").load_state_dict(saved)
    result = layer.load_state_dict(saved | {"other": torch.zeros(1)}, strict=False)
    assert set(result.missing_keys) == {"k_proj.weight", "f_proj.1.weight"}
    assert result.unexpected_keys == ["other"]
    now = layer.state_dict()
    assert torch.equal(now["k_proj.weight"], before)
    assert torch.equal(now["q_proj.weight"], saved["q_proj.weight"])


def test_a_part_of_the_wrong_shape_is_named():
    saved = make_layer("gdn").state_dict()
    with pytest.raises(RuntimeError, match=r"v_conv1d\.weight: \[3, 1, 4\]"):
        make_layer("gdn").load_state_dict(saved | {"v_conv1d.weight": torch.zeros(3, 1, 4)})


@pytest.mark.parametrize("cls", [GatedDeltaNet, KimiDeltaAttention])
def test_rows_are_aligned_by_zeros_that_no_name_owns(cls):
    layer = cls(hidden_size=16, head_dim=4, num_heads=3)
    rows = layer.in_proj.weight.shape[0]
    assert rows % ALIGNMENT == 0
    owned = sum(v.shape[0] for k, v in layer.state_dict().items() if k.startswith(("q_p", "k_p", "v_p", "a_p", "b_p")))
    owned += sum(v.shape[0] for k, v in layer.state_dict().items() if k in ("g_proj.weight", "f_proj.0.weight",
                                                                            "g_proj.0.weight"))
    assert 0 < rows - owned < ALIGNMENT
    assert torch.count_nonzero(layer.in_proj.weight[owned:]) == 0
    layer(torch.randn(1, 9, 16))[0].sum().backward()
    assert torch.count_nonzero(layer.in_proj.weight.grad[owned:]) == 0


@pytest.mark.parametrize("cls", [GatedDeltaNet, KimiDeltaAttention])
def test_initial_values_are_those_of_separate_modules_made_in_order(cls):
    """The first projections a seed gives, as flash-linear-attention would make them."""
    torch.manual_seed(3)
    layer = cls(hidden_size=8, head_dim=4, num_heads=2)
    torch.manual_seed(3)
    for name in ("q_proj", "k_proj", "v_proj"):
        want = torch.nn.Linear(8, layer.value_dim if name == "v_proj" else layer.key_dim, bias=False).weight
        assert torch.equal(layer.state_dict()[f"{name}.weight"], want), name
    bound = layer.conv_size**-0.5
    taps = layer.state_dict()["v_conv1d.weight"]
    assert taps.abs().max() <= bound
    assert taps.std() == pytest.approx(bound / 3**0.5, rel=0.25)
