"""Models of ``transformers`` on these operators: equal to themselves, sample by sample; what cannot be is named.

``test_transformers_captured.py`` captures them.
"""

from __future__ import annotations

import copy

import pytest
import torch
from tiny_models import MODELS, VOCABULARY, batch, make

import graphsafe as gs
from graphsafe.errors import GraphSafeError
from graphsafe_kernels.integrations import adapt

LENGTHS = [5, 0, 70, 3]
each_model = pytest.mark.parametrize("name", MODELS)


def gradients(model, loss):
    return dict(zip(dict(model.named_parameters()), torch.autograd.grad(loss, list(model.parameters()),
                                                                        allow_unused=True), strict=True))


@each_model
def test_a_packed_batch_equals_the_unmodified_model_sample_by_sample(runtime, name):
    """Logits, loss and every gradient; the state dict is unchanged, and calls without boundaries do what they did."""
    original, model = (make(name).to(runtime.device) for _ in range(2))
    assert adapt(model) is model
    before, after = original.state_dict(), model.state_dict()
    assert list(before) == list(after)
    assert all(torch.equal(after[k], v) for k, v in before.items())

    ids, cu = batch(LENGTHS, runtime.device)
    samples = [s for s in ids.split(LENGTHS, 1) if s.shape[1]]
    want = torch.cat([original(input_ids=s, use_cache=False).logits for s in samples], 1)
    got = model(input_ids=ids, cu_seqlens=cu)
    assert got.past_key_values is None
    assert torch.allclose(got.logits, want, rtol=1e-4, atol=2e-5)

    weight = torch.randn(want.shape, generator=torch.Generator().manual_seed(1)).to(runtime.device)
    expected = gradients(original, (want * weight).sum())
    for key, g in gradients(model, (got.logits * weight).sum()).items():
        w = expected[key]
        assert (g is None) == (w is None), key
        assert w is None or (g - w).norm() <= 2e-3 * w.norm() + 1e-5, key

    with torch.no_grad():
        dense = torch.randint(VOCABULARY, (2, 9)).to(runtime.device)
        mask = torch.ones(2, 9, dtype=torch.long, device=runtime.device)
        mask[0, :4] = 0
        for arguments in ({"use_cache": False}, {"attention_mask": mask}, {}):
            a, b = (m(input_ids=dense, **arguments).logits for m in (model, original))
            assert torch.allclose(a[:, 4:], b[:, 4:], rtol=1e-4, atol=2e-5), arguments


@pytest.mark.parametrize("name", ["kimi-linear", "qwen3-next"])
def test_nan_behind_the_live_tokens_reaches_neither_logits_nor_gradients(name, request):
    """TransformerEngine 2898, through a whole model: embeddings whose padding rows hold NaN."""
    model = adapt(make(name))
    x, cu = torch.randn(1, 50, 32), torch.tensor([0, 20, 41])
    results = []
    # torch's own adding up of gathered experts' gradients takes any order unless told
    torch.use_deterministic_algorithms(True)
    request.addfinalizer(lambda: torch.use_deterministic_algorithms(False))
    for fill in (0.0, float("nan")):
        leaf = torch.cat([x[:, :41], torch.full((1, 9, 32), fill)], 1).requires_grad_()
        logits = model(inputs_embeds=leaf, cu_seqlens=cu).logits
        used = [p for n, p in model.named_parameters() if "embed" not in n]
        grads = torch.autograd.grad(logits.square().sum(), [leaf, *used], allow_unused=True)
        results.append([logits.detach(), *(g for g in grads if g is not None)])
    assert len(results[0]) > 10
    assert torch.count_nonzero(results[0][1][:, 41:]) == 0, "though the loss counts padding rows' logits"
    assert all(torch.isfinite(t).all() for t in results[1])
    assert all(torch.equal(a, b) for a, b in zip(*results, strict=True))


def test_lint_names_what_a_model_does_on_the_host_and_finds_it_gone():
    """The cache and the choice of experts; after ``adapt`` nothing is left, over two layouts."""
    model = make("qwen3-next", experts_implementation="eager")
    ids, cu = batch([5, 30, 7])
    report = gs.lint(lambda: model(input_ids=ids).logits)
    found = {(f.rule.name, f.where.file.rsplit("/", 1)[-1]) for f in report.findings}
    assert ("host-data", "cache_utils.py") in found
    assert any(file == "modeling_qwen3_next.py" for _, file in found), found
    adapt(model)
    report = gs.lint(lambda ids, cu_seqlens: model(input_ids=ids, cu_seqlens=cu_seqlens).logits, ids, cu)
    assert report.clean, str(report)


REFUSED = {
    "attention_mask": torch.ones(1, 8, dtype=torch.long),
    "past_key_values": object(),
    "use_cache": True,
    "output_attentions": True,
    "output_router_logits": True,
}


@pytest.mark.parametrize("keyword", REFUSED)
def test_what_a_packed_call_cannot_hold_is_refused_by_name(adapted, keyword):
    ids, cu = batch([3, 5])
    with pytest.raises(GraphSafeError, match=keyword) as caught:
        adapted(input_ids=ids, cu_seqlens=cu, **{keyword: REFUSED[keyword]})
    assert caught.value.rule.name == "unsupported"


@pytest.fixture(scope="module")
def adapted():
    return adapt(make("qwen3-next"))


@pytest.mark.parametrize(("text", "arguments"), [
    (r"\[1, T\]", {"input_ids": torch.zeros(2, 4, dtype=torch.long)}),
    ("tables is tuple", {"cu_seqlens": None, "tables": ()}),
    ("use_graph=True and no cu_seqlens", {"cu_seqlens": None, "use_graph": True}),
    ("cu_seqlens", {"cu_seqlens": torch.zeros(2)}),
])  # fmt: skip
def test_wrong_arguments_are_refused(adapted, text, arguments):
    ids, cu = batch([3, 5])
    with pytest.raises(GraphSafeError, match=text) as caught:
        adapted(**{"input_ids": ids, "cu_seqlens": cu} | arguments)
    assert caught.value.rule.name in ("argument", "tables")


def test_models_that_decide_on_the_host_are_refused_when_they_are_adapted():
    with pytest.raises(GraphSafeError, match="no layer that can be adapted"):
        adapt(torch.nn.Linear(2, 2))
    rope = {"rope_type": "dynamic", "rope_theta": 10000.0, "factor": 2.0, "partial_rotary_factor": 0.25}
    with pytest.raises(GraphSafeError, match="dynamic") as caught:
        adapt(make("qwen3-next", rope_parameters=rope))
    assert caught.value.rule.name == "unsupported"
    with pytest.raises(GraphSafeError, match="gelu"):
        adapt(make("qwen3-next", hidden_act="gelu"))
    model = make("qwen3.5")
    model.gradient_checkpointing_enable()
    with pytest.raises(GraphSafeError, match="checkpoint"):
        adapt(model)


def test_generation_goes_on_and_copies_are_models_of_their_own(adapted):
    ids, cu = batch([3, 5])
    twin = copy.deepcopy(adapted)
    with torch.no_grad():
        want = make("qwen3-next").generate(ids, max_new_tokens=5, do_sample=False)
        assert torch.equal(adapted.generate(ids, max_new_tokens=5, do_sample=False), want)
        before = adapted(input_ids=ids, cu_seqlens=cu).logits
        for p in twin.parameters():
            p.zero_()
        assert torch.count_nonzero(twin(input_ids=ids, cu_seqlens=cu).logits) == 0
        assert torch.equal(adapted(input_ids=ids, cu_seqlens=cu).logits, before)
