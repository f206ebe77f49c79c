"""What both delta rules keep: precision, zero padding, buckets, and sequences apart from each other."""

from __future__ import annotations

import pytest
import torch
from delta_rule_cases import (
    CHUNK,
    CHUNK_SIZES,
    GATES,
    RECURRENT,
    RULES,
    TOKEN_OPERANDS,
    Case,
    assert_close,
    assert_same_bits,
    assert_same_live,
    boundaries,
    in_bucket,
    make,
    output_gradients,
    packed_case,
    run,
    run_case,
)

NAN = float("nan")
INF = float("inf")
both_rules = pytest.mark.parametrize("rule", RULES)
both_gates = pytest.mark.parametrize("options", GATES.values(), ids=GATES)
both_forms = pytest.mark.parametrize("form", [CHUNK, RECURRENT], ids=["chunk", "recurrent"])


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
@pytest.mark.parametrize("lengths", [(16,), (32,), (64,), (65, 0, 200), (0, 0, 31, 5, 64)], ids=str)
def test_a_batch_has_the_same_bits_in_every_bucket(rule, options, dtype, lengths):
    case = packed_case(rule, options, lengths, heads=1, group=3, seed=2)
    tensors = make(case, dtype)
    chunk_size = min(CHUNK_SIZES[rule])  # the smallest is the likeliest to end a vector in the middle of a slot
    want = run_case(case, CHUNK[rule], tensors, dtype, chunk_size=chunk_size)
    for more_rows, more_sequences in ((1, 0), (37, 2), (700, 20)):
        padded, do, dht, cu_seqlens = in_bucket(case, tensors, more_rows, more_sequences, NAN)
        got = run(CHUNK[rule], padded, do, dht, cu_seqlens=cu_seqlens, use_graph=True, chunk_size=chunk_size,
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
