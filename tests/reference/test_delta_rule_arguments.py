"""The arguments of both delta rules: names, order and defaults, and what is refused."""

from __future__ import annotations

import inspect

import pytest
import torch
from delta_rule_cases import CHUNK, RECURRENT, RULES, Case, boundaries, make, packed_case

from graphsafe.errors import ArgumentError, GraphSafeError
from graphsafe.metadata import build_tables
from graphsafe_kernels.gdn import chunk_gated_delta_rule, fused_recurrent_gated_delta_rule
from graphsafe_kernels.kda import chunk_kda, fused_recurrent_kda

NAN = float("nan")
both_rules = pytest.mark.parametrize("rule", RULES)


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
