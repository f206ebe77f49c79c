"""q, k and v of a fused projection: convolved into tensors of their own without a copy, and their gradients back."""

from __future__ import annotations

import pytest
import torch

from graphsafe.errors import GraphSafeError
from graphsafe_kernels.layers import convolve as module
from graphsafe_kernels.layers.convolve import convolve
from graphsafe_kernels.providers import using
from graphsafe_kernels.tables import build_tables

NAN = float("nan")
TAPS, SEQUENCES = 4, [20, 0, 9, 3]
WIDTHS = {"equal": (8, 8, 8), "wide values": (8, 8, 24), "odd": (5, 5, 7), "blocks": (260, 260, 520)}
OTHERS = {"none": ((), (), 0), "gates": ((6, 3), (False, True), 2)}
"""Parts behind q, k and v, which are copied, and columns of no part."""


@pytest.fixture
def apart(monkeypatch):
    """Have columns copied and the public operator convolve."""
    return lambda: monkeypatch.setattr(module, "_in_place", lambda *_: False)


class Case:
    def __init__(self, device, widths, others, *, dtype=torch.float32, dense=False, states=True, padding=9):
        g = torch.Generator().manual_seed(0)

        def randn(*shape):
            return torch.randn(*shape, generator=g).to(device, dtype)

        self.widths, (self.others, self.copied, fill) = WIDTHS[widths], OTHERS[others]
        channels, columns = sum(self.widths), sum(self.widths) + sum(self.others) + fill
        live = sum(SEQUENCES)
        batch, tokens, sequences = (2, live, 2) if dense else (1, live + padding, len(SEQUENCES))
        self.projected = randn(batch, tokens, columns)
        self.weight, self.bias = randn(channels, TAPS), randn(channels)
        self.state, self.dstate = (randn(sequences, channels, TAPS) if states else None for _ in range(2))
        self.gradients = [randn(batch, tokens, w) for w in (*self.widths, *self.others)]
        self.live, self.layout = tokens if dense else live, {"cu_seqlens": None, "use_graph": True}
        if not dense:
            for t in (self.projected[..., :channels], *self.gradients[:3]):
                t[:, live:] = NAN
            # the gates' gradients come from operators that leave padding zero
            for t in self.gradients[3:]:
                t[:, live:] = 0
            cu = torch.tensor([0, *SEQUENCES], device=device).cumsum(0).int()
            t = build_tables(cu, tokens, 32)
            self.layout = {"cu_seqlens": cu, "use_graph": True, "max_num_seqs": len(SEQUENCES), "chunk_size": 32,
                           "chunk_indices": t.chunk_indices, "chunk_offsets": t.chunk_offsets}

    def forward(self, leaves=None):
        projected, weight, bias, state = leaves or (self.projected, self.weight, self.bias, self.state)
        return convolve(projected, self.widths, weight, bias, others=self.others, copied=self.copied,
                        initial_state=state, output_final_state=state is not None, layout=self.layout)

    def run(self):
        """Everything that is computed, outputs first."""
        leaves = [None if t is None else t.detach().requires_grad_()
                  for t in (self.projected, self.weight, self.bias, self.state)]
        y = self.forward(leaves)
        outputs = [y.q, y.k, y.v, *y.others, *([] if y.state is None else [y.state])]
        seeds = [*self.gradients, *([] if y.state is None else [self.dstate])]
        found = torch.autograd.grad(outputs, [t for t in leaves if t is not None], seeds)
        return [t.detach() for t in outputs], list(found)


def assert_same(found, wanted, case):
    """Bit for bit, but for the initial state's gradient: it is summed over taps by tiles, whose size differs."""
    pairs = [(a, b) for got, want in zip(found, wanted, strict=True) for a, b in zip(got, want, strict=True)]
    if case.state is not None:
        got, want = pairs.pop()
        torch.testing.assert_close(got, want)
    assert all(torch.equal(a, b) for a, b in pairs)


@pytest.mark.parametrize(("widths", "others", "kind"), [
    ("equal", "none", "packed"), ("wide values", "gates", "packed"), ("wide values", "none", "dense"),
    ("odd", "gates", "dense"), ("blocks", "gates", "stateless"),
])  # fmt: skip
def test_the_same_bits_as_with_columns_copied(device, apart, widths, others, kind):
    case = Case(device, widths, others, dense=kind == "dense", states=kind != "stateless")
    outputs, gradients = case.run()
    for t in outputs[:3]:
        assert t.is_contiguous()
        assert torch.count_nonzero(t[:, case.live :]) == 0
    assert torch.count_nonzero(gradients[0][:, case.live :]) == 0
    apart()
    assert_same((outputs, gradients), case.run(), case)


def test_a_narrow_dtype(device, apart):
    case = Case(device, "wide values", "gates", dtype=torch.bfloat16)
    found = case.run()
    apart()
    assert_same(found, case.run(), case)


def test_one_launch_convolves_and_nothing_is_copied_for_it(device, launches):
    """Beside it one launch copies the small gates; in the backward one adds the others' gradients."""
    case = Case(device, "wide values", "gates")
    apart = device.type == "npu"
    leaves = [t.detach().requires_grad_() for t in (case.projected, case.weight, case.bias, case.state)]
    launches.clear()
    y = case.forward(leaves)
    assert sorted(launches) == ["columns_kernel"] * (1 + apart) + ["conv_forward_kernel"]
    launches.clear()
    torch.autograd.grad([y.q, y.k, y.v, *y.others, y.state], leaves, [*case.gradients, case.dstate])
    assert sorted(launches) == ["columns_kernel"] * (1 + apart) + ["conv_backward_kernel", "conv_reduce_kernel"]
    inside = [t.untyped_storage().data_ptr() == case.projected.untyped_storage().data_ptr() for t in y.others]
    assert inside == [True, False]


def test_a_gradient_that_is_missing_is_zero(device):
    case = Case(device, "equal", "gates", states=False)
    leaf = case.projected.detach().requires_grad_()
    y = case.forward((leaf, case.weight, None, None))
    case.gradients[1][:, case.live :] = 0
    (got,) = torch.autograd.grad(y.k, leaf, case.gradients[1])
    q, k, _ = WIDTHS["equal"]
    assert torch.count_nonzero(got[..., :q]) == torch.count_nonzero(got[..., q + k :]) == 0
    assert torch.count_nonzero(got[:, : case.live, q : q + k]) > 0


def test_what_is_wrong_is_refused_by_name(device):
    case = Case(device, "equal", "none")
    case.state = case.state[:1]
    with pytest.raises(GraphSafeError, match="initial_state"):
        case.forward()
    case = Case(device, "equal", "none")
    leaf = case.projected.detach().requires_grad_()
    y = case.forward((leaf, case.weight, None, None))
    case.layout["cu_seqlens"][1] = 2
    with pytest.raises(GraphSafeError, match="cu_seqlens"):
        torch.autograd.grad(y.q, leaf, case.gradients[0])


def test_another_provider_of_the_convolution_serves_it(device, launches):
    case = Case(device, "equal", "none")
    with using("reference", "causal_conv1d"):
        launches.clear()
        y = case.forward()
        assert "conv_forward_kernel" not in launches
    assert torch.allclose(y.q, case.forward().q, rtol=1e-4, atol=1e-5)
