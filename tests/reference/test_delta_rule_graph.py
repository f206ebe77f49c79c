"""The graph contract of both delta rules: tables, no host read, fixed shapes, memory; and their differentiation."""

from __future__ import annotations

import random

import pytest
import torch
from delta_rule_cases import (
    CHUNK,
    GATES,
    RECURRENT,
    RULES,
    Case,
    assert_close,
    assert_same_bits,
    boundaries,
    make,
    output_gradients,
    packed_case,
    run,
    run_case,
)
from torch.utils._python_dispatch import TorchDispatchMode

from graphsafe.errors import MetadataError, UnsupportedError
from graphsafe.metadata import build_tables

both_rules = pytest.mark.parametrize("rule", RULES)
both_gates = pytest.mark.parametrize("options", GATES.values(), ids=GATES)
both_forms = pytest.mark.parametrize("form", [CHUNK, RECURRENT], ids=["chunk", "recurrent"])


@both_rules
@pytest.mark.parametrize("dtype", [torch.int32, torch.int64], ids=str)
def test_given_tables_are_the_tables_built_inside(rule, dtype):
    case = packed_case(rule, GATES["in kernel"])
    tensors = make(case)
    cu_seqlens = boundaries(case.lengths, dtype)
    want = run_case(case, CHUNK[rule], tensors, cu_seqlens=cu_seqlens)
    tables = build_tables(cu_seqlens, case.rows, 64)
    got = run_case(case, CHUNK[rule], tensors, cu_seqlens=cu_seqlens, chunk_indices=tables.chunk_indices,
                   chunk_offsets=tables.chunk_offsets, use_graph=True, max_num_seqs=6)
    for name, w in want.items():
        assert_same_bits(got[name], w, name)


@both_rules
def test_fla_1274_results_follow_the_contents_of_one_buffer(rule):
    case = Case(rule, lengths=(256, 256, 256, 256), key=8, value=8, gate="usual", seed=2)
    tensors = make(case)
    buffer = boundaries(case.lengths)
    for values in ([0, 256, 512, 768, 1024], [0, 100, 400, 1024, 1024], [0, 256, 512, 768, 1024]):
        buffer.copy_(torch.tensor(values))
        o, states = CHUNK[rule](**tensors, cu_seqlens=buffer, use_graph=True, output_final_state=True)
        want_o, want_states = CHUNK[rule](**tensors, cu_seqlens=torch.tensor(values), output_final_state=True)
        assert_same_bits(o, want_o)
        assert_same_bits(states, want_states)
        loop_o, loop_states = RECURRENT[rule](**tensors, cu_seqlens=buffer, output_final_state=True)
        assert (o - loop_o).abs().max() < 1e-9
        assert (states - loop_states).abs().max() < 1e-9


@both_rules
def test_flashqla_23_a_recycled_tensor_brings_no_other_batch_s_tables(rule):
    """1,000 rounds of 8 random lengths, their tensors freed in between; one token a sequence is enough to tell."""
    rng = random.Random(23)
    rows = 128
    operands = make(Case(rule, batch=1, tokens=rows, key=1, value=1, gate="none", state=False, seed=23))
    operands["q"], operands["k"], operands["beta"] = (torch.ones_like(operands[n]) for n in ("q", "k", "beta"))
    for round_number in range(1000):
        lengths = [rng.randrange(16) for _ in range(8)]
        cu_seqlens = boundaries(lengths)
        _, states = CHUNK[rule](**operands, cu_seqlens=cu_seqlens, output_final_state=True)
        # with k = beta = 1 a state is its sequence's last value
        last = operands["v"][0, :, 0, 0]
        want = [last[end - 1] if length else 0.0 for length, end in zip(lengths, cu_seqlens[1:], strict=True)]
        assert (states[:, 0, 0, 0] - torch.tensor(want, dtype=states.dtype)).abs().max() < 1e-9, round_number
        del cu_seqlens


class _Trace(TorchDispatchMode):
    """Records each operator with the shapes it makes, and refuses those that read data or make shapes of it."""

    REFUSED = ("_local_scalar_dense", "item", "nonzero", "masked_select", "unique", "lift_fresh", "is_nonzero", "equal",
               "scalar_tensor", "repeat_interleave.Tensor", "bincount", "_assert_async")  # fmt: skip

    def __init__(self):
        super().__init__()
        self.steps = []

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        name = str(function).removeprefix("aten.")
        assert not any(name == r or name.startswith(r + ".") for r in self.REFUSED), name
        indices = args[1] if name.startswith("index.Tensor") else []
        assert not any(i is not None and i.dtype == torch.bool for i in indices), "indexing by a mask"
        made = function(*args, **(kwargs or {}))
        self.steps.append((name, [tuple(t.shape) for t in (made if isinstance(made, (tuple, list)) else [made])
                                  if isinstance(t, torch.Tensor)]))
        return made


@both_rules
@both_gates
@pytest.mark.parametrize("packed", [True, False], ids=["packed", "dense"])
def test_no_host_read_and_the_same_operators_and_shapes_for_every_layout(rule, options, packed):
    case = packed_case(rule, options, (150,), batch=1, tokens=150)
    tensors = make(case)
    leaves = {n: t.requires_grad_() for n, t in tensors.items()}
    do, dht = output_gradients(case)
    dht = dht.expand(6 if packed else 1, -1, -1, -1)
    leaves["initial_state"] = leaves["initial_state"].detach().expand_as(dht).clone().requires_grad_()
    traces = []
    for cu_seqlens in ([0, 150, 150, 150, 150, 150, 150], [0, 0, 1, 65, 65, 129, 140], [0] * 7):
        layout = {"cu_seqlens": torch.tensor(cu_seqlens), "use_graph": True} if packed else {"use_graph": True}
        with _Trace() as trace:
            outputs = CHUNK[rule](**leaves, **options, **layout, output_final_state=True)
            torch.autograd.grad(outputs, list(leaves.values()), (do, dht))
        traces.append(trace.steps)
    assert len(traces[0]) > 100
    assert traces[0] == traces[1] == traces[2]


@both_rules
def test_use_graph_changes_no_bit(rule):
    case = packed_case(rule, GATES["in kernel"])
    tensors = make(case)
    want, got = (run_case(case, CHUNK[rule], tensors, use_graph=use_graph) for use_graph in (False, True))
    for name, w in want.items():
        assert_same_bits(got[name], w, name)


@both_rules
def test_boundaries_written_between_forward_and_backward_are_noticed(rule):
    case = packed_case(rule)
    leaves = {n: t.requires_grad_() for n, t in make(case).items()}
    cu_seqlens = boundaries(case.lengths)
    o, _ = CHUNK[rule](**leaves, cu_seqlens=cu_seqlens)
    o.sum().backward(retain_graph=True)
    cu_seqlens.copy_(boundaries((case.rows,) + (0,) * 5))
    with pytest.raises(MetadataError, match="cu_seqlens") as raised:
        o.sum().backward()
    assert raised.value.rule.id == "GS302"


@both_rules
@both_forms
@pytest.mark.parametrize("lengths", [None, (0, 40, 20), (0, 0)], ids=str)
@pytest.mark.parametrize("state_v_first", [False, True])
def test_calls_share_no_memory(rule, form, lengths, state_v_first):
    case = packed_case(rule, {**GATES["in kernel"], "state_v_first": state_v_first}, lengths, batch=2, tokens=40)
    tensors = make(case)
    do, dht = output_gradients(case)
    layout = {} if lengths is None else {"cu_seqlens": boundaries(lengths)}
    # autograd itself hands an incoming gradient on where nothing was computed, which the recurrence leaves to it
    incoming = [(do, dht), (do, dht)] if form is CHUNK else [(do.clone(), dht.clone()) for _ in range(2)]
    first, second = (run(form[rule], tensors, *gradients, **case.options, **layout) for gradients in incoming)
    assert first["o"].is_contiguous()
    assert first["final_state"].is_contiguous()
    held = [t for r in (first, second, tensors) for t in r.values()] + [do, dht]
    storages = [t.untyped_storage().data_ptr() for t in held if t.numel()]
    assert len(set(storages)) == len(storages)


@both_rules
def test_operands_of_any_strides(rule):
    case = packed_case(rule, GATES["in kernel"])
    tensors = make(case)
    want = run_case(case, CHUNK[rule], tensors)
    strided = {n: t.transpose(0, -1).contiguous().transpose(0, -1) for n, t in tensors.items()}
    leaves = {n: t.requires_grad_() for n, t in strided.items()}
    o, final = CHUNK[rule](**leaves, cu_seqlens=boundaries(case.lengths), output_final_state=True, **case.options)
    got = torch.autograd.grad((o, final), list(leaves.values()), output_gradients(case))
    assert_same_bits(o, want["o"])
    for name, g in zip(leaves, got, strict=True):
        assert_same_bits(g, want[f"d{name}"], name)


@both_rules
def test_second_order_is_refused_by_name(rule):
    case = packed_case(rule, GATES["in kernel"])
    tensors = make(case)
    want = run_case(case, CHUNK[rule], tensors)
    leaves = {n: t.requires_grad_() for n, t in tensors.items()}
    outputs = CHUNK[rule](**leaves, cu_seqlens=boundaries(case.lengths), output_final_state=True, **case.options)
    got = torch.autograd.grad(outputs, list(leaves.values()), output_gradients(case), create_graph=True)
    for name, g in zip(leaves, got, strict=True):
        assert_same_bits(g, want[f"d{name}"], name)
        with pytest.raises(UnsupportedError, match="second-order") as raised:
            torch.autograd.grad(g.sum(), leaves["v"], retain_graph=True)
        assert raised.value.rule.id == "GS106"


@both_rules
@both_forms
@pytest.mark.parametrize("wanted", ["q", "g", "A_log", "initial_state"])
def test_a_gradient_of_one_operand_alone(rule, form, wanted):
    case = packed_case(rule, GATES["in kernel"])
    tensors = make(case)
    want = run_case(case, form[rule], tensors)[f"d{wanted}"]
    leaf = tensors[wanted].requires_grad_()
    outputs = form[rule](**tensors, cu_seqlens=boundaries(case.lengths), output_final_state=True, **case.options)
    # the recurrence's final state is a function of what it depends on alone, and q is not of that
    pairs = [(y, dy) for y, dy in zip(outputs, output_gradients(case), strict=True) if y.requires_grad]
    (got,) = torch.autograd.grad([y for y, _ in pairs], leaf, [dy for _, dy in pairs])
    assert_same_bits(got, want)


@both_rules
def test_the_gradient_of_the_final_state_alone(rule):
    case = packed_case(rule, GATES["in kernel"])
    tensors = make(case)
    gradients = []
    for operator in (CHUNK[rule], RECURRENT[rule]):
        leaves = {n: t.clone().requires_grad_() for n, t in tensors.items()}
        _, final = operator(**leaves, cu_seqlens=boundaries(case.lengths), output_final_state=True, **case.options)
        got = torch.autograd.grad(final, list(leaves.values()), output_gradients(case)[1], materialize_grads=True)
        gradients.append(dict(zip(leaves, got, strict=True)))
    assert_close(*gradients)
