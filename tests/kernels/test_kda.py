"""KDA's kernels: values against the fp64 reference, and the graph contract bit for bit."""

from __future__ import annotations

import dataclasses
import functools
import random
from types import SimpleNamespace

import pytest
import torch

from graphsafe.errors import MetadataError
from graphsafe.metadata import build_tables
from graphsafe_kernels import backend
from graphsafe_kernels.kda import autograd, chunk_kda, launch

NAN = float("nan")
# relative rms allowed against fp64, (outputs and states, gradients)
TOLERANCE = {torch.float32: (1e-5, 2e-5), torch.float16: (2e-3, 4e-3), torch.bfloat16: (5e-3, 2e-2)}
ROWS = ("q", "k", "v", "g", "beta", "do")
INPUTS = ("q", "k", "v", "g", "beta", "A_log", "dt_bias", "initial_state")


@pytest.fixture(autouse=True)
def kernels(monkeypatch):
    """The operator is served by its kernels, on any device."""
    monkeypatch.delitem(backend.DEVICES, "chunk_kda", raising=False)
    backend._load.cache_clear()
    yield
    backend._load.cache_clear()


@pytest.fixture
def configured(monkeypatch):
    """``configured(field=value)`` replaces fields of every configuration chosen from then on."""
    chosen = launch.choose
    return lambda **fields: monkeypatch.setattr(
        launch, "choose", lambda *key: dataclasses.replace(chosen(*key), **fields)
    )


def batch(device, lengths, *, heads=1, group=1, key=16, value=16, dtype=torch.float32, padding=0, unused=0, seed=0,
          dense=False, gate=False, A_log=True, v_first=False, strength=1.0):  # fmt: skip
    """Operands of one call; ``padding`` rows behind the live ones hold NaN, in gradients too."""
    generator = torch.Generator().manual_seed(seed)
    randn = functools.partial(torch.randn, generator=generator)
    total, value_heads = sum(lengths), heads * group
    shape = (len(lengths), lengths[0]) if dense else (1, total)
    states = (len(lengths), value_heads, *((value, key) if v_first else (key, value)))
    given = -strength * torch.rand(*shape, value_heads, key, generator=generator)
    b = SimpleNamespace(
        q=randn(*shape, heads, key).to(dtype), k=randn(*shape, heads, key).to(dtype),
        v=randn(*shape, value_heads, value).to(dtype), g=randn(*shape, value_heads, key) if gate else given,
        beta=randn(*shape, value_heads) if gate else 2 * torch.rand(*shape, value_heads, generator=generator),
        initial_state=randn(*states), do=randn(*shape, value_heads, value).to(dtype), dfinal=randn(*states),
        A_log=randn(value_heads) if gate and A_log else None, dt_bias=randn(value_heads * key) if gate else None,
        cu=None, total=total,
    )  # fmt: skip
    if not gate:
        b.beta[:, ::5] = 0  # an ordinary value
    if not dense:
        ends = torch.tensor([0, *lengths], dtype=torch.int32).cumsum(0)
        b.cu = torch.cat([ends, ends[-1:].expand(unused)]).to(torch.int32).to(device)
        for name in ROWS:
            t = getattr(b, name)
            setattr(b, name, torch.cat([t, t.new_full((1, padding, *t.shape[2:]), NAN)], 1))
        for name in ("initial_state", "dfinal"):
            t = getattr(b, name)
            setattr(b, name, torch.cat([t, randn(unused, *states[1:])]))
    for name, t in vars(b).items():
        if isinstance(t, torch.Tensor):
            setattr(b, name, t.to(device))
    return b


def run(b, *, dtype=None, **options):
    """Outputs and gradients by name; ``dtype`` fp64 is the reference, on live rows alone."""
    leaves = {name: getattr(b, name) for name in INPUTS if getattr(b, name) is not None}
    seeds = [b.do, b.dfinal]
    if dtype is not None:
        rows = slice(None) if b.cu is None else slice(b.total)
        cut = lambda name, t: (t[:, rows] if name in ROWS else t).to(dtype)  # noqa: E731
        leaves = {name: cut(name, t) for name, t in leaves.items()}
        seeds = [cut("do", b.do), cut("", b.dfinal)]
    leaves = {name: t.detach().requires_grad_() for name, t in leaves.items()}
    o, final = chunk_kda(**leaves, output_final_state=True, **{"cu_seqlens": b.cu, "chunk_size": 32, **options})
    gradients = torch.autograd.grad([o, final], list(leaves.values()), seeds)
    return {"o": o.detach(), "final": final.detach(),
            **{"d" + name: x for name, x in zip(leaves, gradients, strict=True)}}  # fmt: skip


def per_token(name):
    return name in ("o", "dq", "dk", "dv", "dg", "dbeta")


def live(b, out):
    return {name: t[:, : b.total] if per_token(name) and b.cu is not None else t for name, t in out.items()}


def assert_close(want, got, dtype, k=None, scales=None):
    """Relative rms by name; NaN never passes.

    k: also allow dg one rounding of the products that it is what is left of. A token's dg is a difference of sums that
    hold k dk, which outlive it where the gates forget everything: its rounding is theirs, 2^-24 in fp32. scales: what
    A_log's gradient, one number a head, is the sum of: its error is measured by their root sum of squares.
    """
    assert want.keys() == got.keys()
    outputs, gradients = TOLERANCE[dtype]
    allowed = {n: (gradients if n.startswith("d") else outputs) * (w.norm().item() + 1e-8) for n, w in want.items()}
    if scales is not None:
        allowed["dA_log"] = gradients * max(want["dA_log"].norm().item(), scales.norm().item())
    if k is not None:
        allowed["dg"] += 2.0**-24 * (k.double() * want["dk"]).norm().item()
    share = {n: (w - got[n].double()).norm().item() / allowed[n] for n, w in want.items()}
    assert all(s <= 1 for s in share.values()), ", ".join(f"{n} {s:.2f} of {allowed[n]:.1e}" for n, s in share.items())


def assert_same(a, b):
    assert a.keys() == b.keys()
    different = [name for name in a if not torch.equal(a[name], b[name])]
    assert not different, different


NORMED = {"use_qk_l2norm_in_kernel": True}
SOFTPLUS = {**NORMED, "use_gate_in_kernel": True, "use_beta_sigmoid_in_kernel": True, "allow_neg_eigval": True}
BOUNDED = {**NORMED, "use_gate_in_kernel": True, "use_beta_sigmoid_in_kernel": True, "lower_bound": -5.0}
SAFE = {**BOUNDED, "safe_gate": True}
CASES = {
    "given gate, padding": (dict(lengths=[20, 0, 35, 5], padding=41), NORMED),
    "softplus gate, negative eigenvalues": (dict(lengths=[20, 33], padding=40, gate=True), SOFTPLUS),
    "softplus gate without A_log": (dict(lengths=[33], gate=True, A_log=False), SOFTPLUS),
    "bounded gate": (dict(lengths=[37], gate=True), BOUNDED),
    "bounded gate without A_log": (dict(lengths=[20], gate=True, A_log=False, padding=1), BOUNDED),
    "dense, odd widths": (dict(lengths=[37, 37], dense=True, key=24, value=20, gate=True), SOFTPLUS),
    "states v first": (dict(lengths=[18, 3], v_first=True, value=32), {**NORMED, "state_v_first": True}),
    "three value heads": (dict(lengths=[17, 20], group=3, padding=20), NORMED),
    "two heads": (dict(lengths=[17], heads=2), {**NORMED, "scale": -0.3}),
    "no l2norm": (dict(lengths=[37]), {}),
    "kept intermediates": (dict(lengths=[40, 9], gate=True), {**SOFTPLUS, "disable_recompute": True}),
    "chunk 64": (dict(lengths=[70, 9], padding=70), {**NORMED, "chunk_size": 64}),
    "safe": (dict(lengths=[37], gate=True), SAFE),
    "strong gates": (dict(lengths=[40], strength=1000.0), NORMED),
}


@pytest.mark.parametrize("name", CASES)
def test_values_and_padding(device, name):
    """Outputs and every gradient are the reference's; padding rows are zero whatever the padding held."""
    sizes, options = CASES[name]
    b = batch(device, **sizes)
    if not options.get("use_qk_l2norm_in_kernel"):
        b.q, b.k = (torch.nn.functional.normalize(x, dim=-1) for x in (b.q, b.k))
    got = run(b, **options)
    k = b.k if b.cu is None else b.k[:, : b.total]
    assert_close(run(b, dtype=torch.float64, **options), live(b, got), torch.float32, k)
    for key, t in got.items():
        if per_token(key) and b.cu is not None:
            assert (t[:, b.total :] == 0).all(), key


@pytest.mark.parametrize("options", [NORMED, SAFE, {**SAFE, "chunk_size": 64}], ids=["general", "safe", "safe 64"])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_half_precision(device, dtype, options):
    b = batch(device, [40, 23], dtype=dtype, padding=3, gate=options is not NORMED)
    got = run(b, **options)
    assert_close(run(b, dtype=torch.float64, **options), live(b, got), dtype)
    assert got["o"].dtype == got["dq"].dtype == dtype
    assert got["final"].dtype == torch.float32


def test_gradient_of_a_forgotten_state_is_rounded_once(device):
    """Where gates are at their bound, the initial state's gradient is made of the first tokens: of its roundings
    there is one left, that of the gated queries."""
    dtype = torch.bfloat16
    b = batch(device, [40, 64, 0, 3], key=32, value=32, dtype=dtype, padding=5, gate=True)
    b.g = torch.full_like(b.g, 30.0)
    b.dfinal = torch.zeros_like(b.dfinal)
    want, got = (run(b, dtype=d, **SAFE)["dinitial_state"].double() for d in (torch.float64, None))
    once = 0.24 * torch.finfo(dtype).eps  # 0.21 measured; 0.29 with two
    assert (got - want).norm() < once * want.norm()


def test_l2norm_does_not_round_a_gradient_twice(device):
    """Where dq comes of a token's own key and value alone, its error is that of rounding the exact one."""
    dtype = torch.bfloat16
    b = batch(device, [1] * 12, key=32, dtype=dtype, gate=True)
    b.initial_state = torch.zeros_like(b.initial_state)
    want, got = run(b, dtype=torch.float64, **SAFE)["dq"], run(b, **SAFE)["dq"]
    rounding = (want.to(dtype).double() - want).norm().item()
    assert (got.double() - want).norm().item() < 1.2 * rounding


@pytest.mark.parametrize(
    "options", [NORMED, SAFE, {**SAFE, "use_qk_l2norm_in_kernel": False}], ids=["general", "safe", "safe, no l2norm"]
)
@pytest.mark.parametrize("spread", [1.0, 0.3, 0.03])
def test_dbeta_without_the_roundings_of_its_row(device, configured, spread, options):
    """Nearer to fp64 by what dw's and e's rounding were of it, and no farther where keys are alike and what it is made
    of cancels; a beta of zero keeps <dw, e>."""
    if device.type == "npu":
        pytest.skip("by levels dbeta is <dw, e>")
    ratios = []
    for seed in range(12):  # of so few tokens the other roundings may outweigh these in any one
        b = batch(device, [64], dtype=torch.bfloat16, key=32, value=32, seed=seed, gate=options is not NORMED)
        if spread < 1:
            b.k = (b.k[:, :1] + spread * b.k).contiguous()
        if not options["use_qk_l2norm_in_kernel"]:
            b.q, b.k = (torch.nn.functional.normalize(x.float(), dim=-1).to(x.dtype) for x in (b.q, b.k))
        got = {}
        for exact in (False, True):
            configured(exact_beta=exact)
            got[exact] = run(b, **{"chunk_size": 64, **options})["dbeta"]
        assert torch.equal(*(x[b.beta == 0] for x in got.values()))
        assert not torch.equal(*got.values())
        want = run(b, dtype=torch.float64, **{"chunk_size": 64, **options})["dbeta"]
        before, after = ((got[exact].double() - want).norm() for exact in (False, True))
        ratios.append(after / before)
    mean = torch.stack(ratios).log().mean().exp()
    assert mean < {1.0: 0.85, 0.3: 0.95, 0.03: 1.05}[spread], (mean, ratios)


@pytest.mark.parametrize("options", [NORMED, SAFE], ids=["general", "safe"])
def test_dk_without_a_rounding_of_what_comes_from_behind_the_chunk(device, configured, options):
    if device.type == "npu":
        pytest.skip("by levels it is rounded as its operands are")
    b = batch(device, [128], dtype=torch.bfloat16, key=32, value=32, gate=options is not NORMED)
    want = run(b, dtype=torch.float64, **{"chunk_size": 64, **options})["dk"]
    found = []
    for fine in (False, True):
        configured(fine=fine)
        found.append((run(b, **{"chunk_size": 64, **options})["dk"].double() - want).norm())
    assert found[1] < 0.95 * found[0], found


def test_gradients_scale_with_what_they_are_of(device):
    """By powers of two, to the bit: what is in fp16 on the way has a power of two of its own in each row."""
    b = batch(device, [70, 5], dtype=torch.bfloat16, key=32, value=32, gate=True)
    want, do, dfinal = run(b, **SAFE), b.do, b.dfinal
    for factor in (2.0**-12, 2.0**12):  # a bounded gate's factors leave 2^13 of the range of fp32
        b.do, b.dfinal = do * factor, dfinal * factor
        got = run(b, **SAFE)
        assert_same({n: t * factor if n.startswith("d") else t for n, t in want.items()}, got)


@pytest.mark.parametrize("x", [-30.0, 30.0, 1e4, -1e4])
def test_saturated_gates(device, x):
    """A gate at either end, in both half-precision paths, is accurate and its gradients are finite."""
    for options in (SAFE, SOFTPLUS):
        b = batch(device, [37], dtype=torch.float16, gate=True)
        b.g = torch.full_like(b.g, x)
        got, want = run(b, **options), run(b, dtype=torch.float64, **options)
        assert all(torch.isfinite(t).all() for t in got.values())
        small = ("dg", "dA_log", "ddt_bias")  # vanishing where the gate is saturated
        keep = lambda out: {n: t for n, t in out.items() if n not in small}  # noqa: B023, E731
        assert_close(keep(want), keep(got), torch.float16)


@pytest.mark.parametrize("gate", [-1e4, -float("inf")])
def test_forgetting_everything(device, gate):
    """Single tokens that forget the state leave everything finite and right."""
    b = batch(device, [37])
    b.g[:, 3:9] = gate
    got = run(b, **NORMED)
    b.g = b.g.clamp(min=-500)  # the reference differentiates exp(-inf)
    assert_close(run(b, dtype=torch.float64, **NORMED), got, torch.float32)


@pytest.mark.parametrize("beta", [1.0, 1.9, 2.0])
def test_near_identical_keys(device, beta):
    b = batch(device, [64], dtype=torch.float16)
    b.k = (b.k[:, :1] + 0.03 * b.k).contiguous()
    b.beta = torch.full_like(b.beta, beta)
    b.g = torch.full_like(b.g, -0.01)
    options = {**NORMED, "chunk_size": 64}
    want, got = run(b, dtype=torch.float64, **options), run(b, **options)
    error = {n: ((w - got[n].double()).norm() / w.norm()).item() for n, w in want.items()}
    # at 2 every token is a reflection: what the first ones' rounding leaves never decays
    assert max(error.values()) < (1e-2 if beta < 2 else 1.5e-2), error


@pytest.mark.parametrize(
    ("dtype", "options"), [(torch.float32, NORMED), (torch.float16, SAFE)], ids=["general", "safe"]
)
def test_later_tokens_change_nothing(device, dtype, options):
    """A prefix is bit-equal whatever follows it, also inside a chunk and inside a tile of 16 tokens."""
    b = batch(device, [45], dtype=dtype, gate=options is SAFE)
    whole = chunk_kda(**{n: getattr(b, n) for n in INPUTS}, cu_seqlens=b.cu, chunk_size=32, **options)[0]
    for cut in (3, 24, 40):
        for name in ROWS:
            t = getattr(b, name)
            t[:, cut:] = -3 * t[:, cut:] if name != "g" or options is SAFE else t[:, cut:] * 0.1
        changed = chunk_kda(**{n: getattr(b, n) for n in INPUTS}, cu_seqlens=b.cu, chunk_size=32, **options)[0]
        assert torch.equal(whole[:, :cut], changed[:, :cut]), cut
        assert not torch.equal(whole[:, cut:], changed[:, cut:])
        b = batch(device, [45], dtype=dtype, gate=options is SAFE)


@pytest.mark.parametrize("options", [NORMED, SAFE], ids=["general", "safe"])
def test_a_poisoned_sequence_stays_by_itself(device, options):
    """Rows of another sequence, taken along by block loads, hold NaN and change not a bit."""
    lengths = [20, 13, 18]
    clean, dirty = (batch(device, lengths, gate=options is SAFE, dtype=torch.float16) for _ in range(2))
    for name in ROWS:
        getattr(dirty, name)[:, 20:33] = NAN
    for name in ("initial_state", "dfinal"):
        getattr(dirty, name)[1] = NAN
    want, got = run(clean, **options), run(dirty, **options)
    for name in want:
        if name in ("dA_log", "ddt_bias"):
            continue  # sums over all sequences
        for a, z in ((0, 20), (33, 51)):
            x, y = (t[name][:, a:z] if per_token(name) else t[name][[0, 2]] for t in (want, got))
            assert torch.equal(x, y), name


def test_padding_does_not_change_a_bit(device):
    """The same live batch in larger and larger buckets: the same bits, in sums over slots too."""
    want = None
    for padding, unused in ((0, 0), (40, 0), (3, 2)):
        b = batch(device, [34, 5], gate=True, padding=padding, unused=unused)
        got = live(b, run(b, **SOFTPLUS))
        got = {n: t[:2] if n in ("final", "dinitial_state") else t for n, t in got.items()}
        want = want or got
        assert_same(want, got)


def test_graph_mode_tables_and_repetition(device):
    """Graph mode, the caller's tables, intermediates kept or made again, a second run: the same bits."""
    b = batch(device, [20, 0, 13], gate=True, padding=9)
    want = run(b, **SOFTPLUS)
    assert_same(want, run(b, **SOFTPLUS))
    assert_same(want, run(b, **SOFTPLUS, use_graph=True, max_num_seqs=3))
    assert_same(want, run(b, **SOFTPLUS, disable_recompute=True))
    tables = build_tables(b.cu, b.q.shape[1], 32)
    assert_same(want, run(b, **SOFTPLUS, chunk_indices=tables.chunk_indices, chunk_offsets=tables.chunk_offsets))


def test_unwritten_memory_is_never_read(device, monkeypatch):
    """Every allocation starts as NaN; results and padding are the same bits as without."""
    b = batch(device, [34, 0, 3], gate=True, padding=40, unused=1, group=2)
    want = run(b, **SOFTPLUS)
    new_empty, empty_like = torch.Tensor.new_empty, torch.empty_like
    poison = lambda t: t.fill_(NAN) if t.is_floating_point() else t  # noqa: E731
    monkeypatch.setattr(torch.Tensor, "new_empty", lambda *a, **k: poison(new_empty(*a, **k)))
    monkeypatch.setattr(torch, "empty_like", lambda *a, **k: poison(empty_like(*a, **k)))
    assert_same(want, run(b, **SOFTPLUS))


def test_omitted_A_log_is_a_unit_scale(device):
    b = batch(device, [20], gate=True, A_log=False)
    want = run(b, **SOFTPLUS)
    b.A_log = torch.zeros(1, device=device)
    got = run(b, **SOFTPLUS)
    del got["dA_log"]
    assert_same(want, got)


def test_intermediate_states(device):
    """The state at the start of every chunk, zero in unused slots, either way round."""
    b = batch(device, [40, 0, 5], padding=40, unused=1)
    inputs = {n: getattr(b, n) for n in INPUTS}
    with torch.inference_mode():
        _, final, states = chunk_kda(**inputs, cu_seqlens=b.cu, chunk_size=32, output_final_state=True,
                                     return_intermediate_states=True, **NORMED)  # fmt: skip
        head = {n: t[:, :32] if n in ROWS else t for n, t in inputs.items() if t is not None}
        head["initial_state"] = b.initial_state[:1]
        first = chunk_kda(**head, chunk_size=32, output_final_state=True, **NORMED)[1]
        inputs["initial_state"] = b.initial_state.transpose(-1, -2)
        turned = chunk_kda(**inputs, cu_seqlens=b.cu, chunk_size=32, return_intermediate_states=True,
                           state_v_first=True, **NORMED)[2]  # fmt: skip
    assert states.shape == (1, 6, 1, 16, 16)
    assert torch.equal(states[0, 0], b.initial_state[0])
    assert torch.equal(states[0, 1], first[0])
    assert torch.equal(states[0, 2], b.initial_state[2])
    assert (states[0, 3:] == 0).all()
    assert torch.equal(turned, states.transpose(-1, -2))
    assert torch.equal(final[1], b.initial_state[1])


def test_no_tokens(device):
    """Without a token every state, and its gradient, is handed through."""
    for lengths, dense in (([0, 0], False), ([0, 0], True)):
        b = batch(device, lengths, dense=dense, gate=True)
        got = run(b, **SOFTPLUS)
        assert torch.equal(got["final"], b.initial_state)
        assert torch.equal(got["dinitial_state"], b.dfinal)
        assert (got["dA_log"] == 0).all()
        assert (got["ddt_bias"] == 0).all()


def test_launches(device, launches, configured):
    """Two launches forward and five backward, tables apart; four where the tiles or all intermediates are kept."""
    b = batch(device, [40, 3], gate=True)
    count = lambda: [n for n in launches if n != "chunk_tables_kernel"]  # noqa: E731
    run(b, **SOFTPLUS)
    assert len(count()) == 2 + 4, launches
    configured(keep_tiles=False)
    launches.clear()
    run(b, **SOFTPLUS)
    assert len(count()) == 2 + 5, launches
    launches.clear()
    run(b, **SOFTPLUS, disable_recompute=True)
    assert len(count()) == 2 + 4, launches


@pytest.fixture
def born(device, monkeypatch):
    """On a GPU, what is allocated uninitialised: tensors that a test may fill with NaN. A guarded capture, as on the
    other devices, lets nobody keep them."""
    found = []
    for owner, name in ((torch.Tensor, "new_empty"), (torch, "empty_like")) if device.type == "cuda" else ():
        original = getattr(owner, name)

        def kept(*args, original=original, **kwargs):
            found.append(original(*args, **kwargs))
            return found[-1]

        monkeypatch.setattr(owner, name, kept)
    return found


@pytest.mark.parametrize("span", [0, 1], ids=["whole", "cut"])
def test_replay_follows_the_layout(device, capture, large, configured, born, span):
    """A captured forward and backward serves other layouts of its bucket, bit for bit, whatever its outputs and
    intermediates held; padding, NaN in the inputs, is zero. On a device 50 layouts."""
    configured(span=span)
    size = 330 if large else 33
    b = batch(device, [size - 13, 13], gate=True)
    run(b, **SOFTPLUS, use_graph=True)
    graph = capture(lambda: run(b, **SOFTPLUS, use_graph=True))
    memory = [t for t in born if t.is_floating_point()]
    assert not large or len(memory) > 20
    rng = random.Random(0)
    cuts = [sorted(rng.choices(range(size + 1), k=2)) for _ in range(46 if large else 0)]
    given = ([size - 13, 13], [3, 10], [size, 0], [0, 0])
    for lengths in (*given, *([first, last - first] for first, last in cuts)):
        new = batch(device, lengths, gate=True, padding=size - sum(lengths), seed=sum(lengths))
        for name, t in vars(new).items():
            if isinstance(t, torch.Tensor):
                getattr(b, name).copy_(t)
        for t in memory:
            t.detach().fill_(NAN)
        got = graph.replay()
        assert_same(run(new, **SOFTPLUS), got)
        assert all((t[:, sum(lengths) :] == 0).all() for name, t in got.items() if per_token(name)), lengths


def test_several_blocks(device, configured):
    """Several blocks of K and of V: the same values."""
    b = batch(device, [40, 7], key=32, value=40, padding=5, gate=True)
    want = run(b, dtype=torch.float64, **SOFTPLUS)
    configured(chain_block=16, clear_block=16, column_block=16, product_block=16)
    assert_close(want, live(b, run(b, **SOFTPLUS)), torch.float32)


def test_changed_boundaries_are_noticed(device):
    b = batch(device, [20])
    q = b.q.requires_grad_()
    o, _ = chunk_kda(q, b.k, b.v, b.g, b.beta, cu_seqlens=b.cu)
    b.cu[1] = 5
    with pytest.raises(MetadataError):
        o.sum().backward()


@pytest.mark.parametrize("l2norm", [True, False])
def test_an_output_written_to_in_place_is_noticed(device, l2norm):
    """l2norm's gradient reads o: what is no longer o is refused, not used."""
    b = batch(device, [20])
    q = b.q.requires_grad_()
    o, _ = chunk_kda(q, b.k, b.v, b.g, b.beta, cu_seqlens=b.cu, use_qk_l2norm_in_kernel=l2norm)
    o.mul_(2)
    if not l2norm:
        o.sum().backward()
        assert torch.isfinite(q.grad).all()
        return
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        o.sum().backward()


@pytest.mark.parametrize("name", ["three value heads", "softplus gate, negative eigenvalues", "strong gates"])
def test_pairs_by_levels_in_task_loops(device, configured, name):
    """The form that Ascend runs, on any device: the same values, padding zero, whatever programs walk the tasks."""
    sizes, options = CASES[name]
    b = batch(device, **sizes)
    results = []
    for cores in (2, 7):
        configured(levels=True, cores=cores, span=0, tiles=False, column_block=16, pairs=torch.float32)
        results.append(run(b, **options))
    assert_same(*results)
    assert_close(run(b, dtype=torch.float64, **options), live(b, results[0]), torch.float32)
    for key, t in results[0].items():
        if per_token(key) and b.cu is not None:
            assert (t[:, b.total :] == 0).all(), key


SAFE_CASES = {
    f"safe, chunk {size}": (dict(lengths=[70, 23], padding=3, gate=True, key=40, group=2), {**SAFE, "chunk_size": size})
    for size in (32, 64)
}


@pytest.mark.parametrize("name", ["chunk 64", "dense, odd widths", "no l2norm", "bounded gate", *SAFE_CASES])
def test_half_precision_by_case(device, name):
    """Several column blocks and tiles, widths that are no whole blocks, both forms of pairs, on tensor cores."""
    sizes, options = (CASES | SAFE_CASES)[name]
    dtype = torch.bfloat16
    b = batch(device, **{**sizes, "dtype": dtype})
    if not options.get("use_qk_l2norm_in_kernel"):
        b.q, b.k = (torch.nn.functional.normalize(x.float(), dim=-1).to(dtype) for x in (b.q, b.k))
    got, want = run(b, **options), run(b, dtype=torch.float64, **options)
    scales = None
    if "dA_log" in want:
        z = (b.g[:, : b.total] if b.cu is not None else b.g).double() + b.dt_bias.double().view(-1, b.g.shape[-1])
        x = z if options.get("lower_bound") is not None else torch.nn.functional.softplus(z) / torch.sigmoid(z)
        scales = want["dg"] * x
        torch.testing.assert_close(scales.sum((0, 1, 3)), want["dA_log"])
    assert_close(want, live(b, got), dtype, scales=scales)
    for key, t in got.items():
        if per_token(key) and b.cu is not None:
            assert (t[:, b.total :] == 0).all(), key


@pytest.mark.parametrize("span", [1, 2])
def test_segments(device, configured, launches, span):
    """Sequences cut into segments: the same values, padding zero, one launch more each way; a bucket's choice alone."""
    configured(span=span, keep_tiles=False)
    b = batch(device, [40, 0, 101], padding=20, gate=True)
    launches.clear()
    got = run(b, **SOFTPLUS)
    assert len([n for n in launches if n != "chunk_tables_kernel"]) == 3 + 6, launches
    assert_close(run(b, dtype=torch.float64, **SOFTPLUS), live(b, got), torch.float32)
    for key, t in got.items():
        if per_token(key):
            assert (t[:, b.total :] == 0).all(), key
    assert_same(got, run(b, **SOFTPLUS, disable_recompute=True))


def test_later_tokens_change_nothing_across_segments(device, configured):
    configured(span=1)
    b = batch(device, [101])
    inputs = {n: getattr(b, n) for n in INPUTS}
    whole = chunk_kda(**inputs, cu_seqlens=b.cu, chunk_size=32, **NORMED)[0]
    for name in ROWS:
        getattr(b, name)[:, 70:] *= 0.5
    changed = chunk_kda(**inputs, cu_seqlens=b.cu, chunk_size=32, **NORMED)[0]
    assert torch.equal(whole[:, :70], changed[:, :70])
    assert not torch.equal(whole[:, 70:], changed[:, 70:])


def test_segments_follow_the_bucket():
    """A few long sequences are cut, in spans that a bucket's sizes fix; many sequences or heads are not."""
    bf16 = torch.bfloat16
    problem = lambda tokens, heads, n: autograd.Problem(1, tokens, heads, heads, 128, 128, n, 64, 1.0)  # noqa: E731
    span = lambda *sizes: launch.choose(problem(*sizes), "sm_90", bf16).span  # noqa: E731
    assert span(8192, 8, 1) == 16
    assert span(8192, 32, 1) == span(4096, 8, 32) == span(512, 8, 1) == 0


def test_two_graphs_of_one_shape_take_turns(device, capture):
    batches = [batch(device, [20, 13], gate=True, seed=seed) for seed in (0, 1)]
    wants = [run(b, **SOFTPLUS) for b in batches]
    graphs = [capture(lambda b=b: run(b, **SOFTPLUS, use_graph=True)) for b in batches]
    for turn in (0, 1, 1, 0):
        assert_same(wants[turn], graphs[turn].replay())


def test_two_calls_in_one_backward(device):
    batches = [batch(device, [20, 13], seed=seed) for seed in (0, 1)]
    leaves = [b.v.requires_grad_() for b in batches]
    call = lambda b: chunk_kda(b.q, b.k, b.v, b.g, b.beta, cu_seqlens=b.cu, chunk_size=32)[0].sum()  # noqa: E731
    alone = [torch.autograd.grad(call(b), v)[0] for b, v in zip(batches, leaves, strict=True)]
    together = torch.autograd.grad(call(batches[0]) + call(batches[1]), leaves)
    assert all(torch.equal(x, y) for x, y in zip(alone, together, strict=True))
