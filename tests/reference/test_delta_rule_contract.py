"""What both delta rules keep: precision, padding, buckets, sequences, tables, differentiation, arguments."""

from __future__ import annotations

import inspect
import random

import pytest
import torch
from delta_rule_cases import (
    CHUNK,
    CHUNK_SIZES,
    RECURRENT,
    RULES,
    TOKEN_OPERANDS,
    Case,
    assert_close,
    assert_same_bits,
    boundaries,
    in_bucket,
    make,
    output_gradients,
    run,
    run_case,
)
from graphsafe_kernels.gdn import chunk_gated_delta_rule, fused_recurrent_gated_delta_rule
from graphsafe_kernels.kda import chunk_kda, fused_recurrent_kda
from torch.utils._python_dispatch import TorchDispatchMode

from graphsafe.errors import ArgumentError, GraphSafeError, MetadataError, UnsupportedError
from graphsafe.metadata import build_tables

NAN, INF = float("nan"), float("inf")
GATES = {
    "given": {},
    "in kernel": {"use_gate_in_kernel": True, "use_beta_sigmoid_in_kernel": True, "use_qk_l2norm_in_kernel": True},
}
both_rules = pytest.mark.parametrize("rule", RULES)
both_gates = pytest.mark.parametrize("options", GATES.values(), ids=GATES)
both_forms = pytest.mark.parametrize("form", [CHUNK, RECURRENT], ids=["chunk", "recurrent"])


def packed_case(rule, options=None, lengths=(0, 40, 0, 70, 3, 0), **sizes):
    sizes = {"heads": 2, "group": 2, "key": 9, "value": 7, "gate": "usual", "seed": 13, **sizes}
    return Case(rule, lengths=lengths, options=dict(options or {}), **sizes)


def assert_same_live(got, want, case):
    """Live rows, sequences and parameters have the bits of ``want``; the rows behind are zero."""
    for name, w in want.items():
        rows = name == "o" or name.removeprefix("d") in TOKEN_OPERANDS
        count = case.rows if rows else case.sequences
        if name in ("dA_log", "ddt_bias"):
            assert_same_bits(got[name], w, name)
        elif rows:
            assert_same_bits(got[name][:, :count], w, name)
            assert not got[name][:, count:].any(), f"{name} is not zero behind the live rows"
        else:
            assert_same_bits(got[name][:count], w, name)


# --- precision ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("rule", "chunk_size"), [(r, c) for r in RULES for c in CHUNK_SIZES[r]])
@pytest.mark.parametrize("gate", ["none", "mixed", "strong"])
def test_lengths_around_the_chunk_size(rule, chunk_size, gate):
    lengths = (chunk_size - 1, chunk_size, 0, chunk_size + 1, 2 * chunk_size, 1)
    case = Case(rule, lengths=lengths, heads=1, group=2, key=7, value=6, gate=gate, seed=3,
                options={"chunk_size": chunk_size})
    tensors = make(case)
    assert_close(run_case(case, CHUNK[rule], tensors), run_case(case, RECURRENT[rule], tensors))


@both_rules
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)
def test_dtypes_and_tolerances(rule, dtype):
    case = Case(rule, lengths=(70, 0, 30), heads=2, group=2, key=16, value=16, gate="usual", seed=5,
                options={"use_qk_l2norm_in_kernel": True, "use_beta_sigmoid_in_kernel": True})
    tensors = make(case, dtype)
    want = run_case(case, RECURRENT[rule], {n: t.double() for n, t in tensors.items()})
    got = run_case(case, CHUNK[rule], tensors, dtype)
    for name, w in want.items():
        state = name in ("final_state", "dinitial_state")
        assert got[name].dtype == (torch.float32 if state else dtype), name
        error = (got[name].double() - w).square().mean().sqrt() / (w.square().mean().sqrt() + 1e-8)
        assert error < (1e-4 if dtype == torch.float32 else 0.005), (name, error)


@both_rules
def test_fla_99_strong_decay_is_finite_and_right_in_fp32(rule):
    case = Case(rule, batch=1, tokens=128, heads=2, key=64, value=64, gate="mixed", seed=9)
    tensors = make(case, torch.float32)
    want = run_case(case, RECURRENT[rule], {n: t.double() for n, t in tensors.items()})
    got = run_case(case, CHUNK[rule], tensors, torch.float32)
    assert_close({n: t.double() for n, t in got.items()}, want, 1e-4)


@both_rules
def test_a_gate_of_minus_infinity_forgets_everything(rule):
    case = Case(rule, batch=1, tokens=90, heads=1, key=8, value=8, gate="usual", seed=10)
    tensors = make(case)
    tensors["g"][:, 70] = -INF
    got = run_case(case, CHUNK[rule], tensors)
    assert_close(got, run_case(case, RECURRENT[rule], tensors))
    tensors["v"][:, :70] *= 3
    assert_same_bits(run_case(case, CHUNK[rule], tensors)["final_state"], got["final_state"])


# --- padding -----------------------------------------------------------------------------------------------------


@both_rules
@both_gates
@both_forms
@pytest.mark.parametrize("poison", [0.0, NAN, INF, -INF, 1e300])
def test_what_padding_holds_changes_nothing(rule, options, form, poison):
    case = packed_case(rule, options)
    tensors = make(case)
    want = run_case(case, form[rule], tensors)
    padded, do, dht, cu_seqlens = in_bucket(case, tensors, 90, 3, poison)
    assert_same_live(run(form[rule], padded, do, dht, cu_seqlens=cu_seqlens, **options), want, case)


@both_rules
@both_gates
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize("lengths", [(1,), (64,), (65, 0, 200), (0, 0, 31, 5, 64)], ids=str)
def test_a_batch_has_the_same_bits_in_every_bucket(rule, options, dtype, lengths):
    case = packed_case(rule, options, lengths, heads=1, group=3)
    tensors = make(case, dtype)
    want = run_case(case, CHUNK[rule], tensors, dtype, chunk_size=32)
    for more_rows, more_sequences in ((1, 0), (37, 2), (700, 20)):
        padded, do, dht, cu_seqlens = in_bucket(case, tensors, more_rows, more_sequences, NAN)
        got = run(CHUNK[rule], padded, do, dht, cu_seqlens=cu_seqlens, use_graph=True, chunk_size=32,
                  max_num_seqs=len(cu_seqlens) - 1, **options)
        assert_same_live(got, want, case)


@both_rules
@both_gates
@both_forms
def test_tokenspeed_969_padding_rows_write_no_state(rule, options, form):
    case = packed_case(rule, options, (30, 65, 17))
    tensors = make(case)
    padded, *_, cu_seqlens = in_bucket(case, tensors, 80, 2, 3.0)
    _, states = form[rule](**padded, cu_seqlens=cu_seqlens, output_final_state=True, **options)
    start = 0
    for n, length in enumerate(case.lengths):
        alone = {m: t[:, start : start + length] if m in TOKEN_OPERANDS else t for m, t in tensors.items()}
        alone["initial_state"] = tensors["initial_state"][n : n + 1]
        assert_same_bits(states[n : n + 1], form[rule](**alone, output_final_state=True, **options)[1])
        start += length
    assert_same_bits(states[3:], padded["initial_state"][3:])


@both_rules
@both_gates
def test_sglang_32555_the_tail_of_an_earlier_batch_is_not_read(rule, options):
    """The buffers keep a larger batch's rows behind a smaller one's."""
    large, small = packed_case(rule, options, (70, 60, 30)), packed_case(rule, options, (20, 0, 45), seed=14)
    buffers, fresh = make(large), make(small)
    for name, t in fresh.items():
        (buffers[name][:, : small.rows] if name in TOKEN_OPERANDS else buffers[name]).copy_(t)
    do, dht = output_gradients(large)
    small_do, small_dht = output_gradients(small)
    do[:, : small.rows], dht = small_do, small_dht
    got = run(CHUNK[rule], buffers, do, dht, cu_seqlens=boundaries(small.lengths), **options)
    assert_same_live(got, run_case(small, CHUNK[rule], fresh), small)


@both_rules
@both_gates
def test_boundaries_beyond_the_rows_touch_nothing_beyond_them(rule, options):
    case = packed_case(rule, options, (30, 50))
    tensors = make(case)
    want = run_case(case, CHUNK[rule], tensors)
    got = run_case(case, CHUNK[rule], tensors, cu_seqlens=torch.tensor([0, 30, 85]))
    for name, w in want.items():
        assert_same_bits(got[name], w, name)


# --- sequences ---------------------------------------------------------------------------------------------------


@both_rules
@both_gates
@both_forms
@pytest.mark.parametrize("sick", [1, 3, 4])
def test_nan_in_one_sequence_leaves_the_bits_of_the_others(rule, options, form, sick):
    case = packed_case(rule, options)
    tensors = make(case)
    want = run_case(case, form[rule], tensors)
    begin, end = sum(case.lengths[:sick]), sum(case.lengths[: sick + 1])
    for t in (tensors[n] for n in TOKEN_OPERANDS):
        t[:, begin:end] = NAN
    tensors["initial_state"][sick] = NAN
    got = run_case(case, form[rule], tensors)
    assert got["o"][:, begin:end].isnan().all()
    for name, w in want.items():
        if name == "o" or name.removeprefix("d") in TOKEN_OPERANDS:
            assert_same_bits(got[name][:, :begin], w[:, :begin], name)
            assert_same_bits(got[name][:, end:], w[:, end:], name)
        elif name in ("final_state", "dinitial_state"):
            others = [n for n in range(case.sequences) if n != sick]
            assert_same_bits(got[name][others], w[others], name)


@both_rules
@both_gates
@pytest.mark.parametrize("chunk_size", [32, 64])
def test_automodel_2147_a_packed_sample_is_the_sample_alone(rule, options, chunk_size):
    """Samples alone, packed, and as rows of a dense batch, bit for bit in everything but the parameters' sums."""
    lengths = (50, 50, 50)
    case = packed_case(rule, options, lengths)
    tensors = make(case)
    together = run_case(case, CHUNK[rule], tensors, chunk_size=chunk_size)
    do, dht = output_gradients(case)
    parameters = {n: t for n, t in tensors.items() if n in ("A_log", "dt_bias")}
    rows = {n: t.view(3, 50, *t.shape[2:]) for n, t in tensors.items() if n in TOKEN_OPERANDS}
    dense = run(CHUNK[rule], {**tensors, **rows}, do.view(3, 50, *do.shape[2:]), dht, chunk_size=chunk_size, **options)
    for n in range(3):
        cut = slice(50 * n, 50 * n + 50)
        alone = {m: t[:, cut] for m, t in tensors.items() if m in TOKEN_OPERANDS}
        alone |= {**parameters, "initial_state": tensors["initial_state"][n : n + 1]}
        got = run(CHUNK[rule], alone, do[:, cut], dht[n : n + 1], chunk_size=chunk_size, **options)
        for name in ("o", "dq", "dk", "dv", "dg", "dbeta"):
            assert_same_bits(got[name], together[name][:, cut], name)
            assert_same_bits(got[name][0], dense[name][n], name)
        for name in ("final_state", "dinitial_state"):
            assert_same_bits(got[name][0], together[name][n], name)
            assert_same_bits(got[name][0], dense[name][n], name)


@both_rules
@both_gates
@both_forms
@pytest.mark.parametrize("state_v_first", [False, True])
@pytest.mark.parametrize("lengths", [(0, 20), (20, 0), (20, 0, 33), (7, 0, 0, 0, 70), (0,), (0, 0, 0)], ids=str)
def test_flashkda_32_flashinfer_3536_empty_sequences_hand_the_state_on(rule, options, form, lengths, state_v_first):
    case = packed_case(rule, {**options, "state_v_first": state_v_first}, lengths)
    tensors = make(case)
    empty = [n for n, length in enumerate(lengths) if length == 0]
    tensors["initial_state"][empty[0]] = INF  # handed on as it is, not computed with
    got = run_case(case, form[rule], tensors)
    assert_same_bits(got["final_state"][empty], tensors["initial_state"][empty])
    assert_same_bits(got["dinitial_state"][empty], output_gradients(case)[1][empty])
    full = [n for n, length in enumerate(lengths) if length]
    if full:
        rest = {**tensors, "initial_state": tensors["initial_state"][full]}
        do, dht = output_gradients(case)
        want = run(form[rule], rest, do, dht[full], cu_seqlens=boundaries([lengths[n] for n in full]), **case.options)
        if form is RECURRENT:  # autograd sums a parameter's gradient over everything at once
            assert_close({n: got.pop(n) for n in ("dA_log", "ddt_bias") if n in got},
                         {n: want.pop(n) for n in ("dA_log", "ddt_bias") if n in want}, 1e-12)
        for name, w in want.items():
            assert_same_bits(got[name][full] if name in ("final_state", "dinitial_state") else got[name], w, name)


@both_rules
@both_forms
@pytest.mark.parametrize("lengths", [None, (0,), (0, 0)], ids=["dense", "one", "two"])
def test_no_token_at_all(rule, form, lengths):
    case = packed_case(rule, GATES["in kernel"], lengths, batch=2, tokens=0)
    tensors = make(case)
    got = run_case(case, form[rule], tensors)
    assert got["o"].shape == tensors["v"].shape
    assert_same_bits(got["final_state"], tensors["initial_state"])
    assert got["final_state"].data_ptr() != tensors["initial_state"].data_ptr()
    assert not got["dA_log"].any()
    assert not got["ddt_bias"].any()
    # without a state the final state is zero
    del tensors["initial_state"]
    options = {} if lengths is None else {"cu_seqlens": boundaries(lengths)}
    _, final = form[rule](**tensors, output_final_state=True, **case.options, **options)
    assert final.shape == got["final_state"].shape
    assert not final.any()


@both_rules
@both_gates
@pytest.mark.parametrize("length", [1, 17, 63, 64, 65, 100])
def test_a_prefix_does_not_depend_on_later_tokens(rule, options, length):
    case = Case(rule, batch=1, tokens=150, heads=2, group=1, key=9, value=7, gate="mixed", seed=3, options=options)
    tensors = make(case, torch.float32)
    o, _ = CHUNK[rule](**tensors, **options)
    short = {n: t[:, :length] if n in TOKEN_OPERANDS else t for n, t in tensors.items()}
    assert_same_bits(o[:, :length], CHUNK[rule](**short, **options)[0], "a shorter sequence")
    for t in (tensors[n] for n in TOKEN_OPERANDS):
        t[:, length:] = t[:, length:].flip(1) * -0.5 if t is not tensors["g"] else -1000.0
    assert_same_bits(o[:, :length], CHUNK[rule](**tensors, **options)[0][:, :length], "another continuation")


# --- tables and graphs -------------------------------------------------------------------------------------------


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
    first, second = (run_case(case, form[rule], tensors) for _ in range(2))
    held = [t for r in (first, second, tensors) for t in r.values() if t.numel()]
    storages = [t.untyped_storage().data_ptr() for t in held]
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


# --- differentiation ---------------------------------------------------------------------------------------------


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


# --- arguments ---------------------------------------------------------------------------------------------------

REQUIRED = inspect.Parameter.empty
_GRAPH = {"use_graph": False, "max_num_seqs": None, "chunk_indices": None, "chunk_offsets": None}
_OPERANDS = dict.fromkeys(("q", "k", "v", "g", "beta"), REQUIRED)
# the arguments of flash-linear-attention 0.6.0, in its order
SIGNATURES = {
    chunk_gated_delta_rule: {
        **_OPERANDS, "scale": None, "initial_state": None, "output_final_state": False,
        "use_qk_l2norm_in_kernel": False, "use_beta_sigmoid_in_kernel": False, "allow_neg_eigval": False,
        "state_v_first": False, "cu_seqlens": None, "cu_seqlens_cpu": None, "chunk_indices": None, "cp_context": None,
    },
    chunk_kda: {
        **_OPERANDS, "scale": None, "initial_state": None, "output_final_state": False,
        "use_qk_l2norm_in_kernel": False, "use_gate_in_kernel": False, "use_beta_sigmoid_in_kernel": False,
        "allow_neg_eigval": False, "safe_gate": False, "lower_bound": None, "disable_recompute": False,
        "return_intermediate_states": False, "state_v_first": False, "cu_seqlens": None, "cu_seqlens_cpu": None,
        "cp_context": None, "use_graph": False, "max_num_seqs": None,
    },
    fused_recurrent_gated_delta_rule: {
        "q": REQUIRED, "k": REQUIRED, "v": REQUIRED, "g": None, "gk": None, "gv": None, "beta": None, "scale": None,
        "initial_state": None, "output_final_state": False, "use_qk_l2norm_in_kernel": False,
        "use_gate_in_kernel": False, "A_log": None, "dt_bias": None, "use_beta_sigmoid_in_kernel": False,
        "allow_neg_eigval": False, "state_v_first": False, "cu_seqlens": None,
    },
    fused_recurrent_kda: {
        **_OPERANDS, "A_log": None, "dt_bias": None, "scale": None, "initial_state": None, "output_final_state": False,
        "use_qk_l2norm_in_kernel": False, "use_gate_in_kernel": False, "use_beta_sigmoid_in_kernel": False,
        "allow_neg_eigval": False, "lower_bound": None, "state_v_first": False, "cu_seqlens": None,
    },
}  # fmt: skip


@pytest.mark.parametrize("operator", SIGNATURES, ids=lambda f: f.__name__)
def test_arguments_are_those_of_flash_linear_attention(operator):
    parameters = inspect.signature(operator).parameters
    positional = {n: p.default for n, p in parameters.items() if p.kind is not inspect.Parameter.KEYWORD_ONLY}
    assert list(positional.items()) == list(SIGNATURES[operator].items())
    if operator in CHUNK.values():
        assert {n: parameters[n].default for n in _GRAPH} == _GRAPH
        assert parameters["chunk_size"].default == 64
        assert {parameters[n].default for n in ("A_log", "dt_bias")} == {None}


def _wrong(rule, dense=False, **changed):
    """A valid call with some arguments changed; a callable changes the tensor of its name."""
    case = Case(rule, batch=2, tokens=6, key=4, value=4) if dense else packed_case(rule, lengths=(4, 2), key=4, value=4)
    arguments = dict(make(case))
    if not dense:
        arguments["cu_seqlens"] = boundaries(case.lengths)
    for name, value in changed.items():
        arguments[name] = value(arguments[name]) if callable(value) else value
    CHUNK[rule](**arguments)


def _tables(n=2, **changed):
    tables = build_tables(boundaries((4, 2)), 6, 64)
    return {"chunk_indices": tables.chunk_indices, "chunk_offsets": tables.chunk_offsets, **changed}


BOTH = [
    ("GS108", "q is", {"q": lambda t: t[0]}),
    ("GS108", "q is", {"q": lambda t: t.int()}),
    ("GS108", "q is list", {"q": [1.0]}),
    ("GS108", "k is", {"k": lambda t: t[..., :3]}),
    ("GS108", "k is", {"k": lambda t: t.float()}),
    ("GS108", "v is", {"v": lambda t: t[:, :5]}),
    ("GS108", "g is", {"g": lambda t: t[:, :, :1]}),
    ("GS108", "beta is", {"beta": lambda t: t[..., None]}),
    ("GS108", "a multiple of q's heads", {n: lambda t: t[:, :, :3] for n in ("v", "g", "beta")}),
    ("GS108", "only the number of tokens may be 0", {"v": lambda t: t[..., :0]}),
    ("GS108", "at most 256", {n: lambda t: t.repeat(*[1] * (t.dim() - 1), 65) for n in ("q", "k")}),
    ("GS108", "scale is", {"scale": torch.tensor(1.0)}),
    ("GS108", "scale is nan", {"scale": NAN}),
    ("GS108", "chunk_size is 48", {"chunk_size": 48}),
    ("GS108", "chunk_size is 128", {"chunk_size": 128}),
    ("GS108", "allow_neg_eigval", {"allow_neg_eigval": True}),
    ("GS108", "A_log was passed", {"A_log": torch.zeros(4)}),
    ("GS108", "dt_bias was passed", {"dt_bias": torch.zeros(4)}),
    ("GS108", "A_log is", {"use_gate_in_kernel": True, "A_log": torch.zeros(3)}),
    ("GS108", "dt_bias is", {"use_gate_in_kernel": True, "A_log": torch.zeros(4), "dt_bias": torch.zeros(3)}),
    ("GS108", "initial_state is", {"initial_state": lambda t: t[:1]}),
    ("GS108", "initial_state is float32", {"initial_state": lambda t: t.float()}),
    ("GS108", "initial_state is", {"initial_state": lambda t: t[..., :3]}),
    ("GS108", "cu_seqlens is", {"cu_seqlens": lambda t: t.float()}),
    ("GS108", "cu_seqlens is", {"cu_seqlens": lambda t: t[:1]}),
    ("GS108", "a batch of 2", {"dense": True, "cu_seqlens": boundaries((3, 3))}),
    ("GS106", "cu_seqlens_cpu", {"cu_seqlens_cpu": boundaries((4, 2))}),
    ("GS106", "cp_context", {"cp_context": object()}),
    ("GS303", "max_num_seqs is 3", {"max_num_seqs": 3}),
    ("GS303", "max_num_seqs is 3", {"dense": True, "max_num_seqs": 3}),
    ("GS303", "chunk_offsets is missing", _tables(chunk_offsets=None)),
    ("GS303", "chunk_indices is missing", _tables(chunk_indices=None)),
    ("GS303", "chunk_indices is", _tables(chunk_indices=torch.zeros(3, 2, dtype=torch.int64))),
    ("GS303", "chunk_offsets is", _tables(chunk_offsets=torch.zeros(3, dtype=torch.int32))),
    ("GS303", "without cu_seqlens", {"dense": True, **_tables()}),
]
KDA = [
    ("GS108", "chunk_size is 16", {"chunk_size": 16}),
    ("GS108", "lower_bound was passed", {"lower_bound": -5.0}),
    ("GS108", "lower_bound is 0", {"use_gate_in_kernel": True, "lower_bound": 0}),
    ("GS108", "lower_bound is True", {"use_gate_in_kernel": True, "lower_bound": True}),
    ("GS108", "safe_gate", {"use_gate_in_kernel": True, "safe_gate": True}),
    ("GS108", "safe_gate", {"use_gate_in_kernel": True, "safe_gate": True, "lower_bound": -5.1}),
    ("GS108", "inference_mode", {"return_intermediate_states": True}),
]
GDN = [("GS108", "A_log is missing", {"use_gate_in_kernel": True})]
WRONG = [(r, *w) for r in RULES for w in BOTH + (KDA if r == "kda" else GDN)]


@pytest.mark.parametrize(("rule", "rule_id", "text", "changed"), WRONG,
                         ids=[f"{r}-{t.replace(' ', '_')}-{i}" for i, (r, _, t, _) in enumerate(WRONG)])
def test_wrong_arguments_are_refused_by_name(rule, rule_id, text, changed):
    with pytest.raises(GraphSafeError, match=text) as raised:
        _wrong(rule, **changed)
    assert raised.value.rule.id == rule_id
    assert isinstance(raised.value, ArgumentError) == (rule_id == "GS108")
    assert raised.value.where.file == __file__


@both_rules
def test_a_valid_call_of_the_same_kind_passes(rule):
    _wrong(rule)
    _wrong(rule, dense=True)
    _wrong(rule, dense=True, use_graph=True, max_num_seqs=2)
    _wrong(rule, **_tables(), use_graph=True, max_num_seqs=2)


@pytest.mark.parametrize(("rule", "rule_id", "text", "changed"), [
    ("gdn", "GS106", "use_graph=True", {"use_graph": True}),
    ("kda", "GS106", "use_graph=True", {"use_graph": True}),
    ("gdn", "GS108", "A_log is missing", {"use_gate_in_kernel": True}),
    ("gdn", "GS108", "g is missing", {"use_gate_in_kernel": True, "A_log": torch.zeros(4), "g": None}),
    ("gdn", "GS108", "gk or gv", {"use_gate_in_kernel": True, "A_log": torch.zeros(4), "gk": torch.zeros(1)}),
    ("gdn", "GS108", "gk is", {"gk": torch.zeros(1, 6, 4, 3)}),
    ("gdn", "GS108", "gv is", {"gv": torch.zeros(1, 6, 4)}),
    ("gdn", "GS108", "beta is missing", {"use_beta_sigmoid_in_kernel": True, "beta": None}),
    ("gdn", "GS108", "allow_neg_eigval", {"allow_neg_eigval": True}),
    ("kda", "GS108", "allow_neg_eigval", {"allow_neg_eigval": True}),
    ("kda", "GS108", "beta is NoneType", {"beta": None}),
    ("kda", "GS108", "lower_bound was passed", {"lower_bound": -1.0}),
    ("kda", "GS108", "initial_state is", {"initial_state": torch.zeros(1)}),
])  # fmt: skip
def test_wrong_arguments_of_the_token_by_token_forms_are_refused_by_name(rule, rule_id, text, changed):
    case = packed_case(rule, lengths=(4, 2), key=4, value=4)
    with pytest.raises(GraphSafeError, match=text) as raised:
        RECURRENT[rule](**{**make(case), "cu_seqlens": boundaries(case.lengths), **changed})
    assert raised.value.rule.id == rule_id
    assert raised.value.where.file == __file__
