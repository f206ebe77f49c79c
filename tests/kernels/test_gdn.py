"""The gated delta rule's kernels: values against the fp64 reference, and the graph contract bit for bit."""

from __future__ import annotations

import dataclasses
import functools
from types import SimpleNamespace

import pytest
import torch

from graphsafe.errors import MetadataError
from graphsafe_kernels import backend
from graphsafe_kernels.gdn import autograd, chunk_gated_delta_rule, configurations
from graphsafe_kernels.gdn.problem import Problem
from graphsafe_kernels.reference import gated_delta_rule as reference
from graphsafe_kernels.tables import build_tables

NAN = float("nan")
# relative rms allowed against fp64, (outputs and states, gradients)
TOLERANCE = {torch.float32: (1e-5, 2e-5), torch.float16: (2e-3, 4e-3), torch.bfloat16: (5e-3, 2e-2)}


@pytest.fixture(autouse=True)
def kernels(monkeypatch):
    """The operator is served by its kernels, on any device."""
    monkeypatch.setitem(backend.TRITON, "chunk_gated_delta_rule", autograd.__name__)
    monkeypatch.delitem(backend.DEVICES, "chunk_gated_delta_rule", raising=False)
    backend._load.cache_clear()
    yield
    backend._load.cache_clear()


@pytest.fixture
def configured(monkeypatch, device):
    """``configured(field=value)`` replaces fields of every configuration chosen from then on; ``tiles`` in the
    interpreter alone, because devices have descriptors for some widths and dtypes only."""

    def replace(tiles=None, **fields):
        if tiles is not None and device.type == "cpu":
            stages = dict.fromkeys(("chain_stages", "keep_stages", "reverse_stages"), 3)
            fields = {"tiles": tiles, **stages, **fields}
        chosen = configurations.configuration
        monkeypatch.setattr(configurations, "configuration", lambda *key: dataclasses.replace(chosen(*key), **fields))

    return replace


def batch(device, lengths, *, heads=1, value_heads=2, key=16, value=16, dtype=torch.float32, padding=0, unused=0,
          seed=0, dense=False, gate=False, v_first=False):  # fmt: skip
    """Operands of one call; ``padding`` rows behind the live ones hold NaN, in gradients too."""
    g = torch.Generator().manual_seed(seed)
    randn = functools.partial(torch.randn, generator=g)
    total = sum(lengths)
    rows, tokens = (len(lengths), lengths[0]) if dense else (1, total)
    states = (len(lengths), value_heads, *((value, key) if v_first else (key, value)))
    b = SimpleNamespace(
        q=randn(rows, tokens, heads, key).to(dtype), k=randn(rows, tokens, heads, key).to(dtype),
        v=randn(rows, tokens, value_heads, value).to(dtype),
        g=randn(rows, tokens, value_heads) if gate else -randn(rows, tokens, value_heads).abs(),
        beta=randn(rows, tokens, value_heads) if gate else 2 * torch.rand(rows, tokens, value_heads, generator=g),
        initial_state=randn(*states), do=randn(rows, tokens, value_heads, value).to(dtype), dfinal=randn(*states),
        A_log=randn(value_heads) if gate else None, dt_bias=randn(value_heads) if gate else None, cu=None, total=total,
        rows=("q", "k", "v", "g", "beta", "do"),
    )  # fmt: skip
    if not gate:
        b.beta[:, ::5] = 0  # an ordinary value
    if not dense:
        ends = torch.tensor([0, *lengths], dtype=torch.int32).cumsum(0)
        b.cu = torch.cat([ends, ends[-1:].expand(unused)]).to(torch.int32).to(device)
        for name in b.rows:
            t = getattr(b, name)
            setattr(b, name, torch.cat([t, t.new_full((1, padding, *t.shape[2:]), NAN)], 1))
        if unused:
            for name in ("initial_state", "dfinal"):
                t = getattr(b, name)
                setattr(b, name, torch.cat([t, randn(unused, *states[1:])]))
    for name, t in vars(b).items():
        if isinstance(t, torch.Tensor):
            setattr(b, name, t.to(device))
    return b


INPUTS = ("q", "k", "v", "g", "beta", "A_log", "dt_bias", "initial_state")


def run(b, *, dtype=None, chunk_size=16, **options):
    """Outputs and gradients by name; ``dtype`` fp64 is the reference, on live rows alone."""
    leaves = {name: getattr(b, name) for name in INPUTS if getattr(b, name) is not None}
    seeds = [b.do, b.dfinal]
    if dtype is not None:
        live = slice(None) if b.cu is None else slice(b.total)
        cut = lambda name, t: (t[:, live] if name in b.rows else t).to(dtype)  # noqa: E731
        leaves = {name: cut(name, t) for name, t in leaves.items()}
        seeds = [cut("do", b.do), cut("", b.dfinal)]
    leaves = {name: t.detach().requires_grad_() for name, t in leaves.items()}
    o, final = chunk_gated_delta_rule(**leaves, output_final_state=True, cu_seqlens=b.cu, chunk_size=chunk_size,
                                      **options)  # fmt: skip
    grads = torch.autograd.grad([o, final], list(leaves.values()), seeds)
    return {"o": o.detach(), "final": final.detach(),
            **{"d" + name: x for name, x in zip(leaves, grads, strict=True)}}  # fmt: skip


def per_token(name):
    return name in ("o", "dq", "dk", "dv", "dg", "dbeta")


def live(b, out):
    return {name: t[:, : b.total] if per_token(name) and b.cu is not None else t for name, t in out.items()}


def errors(want, got):
    """Relative rms by name; infinite where a result holds NaN."""
    assert want.keys() == got.keys()
    found = {}
    for name, w in want.items():
        g = got[name].double()
        e = (w - g).square().mean().sqrt() / (w.square().mean().sqrt() + 1e-8)
        found[name] = float("inf") if torch.isnan(g).any() else e.item()
    return found


def assert_close(want, got, dtype):
    outputs, gradients = TOLERANCE[dtype]
    found = errors(want, got)
    assert all(e <= (gradients if name.startswith("d") else outputs) for name, e in found.items()), found


def assert_same(a, b):
    assert a.keys() == b.keys()
    different = [name for name in a if not torch.equal(a[name], b[name])]
    assert not different, different


GATED = {"use_gate_in_kernel": True, "use_beta_sigmoid_in_kernel": True, "allow_neg_eigval": True,
         "use_qk_l2norm_in_kernel": True}  # fmt: skip
NORMED = {"use_qk_l2norm_in_kernel": True}
CASES = {
    "packed": (dict(lengths=[20, 0, 33, 5], padding=11), NORMED),
    "gate and beta in kernel": (dict(lengths=[20, 33], padding=40, gate=True), GATED),
    "dense, odd widths": (dict(lengths=[37, 37], dense=True, key=24, value=20, gate=True), GATED),
    "states v first": (dict(lengths=[18, 3], v_first=True, key=16, value=32), {**NORMED, "state_v_first": True}),
    "a head for a head": (dict(lengths=[17], heads=2, value_heads=2, padding=20), {"scale": -0.3}),
    "a head for a head, normalised": (dict(lengths=[17], heads=2, value_heads=2, padding=20), NORMED),
    "four value heads": (dict(lengths=[17], value_heads=4), NORMED),
    "chunk 32": (dict(lengths=[40, 9], padding=3), {**NORMED, "chunk_size": 32}),
    "chunk 64": (dict(lengths=[70, 9], padding=30, value_heads=1), {**NORMED, "chunk_size": 64}),
}


@pytest.mark.parametrize("name", CASES)
def test_values_and_padding(device, name):
    """Outputs and every gradient are the reference's; padding rows are zero whatever the padding held."""
    sizes, options = CASES[name]
    b = batch(device, **sizes)
    if not options.get("use_qk_l2norm_in_kernel"):
        b.q, b.k = (torch.nn.functional.normalize(x, dim=-1) for x in (b.q, b.k))
    got = run(b, **options)
    assert_close(run(b, dtype=torch.float64, **options), live(b, got), torch.float32)
    for key, t in got.items():
        if per_token(key) and b.cu is not None:
            assert (t[:, b.total :] == 0).all(), key


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_half_precision(device, dtype):
    b = batch(device, [40, 23], dtype=dtype, padding=3)
    got = run(b, **NORMED)
    assert_close(run(b, dtype=torch.float64, **NORMED), live(b, got), dtype)
    assert got["o"].dtype == got["dq"].dtype == dtype
    assert got["final"].dtype == torch.float32


@pytest.mark.parametrize("l2norm", [False, True])
@pytest.mark.parametrize("fields", [{}, {"tiles": True}, {"span": 1, "reverse_span": 1}], ids=str)
@pytest.mark.parametrize("v_first", [False, True])
def test_initial_states_gradient_is_not_rounded(device, configured, fields, l2norm, v_first):
    """Where beta is zero it is made of q and do alone, whose product with scale, gate and q's norm is not rounded."""
    configured(**fields)
    dtype = torch.bfloat16
    b = batch(device, [40, 16, 0, 3, 64], key=32, value=32, heads=2, value_heads=2, dtype=dtype, padding=5,
              v_first=v_first)  # fmt: skip
    b.beta = torch.zeros_like(b.beta)
    b.g = b.g.clamp(max=-1.0)  # forgotten within a chunk
    b.dfinal = torch.zeros_like(b.dfinal)
    options = {"use_qk_l2norm_in_kernel": l2norm, "state_v_first": v_first}
    want, got = (run(b, dtype=d, **options)["dinitial_state"].double() for d in (torch.float64, None))
    assert (got - want).norm() < 0.02 * torch.finfo(dtype).eps * want.norm()


@pytest.mark.parametrize("beta", [1.0, 1.9, 2.0])
def test_near_identical_keys(device, beta):
    """Nothing inside the triangular inverse outgrows the answer, in half precision as in fp32."""
    for dtype in (torch.float32, torch.float16):
        b = batch(device, [64], dtype=dtype, value_heads=1)
        b.k = (b.k[:, :1] + 0.03 * b.k).contiguous()
        b.beta = torch.full_like(b.beta, beta)
        b.g = torch.full_like(b.g, -0.01)
        found = errors(run(b, dtype=torch.float64, chunk_size=64, **NORMED), run(b, chunk_size=64, **NORMED))
        assert max(found.values()) < (1e-4 if dtype == torch.float32 else 1e-2), (dtype, found)


def test_alike_keys_rounded_so_that_sums_keep_what_entries_lose(device, configured):
    """What is made of keys that are alike comes nearer by it on the whole; what is made of others keeps its bits."""
    dtype = torch.bfloat16
    ratios = []
    for seed, spread in ((0, 0.03), (1, 0.03), (0, 1.0)):
        b = batch(device, [64], dtype=dtype, heads=2, seed=seed)
        b.k = (b.k[:, :1] * (spread < 1) + spread * b.k).contiguous()
        b.beta, b.g = torch.full_like(b.beta, 1.95), torch.full_like(b.g, -0.01)
        got = []
        for even in (False, True):
            configured(even_correction=even)
            got.append(run(b, chunk_size=64, **NORMED))
        if spread == 1:
            assert_same(*got)
            continue
        before, after = (errors(run(b, dtype=torch.float64, chunk_size=64, **NORMED), x) for x in got)
        ratios += [after[name] / before[name] for name in after]
    assert torch.tensor(ratios).log().mean().exp() < 0.9, ratios


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize(("key", "value", "chunk"), [(24, 100, 64), (160, 144, 32), (64, 40, 64)])
def test_half_precision_without_l2norm(device, dtype, key, value, chunk):
    """What makes dbeta more exact there, over several blocks of values, partial chunks, padding and shared heads."""
    b = batch(device, [70, 5, 0, 33], key=key, value=value, dtype=dtype, padding=9, gate=True)
    b.q, b.k = (torch.nn.functional.normalize(x.float(), dim=-1).to(dtype) for x in (b.q, b.k))
    options = {"chunk_size": chunk, "use_gate_in_kernel": True, "use_beta_sigmoid_in_kernel": True}
    got = run(b, **options)
    assert_close(run(b, dtype=torch.float64, **options), live(b, got), dtype)
    assert all((t[:, b.total :] == 0).all() for name, t in got.items() if per_token(name))


@pytest.mark.parametrize("options", [NORMED, {}], ids=["l2norm", "no l2norm"])
@pytest.mark.parametrize("spread", [1.0, 0.3, 0.03])
def test_dbeta_without_the_rounding_of_its_rows_gradient(device, configured, spread, options):
    """Nearer to fp64 by what dw's rounding was of it, without l2norm also e's, and no farther where keys are alike and
    what it is made of cancels; a beta of zero keeps <dw, e>."""
    dtype = torch.bfloat16

    def same(x, y):
        """Bit for bit; a compiler forms the sums of two versions of a kernel in two ways."""
        return torch.equal(x, y) if device.type == "cpu" else (x.double() - y).norm() <= 2.0**-8 * y.double().norm()

    ratios = []
    for seed in range(12):  # of so few tokens the other roundings may outweigh dw's in any one
        b = batch(device, [64], dtype=dtype, key=32, value=32, seed=seed)
        if spread < 1:
            b.k = (b.k[:, :1] + spread * b.k).contiguous()
        if not options:
            b.q, b.k = (torch.nn.functional.normalize(x.float(), dim=-1).to(dtype) for x in (b.q, b.k))
        want = run(b, dtype=torch.float64, chunk_size=64, **options)["dbeta"]
        got = {}
        for exact in (False, True):
            configured(exact_beta=exact)
            got[exact] = run(b, chunk_size=64, **options)
        assert all(same(t, got[True][name]) for name, t in got[False].items() if name != "dbeta")
        assert same(*(x["dbeta"][b.beta == 0] for x in got.values()))
        assert not torch.equal(*(x["dbeta"] for x in got.values()))
        before, after = ((got[exact]["dbeta"].double() - want).norm() for exact in (False, True))
        ratios.append(after / before)
    mean = torch.stack(ratios).log().mean().exp()
    assert mean < ({1.0: 0.9, 0.3: 0.97, 0.03: 1.03} if options else {1.0: 0.75, 0.3: 0.9, 0.03: 1.03})[spread], ratios


@pytest.mark.parametrize("gate", [-5.0, -20.0, -1e4, -float("inf")])
def test_strong_gates(device, gate):
    """A saturated gate forgets the state and leaves everything finite."""
    b = batch(device, [24])
    b.g[:, 3:9] = gate
    got = run(b, **NORMED)
    assert all(torch.isfinite(t).all() for t in got.values())
    b.g = b.g.clamp(min=-200)  # the reference differentiates exp(-inf)
    want = run(b, dtype=torch.float64, **NORMED)
    found = errors(want, got)
    assert max(e for name, e in found.items() if name != "dg") < 2e-5, found
    assert (got["dg"].double() - want["dg"]).abs().max() < 2e-5 * want["dg"].abs().max()


def test_blocks_and_descriptors(device, configured):
    """Several blocks of K and V, descriptors with a masked rest, and kept states: the same values."""
    b = batch(device, [40, 7, 17], key=32, value=32, padding=5)
    want = run(b, dtype=torch.float64, **NORMED)
    blocks = dict(chain_block=16, reverse_block=16, prepare_block=16, gradient_key_block=16, gradient_value_block=16)
    crowded = {"tiles": True, "keep_states": True, "keep_stages": 2, "reverse_stages": 2}
    for fields in (blocks, {"tiles": True}, {"tiles": True, "keep_states": True}, crowded):
        configured(**fields)
        assert_close(want, live(b, run(b, **NORMED)), torch.float32)


def test_programs_that_walk_tasks(device, configured):
    """Few programs with several tasks each, sentinels among them, and gates by head: the bits of one task a program."""
    b = batch(device, [20, 0, 33, 5], padding=50, gate=True)
    tables = build_tables(b.cu, b.q.shape[1], 16)
    given = {"chunk_indices": tables.chunk_indices, "chunk_offsets": tables.chunk_offsets, **GATED}
    cases = (b, given), (batch(device, [37, 37], dense=True, gate=True), GATED)
    want = [run(b, **options) for b, options in cases]
    configured(cores=6, heads_first=True)
    for (b, options), expected in zip(cases, want, strict=True):
        assert_same(expected, run(b, **options))


SEGMENTED = [
    {"span": 2, "reverse_span": 2},
    {"span": 1, "reverse_span": 1, "tiles": True},
    {"span": 3, "reverse_span": 3, "tiles": True, "keep_states": True},
]


@pytest.mark.parametrize("fields", SEGMENTED, ids=str)
def test_segments_of_a_sequence(device, configured, fields):
    """Sequences cut into segments that run side by side: the same values, for one segment, several and none."""
    b = batch(device, [70, 0, 16, 33], key=32, value=32, padding=5)
    want = run(b, dtype=torch.float64, **NORMED)
    configured(**fields)
    got = run(b, **NORMED)
    assert_close(want, live(b, got), torch.float32)
    assert all((t[:, b.total :] == 0).all() for name, t in got.items() if per_token(name))


def test_a_second_segment_prepared_beside_the_first_ones_states(device, configured, capture):
    """The launches of two streams, eager and captured: the same bits as one after the other."""
    b = batch(device, [70], key=32, value=32, padding=5)
    configured(span=3, beside=False)
    want = run(b, **NORMED)
    configured(beside=True)
    assert_same(want, run(b, **NORMED))
    assert_same(want, capture(functools.partial(run, b, use_graph=True, **NORMED)).replay())


def test_segments_of_dense_sequences_with_states_v_first(device, configured):
    b = batch(device, [50, 50], dense=True, v_first=True, key=16, value=32)
    options = {**NORMED, "state_v_first": True}
    want = run(b, dtype=torch.float64, **options)
    configured(span=1, reverse_span=1, chain_block=16, reverse_block=16)
    assert_close(want, run(b, **options), torch.float32)


def test_segments_follow_from_the_bucket(device):
    """Long sequences with few heads are cut, forward and backward; with many chains there is nothing to gain. A lone
    sequence in two segments has the second prepared beside the first one's states."""
    choose = functools.partial(configurations.choose, capability=90, dtype=torch.bfloat16)
    problem = functools.partial(Problem, 1, heads=4, key_width=128, value_width=128, chunk_size=64, scale=1.0)
    for value_heads, sequences, tokens, span, reverse_span, beside in (
        (32, 1, 8192, 64, 0, True), (20, 1, 8192, 43, 0, False), (8, 1, 8192, 16, 16, False),
        (8, 4, 8192, 64, 0, False), (32, 32, 4096, 0, 0, False), (8, 1, 1024, 0, 0, False),
    ):  # fmt: skip
        c = choose(problem(tokens=tokens, value_heads=value_heads, sequences=sequences))
        assert (c.span, c.reverse_span, c.beside) == (span, reverse_span, beside), (value_heads, sequences, tokens)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_later_tokens_change_nothing(device, dtype):
    """A prefix is bit-equal whatever follows it, also inside a chunk, and whatever beta asks of the inverse."""
    for cut in (3, 24, 40):
        whole, changed = (batch(device, [45], dtype=dtype) for _ in range(2))
        whole.beta[:, cut:] /= 2.1  # at most 1: nothing to refine behind the cut
        whole.beta[:, :5] = 0.5
        for name in whole.rows:
            t = getattr(changed, name)
            t[:, :cut] = getattr(whole, name)[:, :cut]
            if name not in ("g", "beta"):
                t[:, cut:] *= -3
        changed.beta[:, cut:] = 1.9
        outputs = [
            chunk_gated_delta_rule(**{n: getattr(b, n) for n in INPUTS}, cu_seqlens=b.cu, chunk_size=32, **NORMED)[0]
            for b in (whole, changed)
        ]
        assert torch.equal(outputs[0][:, :cut], outputs[1][:, :cut]), cut
        assert not torch.equal(outputs[0][:, cut:], outputs[1][:, cut:])


def test_repeated_runs_give_the_same_bits(device, large):
    b = batch(device, [70, 9, 33], dtype=torch.float16, gate=True, padding=5)
    first = run(b, **GATED)
    for _ in range(100 if large else 2):
        assert_same(first, run(b, **GATED))


def test_tail_by_descriptor_reads_no_other_sequence(device, configured):
    """A chunk's block load takes along the next sequence's rows: NaN there changes no bit."""
    for fields in ({}, {"tiles": True}):
        configured(**fields)
        b = batch(device, [20, 18, 9], key=32, value=32)
        clean = run(b, **NORMED)
        for name in b.rows:
            getattr(b, name)[:, 20:38] = NAN
        dirty = run(b, **NORMED)
        for name, t in clean.items():
            if per_token(name):
                kept = torch.ones(t.shape[1], dtype=torch.bool, device=device)
                kept[20:38] = False
                assert torch.equal(t[:, kept], dirty[name][:, kept]), name
            else:
                assert torch.equal(t[::2], dirty[name][::2]), name


def test_padding_and_unread_intermediates_change_no_bit(device, monkeypatch):
    """The bucket's size changes no bit, gate parameters' sums included; nor does what fresh memory holds."""
    lengths = [20, 33]
    exact = run(batch(device, lengths, gate=True), **GATED)
    wide = batch(device, lengths, gate=True, padding=50, unused=3)

    def narrowed():
        out = live(wide, run(wide, **GATED))
        return {name: t[:2] if name in ("final", "dinitial_state") else t for name, t in out.items()}

    assert_same(exact, narrowed())
    for owner, name in ((torch, "empty_like"), (torch.Tensor, "new_empty"), (torch, "empty")):
        original = getattr(owner, name)

        def poisoned(*args, original=original, **kwargs):
            t = original(*args, **kwargs)
            return t.fill_(NAN if t.is_floating_point() else 0)  # tables, which the preparation writes

        monkeypatch.setattr(owner, name, poisoned)
    assert_same(exact, narrowed())


def test_replay(device, capture):
    """One captured forward and backward serves any layout of its bucket, bit for bit as eager."""
    b = batch(device, [20, 13, 7], padding=8, gate=True)
    body = capture(functools.partial(run, b, use_graph=True, max_num_seqs=3, **GATED))
    for seed, lengths in enumerate(([48, 0, 0], [0, 1, 47], [16, 16, 3], [0, 0, 0])):
        fresh = batch(device, lengths, padding=48 - sum(lengths), gate=True, seed=seed + 1)
        for name in (*INPUTS, "do", "dfinal", "cu"):
            getattr(b, name).copy_(getattr(fresh, name))
        got = {name: t.clone() for name, t in body.replay().items()}
        assert_same(run(b, use_graph=True, max_num_seqs=3, **GATED), got)
        b.total = sum(lengths)
        assert all((t[:, b.total :] == 0).all() for name, t in got.items() if per_token(name)), lengths


def test_calls_and_graphs_share_no_memory(device, capture):
    """Two calls in one graph, and two graphs replayed in turn: each keeps its own results."""
    a, b, c = (batch(device, [20, 5], seed=seed) for seed in range(3))
    run_all = functools.partial(run, use_graph=True, **NORMED)
    both = capture(lambda: (run_all(a), run_all(b)))
    other = capture(lambda: run_all(c))
    want = [run_all(x) for x in (a, b, c)]
    for body in (both, other, both):
        body.replay()
    for expected, got in zip(want, (*both.value, other.value), strict=True):
        assert_same(expected, got)


def test_launches(device, launches, configured):
    """Forward at most 2 launches, 4 where sequences are cut; backward at most 5, and 6; few sequences' tables are
    among them."""
    chains = ["backward_chains", "gradients"]

    def launched(most_forward, most_backward):
        names = [name.removesuffix("_kernel") for name in launches]
        launches.clear()
        forward = names.index("forward_chain") + 1
        assert forward <= most_forward, names
        assert len(names) - forward <= most_backward, names
        return names[:forward], names[forward:]

    for sizes, options, last in (
        ({"heads": 2, "value_heads": 2}, {}, []),
        ({"heads": 2, "value_heads": 2}, NORMED, ["finish"]),
        ({"value_heads": 2}, NORMED, ["finish"]),
        ({"gate": True}, GATED, ["finish"]),
    ):
        launches.clear()
        run(batch(device, [20], padding=3, **sizes), **options)
        assert launched(2, 5) == (["prepare", "forward_chain"], chains + last)
    configured(span=1, reverse_span=1)
    run(batch(device, [20], padding=3, gate=True), **GATED)
    assert launched(4, 6) == (["prepare", "segment_states", "forward_chain"], ["segment_gradients", *chains, "finish"])
    configured(reverse_span=0, beside=True)
    run(batch(device, [20], padding=3, gate=True), **GATED)
    assert launched(4, 6) == (["prepare", "segment_states", "prepare", "forward_chain"], [*chains, "finish"])


@pytest.mark.parametrize("lengths", [[20], [0, 20, 0, 33, 0], [1] * 32, [1] * 33], ids=len)
def test_tables_given_and_made_on_the_way(device, launches, lengths):
    """Few sequences' tables are written by the preparation: the same bits as with tables that the caller built."""
    b = batch(device, lengths, padding=5, key=16, value=16)
    given = build_tables(b.cu, b.q.shape[1], 16)
    launches.clear()
    own = run(b, **NORMED)
    assert ("chunk_tables_kernel" in launches) == (len(lengths) > 32 or device.type == "npu")
    assert_same(run(b, chunk_indices=given.chunk_indices, chunk_offsets=given.chunk_offsets, **NORMED), own)


def test_without_tokens_states_are_handed_through(device):
    b = batch(device, [0, 0])
    got = run(b, **NORMED)
    assert torch.equal(got["final"], b.initial_state)
    assert torch.equal(got["dinitial_state"], b.dfinal)


def test_boundaries_written_before_the_backward_are_refused(device):
    b = batch(device, [20])
    q = b.q.requires_grad_()
    o, _ = chunk_gated_delta_rule(q, b.k, b.v, b.g, b.beta, cu_seqlens=b.cu, chunk_size=16)
    b.cu.add_(0)
    with pytest.raises(MetadataError, match="cu_seqlens"):
        o.sum().backward()


def test_fp64_is_the_reference(device):
    b = batch(device, [20], dtype=torch.float64)
    b.initial_state, b.dfinal = b.initial_state.double(), b.dfinal.double()
    assert autograd.reference is reference
    assert run(b, **NORMED)["o"].dtype == torch.float64
