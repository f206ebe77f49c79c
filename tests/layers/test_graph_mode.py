"""Graph mode: one set of tables for all operators, no host read, and a named refusal of what a graph cannot hold."""

from __future__ import annotations

import importlib

import pytest
import torch
from layer_cases import CASES, HIDDEN, behind, boundaries, make_layer, randn, random_state, run

from graphsafe.errors import GraphSafeError
from graphsafe.metadata import build_tables
from graphsafe_kernels import backend

each_layer = pytest.mark.parametrize("case", CASES)


@each_layer
@pytest.mark.parametrize("use_graph", [False, True])
def test_tables_of_the_caller_serve_all_operators(case, use_graph, monkeypatch):
    """One build per layer, none with tables passed, and the same bits."""
    layer = make_layer(case)
    x, dy, state = behind(randn(1, 75, HIDDEN), 21), behind(randn(1, 75, HIDDEN, seed=1), 21), random_state(layer, 3)
    cu = boundaries([70, 0, 5])
    want = run(layer, x, dy, state, cu_seqlens=cu, use_graph=use_graph)
    tables = build_tables(cu, 96)

    built = []

    def counted(operator, device):
        if operator == "build_tables":
            built.append(operator)
        return backend.resolve(operator, device)

    for module in ("layers.batch", "delta_rule"):
        monkeypatch.setattr(f"graphsafe_kernels.{module}.resolve", counted)
    layer(x, cu_seqlens=cu, use_graph=use_graph)
    assert len(built) == 1, "one build serves all operators of a layer"
    built.clear()
    for boundaries_too in ({"cu_seqlens": cu}, {}):
        got = run(layer, x, dy, state, tables=tables, use_graph=use_graph, **boundaries_too)
        assert got.keys() == want.keys()
        assert all(torch.equal(got[name], want[name]) for name in want)
    assert not built, "with tables passed nothing builds them"


@pytest.mark.parametrize(("case", "chunk_size"), [("gdn", 16), ("gdn", 32), ("kda", 32)])
def test_tables_bring_their_chunk_size(case, chunk_size):
    layer = make_layer(case)
    x, cu = randn(1, 75, HIDDEN), boundaries([70, 0, 5])
    got = layer(x, tables=build_tables(cu, 75, chunk_size), use_graph=True)[0]
    assert torch.allclose(got, layer(x, cu_seqlens=cu)[0], rtol=0, atol=1e-10)


@each_layer
@pytest.mark.parametrize("training", [False, True])
def test_fla_752_770_graph_mode_reads_nothing_on_the_host(case, training):
    """fla 752, 770: forward and backward run through on the meta device, where a host read raises."""
    layer = make_layer(case).to("meta").train(training)
    cu = torch.empty(4, dtype=torch.int32, device="meta")
    x = torch.empty(1, 96, HIDDEN, dtype=torch.float64, device="meta")
    result = run(layer, x, x, layer.zero_state(3), layer.zero_state(3), cu_seqlens=cu, use_graph=True)
    assert result["output"].shape == x.shape
    with pytest.raises((RuntimeError, NotImplementedError), match=r"[Mm]eta"):
        layer(x, attention_mask=torch.empty(1, 96, dtype=torch.int32, device="meta"))


@pytest.mark.parametrize("case", ["gdn", "kda"])
def test_every_operator_hears_of_graph_mode(case, monkeypatch):
    """Kernels may take another path by it; none may be left out of the promise."""
    layer = make_layer(case)
    seen = {}
    chunk = {"gdn": "gated_deltanet.chunk_gated_delta_rule", "kda": "kda.chunk_kda"}[case]
    for path in (chunk, "convolve.causal_conv1d"):
        module, name = path.split(".")
        operator = getattr(importlib.import_module(f"graphsafe_kernels.layers.{module}"), name)

        def spy(*args, operator=operator, name=name, **kwargs):
            seen.setdefault(name, []).append((kwargs["use_graph"], kwargs["max_num_seqs"]))
            return operator(*args, **kwargs)

        monkeypatch.setattr(f"graphsafe_kernels.layers.{path}", spy)
    layer(randn(1, 9, HIDDEN), cu_seqlens=boundaries([4, 5]), use_graph=True)
    assert seen == {chunk.split(".")[1]: [(True, 2)], "causal_conv1d": [(True, 2)]}


@pytest.mark.parametrize("case", ["gdn", "kda"])
@pytest.mark.parametrize(("tokens", "training", "gradients", "use_graph", "mode", "chunks"), [
    (64, False, False, False, "chunk", False),
    (65, False, False, False, "chunk", True),
    (64, True, False, False, "chunk", True),
    (64, False, True, False, "chunk", True),
    (64, False, False, True, "chunk", True),
    (65, False, False, False, "fused_recurrent", False),
    (65, False, True, False, "fused_recurrent", True),
])  # fmt: skip
def test_which_operator_runs_is_flash_linear_attentions_choice(case, tokens, training, gradients, use_graph, mode,
                                                               chunks, monkeypatch):
    layer, seen = make_layer(case, mode=mode).train(training), []
    for name in {"gdn": ("chunk_gated_delta_rule", "fused_recurrent_gated_delta_rule"),
                 "kda": ("chunk_kda", "fused_recurrent_kda")}[case]:
        module = importlib.import_module(f"graphsafe_kernels.layers.{'gated_deltanet' if case == 'gdn' else 'kda'}")
        operator = getattr(module, name)
        monkeypatch.setattr(module, name, lambda operator=operator, name=name, **kwargs: (
            seen.append(name.startswith("chunk")) or operator(**kwargs)))
    with torch.set_grad_enabled(gradients):
        layer(randn(1, tokens, HIDDEN), use_graph=use_graph)
    assert seen == [chunks]


REFUSED = [
    ("unsupported", "attention_mask", {"attention_mask": torch.ones(1, 8)}),
    ("unsupported", "past_key_values", {"past_key_values": {}}),
    ("unsupported", "max_seqlen", {"max_seqlen": 8}),
    ("unsupported", "output_attentions", {"output_attentions": True}),
    ("argument", "tables is tuple", {"tables": ()}),
    ("argument", "hidden_states has shape", {"hidden_states": torch.zeros(1, 8, HIDDEN + 1)}),
    ("argument", "hidden_states has shape", {"hidden_states": torch.zeros(8, HIDDEN)}),
    ("argument", "batch of 2", {"hidden_states": torch.zeros(2, 8, HIDDEN), "cu_seqlens": boundaries([8, 8])}),
    ("argument", "cu_seqlens", {"cu_seqlens": torch.zeros(2)}),
    ("tables", "chunk_indices", {"tables": build_tables(boundaries([3, 5]), 500)}),
    ("tables", "room for 2 sequences", {"tables": build_tables(boundaries([3, 5, 0]), 8),
                                        "cu_seqlens": boundaries([3, 5])}),
]


@pytest.mark.parametrize("case", ["gdn", "kda"])
@pytest.mark.parametrize(("rule", "text", "change"), REFUSED, ids=[f"{i}-{r[1]}" for i, r in enumerate(REFUSED)])
def test_what_a_graph_cannot_hold_is_refused_by_name(case, rule, text, change):
    layer = make_layer(case).to(torch.float32)
    arguments = {"hidden_states": torch.zeros(1, 8, HIDDEN), "use_graph": True} | change
    with pytest.raises(GraphSafeError, match=text) as caught:
        layer(**arguments)
    assert caught.value.rule.name == rule
    assert caught.value.where.file == __file__


def test_a_mask_of_the_wrong_shape_is_refused():
    layer = make_layer("gdn")
    for mask in (torch.ones(1, 4, 4), torch.ones(2, 4), torch.ones(1, 3)):
        with pytest.raises(GraphSafeError, match="attention_mask") as caught:
            layer(randn(1, 4, HIDDEN), attention_mask=mask)
        assert caught.value.rule.name == "argument"


@pytest.mark.parametrize("case", ["gdn", "kda"])
@pytest.mark.parametrize("where", ["graph", "training"])
def test_recurrent_mode_is_refused_where_it_cannot_serve(case, where):
    layer = make_layer(case, mode="fused_recurrent").train(where == "training")
    with torch.no_grad(), pytest.raises(GraphSafeError, match="fused_recurrent") as caught:
        layer(randn(1, 100, HIDDEN), use_graph=where == "graph")
    assert caught.value.rule.name == "unsupported"


def test_keywords_of_a_model_are_ignored_outside_graphs():
    """A model of flash-linear-attention hands its own keywords to every layer."""
    layer, x = make_layer("gdn"), randn(1, 4, HIDDEN)
    assert torch.equal(layer(x, num_items_in_batch=3)[0], layer(x)[0])


def test_boundaries_written_to_before_the_backward_are_noticed():
    layer, cu = make_layer("gdn"), boundaries([3, 5])
    output = layer(randn(1, 8, HIDDEN), cu_seqlens=cu)[0]
    cu[1] = 4
    with pytest.raises(GraphSafeError) as caught:
        output.sum().backward()
    assert caught.value.rule.name == "metadata-changed"
