"""Programs that do inside a capture what a graph cannot hold (rules GS1xx, and GS304)."""

from __future__ import annotations

import random
import tempfile
import threading

import numpy
import torch
from broken_programs import bodies, capture, case, data, leaf
from torch.utils.checkpoint import checkpoint

import graphsafe as gs
from graphsafe.testing.layouts import boundaries

# Host reads.


@case("host-read", gs.UnsupportedError)
def item(rt):
    x = data(rt, 4)

    def breaking():
        return x * x.sum().item()  # BREAKS

    return bodies(rt, breaking, lambda: x * x.sum())


@case("host-read", gs.UnsupportedError)
def tolist(rt):
    cu = boundaries([3, 4], device=rt.device)
    x = data(rt, 7)

    def breaking():
        lengths = cu.diff().tolist()  # BREAKS
        return [part.sum() for part in x.split(lengths)]

    def twin():
        sequence = torch.searchsorted(cu[1:].contiguous(), torch.arange(7, device=rt.device).int(), right=True)
        return torch.zeros(2, device=rt.device).scatter_add(0, sequence, x)

    return bodies(rt, breaking, twin)


@case("host-read", gs.UnsupportedError)
def numpy_view(rt):
    x = data(rt, 4)

    def breaking():
        return x * float(x.detach().numpy(force=True).max())  # BREAKS

    return bodies(rt, breaking, lambda: x * x.max())


@case("host-read", gs.UnsupportedError, devices=("cpu",))
def numpy_conversion(rt):
    x = data(rt, 4)

    def breaking():
        numpy.asarray(x)  # BREAKS
        return x * 2

    return bodies(rt, breaking, lambda: x * 2)


@case("host-read", gs.UnsupportedError)
def copy_to_the_host(rt):
    x = data(rt, 4)

    def breaking():
        return x.cpu() * 2  # BREAKS

    return bodies(rt, breaking, lambda: x.to(rt.device) * 2)


@case("host-read", gs.UnsupportedError)
def printing(rt):
    x = data(rt, 4)

    def breaking():
        print("x is", x)  # BREAKS
        return x * 2

    def twin():
        print("x has", x.shape, x.dtype, x.device)
        return x * 2

    return bodies(rt, breaking, twin)


@case("host-read", gs.UnsupportedError)
def formatting(rt):
    x = data(rt, 4)

    def breaking():
        message = f"norm {x.norm():.3f}"  # BREAKS
        return x * len(message)

    return bodies(rt, breaking, lambda: x * len(f"shape {tuple(x.shape)}"))


@case("host-read", gs.UnsupportedError)
def truth_value(rt):
    x = data(rt, 4)

    def breaking():
        if (x > 0).all():  # BREAKS
            return x
        return -x

    return bodies(rt, breaking, lambda: torch.where((x > 0).all(), x, -x))


@case("host-read", gs.UnsupportedError)
def assertion(rt):
    x = data(rt, 4)

    def breaking():
        assert torch.isfinite(x).all(), "not finite"  # BREAKS
        return x * 2

    def twin():
        assert x.dim() == 1
        return x * 2

    return bodies(rt, breaking, twin)


@case("host-read", gs.UnsupportedError)
def as_int(rt):
    x = data(rt, 4)

    def breaking():
        return x * int(x.abs().sum())  # BREAKS

    return bodies(rt, breaking, lambda: x * x.abs().sum().floor())


@case("host-read", gs.UnsupportedError)
def as_float(rt):
    x = data(rt, 4)

    def breaking():
        return x * float(x.max())  # BREAKS

    return bodies(rt, breaking, lambda: x * x.max())


@case("host-read", gs.UnsupportedError)
def as_index_of_a_list(rt):
    x = data(rt, 3)

    def breaking():
        return x * [1.0, 2.0, 3.0][x.argmax()]  # BREAKS

    choices = torch.tensor([1.0, 2.0, 3.0]).to(rt.device)
    return bodies(rt, breaking, lambda: x * choices.index_select(0, x.argmax(0, keepdim=True)))


@case("host-read", gs.UnsupportedError)
def as_end_of_a_slice(rt):
    cu = boundaries([3, 4], device=rt.device, sequences=4)
    x = data(rt, 9)

    def breaking():
        return x[: cu[-1]] * 2  # BREAKS

    def twin():
        return torch.where(torch.arange(9, device=rt.device) < cu[-1], x * 2, 0 * x)

    return bodies(rt, breaking, twin)


@case("host-read", gs.UnsupportedError)
def membership(rt):
    x = data(rt, 4)

    def breaking():
        return x * 2 if 1.0 in x else x  # BREAKS

    return bodies(rt, breaking, lambda: torch.where((x == 1.0).any(), x * 2, x))


@case("host-read", gs.UnsupportedError)
def equality(rt):
    x = data(rt, 4)

    def breaking():
        return x * 2 if torch.equal(x, x) else x  # BREAKS

    return bodies(rt, breaking, lambda: torch.where((x == x).all(), x * 2, x))


@case("host-read", gs.UnsupportedError)
def split_by_a_tensor(rt):
    x, cuts = data(rt, 6), torch.tensor([2, 4])

    def breaking():
        return torch.tensor_split(x, cuts)  # BREAKS

    return bodies(rt, breaking, lambda: torch.tensor_split(x, (2, 4)))


@case("host-read", gs.UnsupportedError)
def inside_a_backward(rt):
    w, x = leaf(rt, 4), data(rt, 4)

    class Reads(torch.autograd.Function):
        @staticmethod
        def forward(ctx, w):
            return w * 2

        @staticmethod
        def backward(ctx, grad):
            return grad * grad.sum().item()  # BREAKS

    def trains(function):
        def body():
            w.grad.zero_()
            (function(w) * x).sum().backward()
            return w.grad

        return body

    return bodies(rt, trains(Reads.apply), trains(lambda w: w * 2))


@case("host-read", gs.UnsupportedError)
def inside_a_module_hook(rt):
    x = data(rt, 2, 3)
    watched, plain = (torch.nn.Linear(3, 3).to(rt.device).requires_grad_(False) for _ in range(2))

    def hook(module, inputs, output):
        return output / output.abs().max().item()  # BREAKS

    watched.register_forward_hook(hook)
    plain.register_forward_hook(lambda module, inputs, output: output / output.abs().max())
    return bodies(rt, lambda: watched(x), lambda: plain(x))


@case("host-read", gs.UnsupportedError)
def swallowed(rt):
    x = data(rt, 4)

    def breaking():
        try:
            scale = x.sum().item()  # BREAKS
        except Exception:
            scale = 1.0
        return x * scale

    return bodies(rt, breaking, lambda: x * 1.0)


@case("host-read", gs.UnsupportedError)
def inside_an_optimizer(rt):
    def step(**options):
        model = torch.nn.Linear(3, 2).to(rt.device)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        if options:
            optimizer.register_step_pre_hook(lambda *_: print(model.weight.grad.norm()))
        return gs.TrainStep(model, lambda m, x: m(x).square().mean(), optimizer, runtime=rt)

    x = data(rt, 4, 3)
    breaking = step(reads=True)
    return lambda: breaking(x), lambda: step()(x)  # BREAKS

# Shapes.


@case("data-dependent-shape", gs.UnsupportedError)
def nonzero(rt):
    x = data(rt, 6)

    def breaking():
        return x[(x > 0).nonzero().squeeze(1)].sum()  # BREAKS

    return bodies(rt, breaking, lambda: torch.where(x > 0, x, 0 * x).sum())


@case("data-dependent-shape", gs.UnsupportedError)
def masked_select(rt):
    x = data(rt, 6)

    def breaking():
        return x.masked_select(x > 0).sum()  # BREAKS

    return bodies(rt, breaking, lambda: x.masked_fill(x <= 0, 0.0).sum())


@case("data-dependent-shape", gs.UnsupportedError)
def boolean_index(rt):
    x = data(rt, 6)

    def breaking():
        return x[x > 0].sum()  # BREAKS

    return bodies(rt, breaking, lambda: (x * (x > 0)).sum())


@case("data-dependent-shape", gs.UnsupportedError)
def boolean_assignment(rt):
    x, new = data(rt, 6), data(rt, 6)

    def breaking():
        y = x.clone()
        y[x > 0] = new[:positive]  # BREAKS
        return y

    positive = int((x > 0).sum())
    return bodies(rt, breaking, lambda: torch.where(x > 0, new, x))


@case("data-dependent-shape", gs.UnsupportedError)
def unique(rt):
    x = data(rt, 6)

    def breaking():
        return x.unique().sum()  # BREAKS

    return bodies(rt, breaking, lambda: x.sort().values.sum())


@case("data-dependent-shape", gs.UnsupportedError)
def repeats_without_a_size(rt):
    x, repeats = data(rt, 3), torch.tensor([1, 0, 2]).to(rt.device)

    def breaking():
        return x.repeat_interleave(repeats)  # BREAKS

    return bodies(rt, breaking, lambda: x.repeat_interleave(repeats, output_size=3))

# Host data.


@case("host-data", gs.UnsupportedError)
def tensor_of_a_list(rt):
    x = data(rt, 2)

    def breaking():
        return x + torch.tensor([1.0, 2.0], device=rt.device)  # BREAKS

    made = torch.tensor([1.0, 2.0], device=rt.device)
    return bodies(rt, breaking, lambda: x + made)


@case("host-data", gs.UnsupportedError)
def as_tensor_of_a_list(rt):
    x = data(rt, 2)

    def breaking():
        return x + torch.as_tensor([1.0, 2.0], device=rt.device)  # BREAKS

    return bodies(rt, breaking, lambda: x + torch.as_tensor(x))


@case("host-data", gs.UnsupportedError)
def tensor_of_an_array(rt):
    x, array = data(rt, 2), numpy.ones(2, dtype=numpy.float32)

    def breaking():
        return x + torch.from_numpy(array).to(rt.device)  # BREAKS

    made = torch.from_numpy(array).to(rt.device)
    return bodies(rt, breaking, lambda: x + made)


@case("host-data", gs.UnsupportedError)
def array_as_an_argument(rt):
    x, array = data(rt, 2), numpy.ones(2)
    call = gs.graphed(lambda x, table: x * float(table[0]), runtime=rt)
    breaking = lambda: call(x, array)  # noqa: E731  # BREAKS
    return breaking, lambda: call(x, [1.0, 2.0])

# Random numbers.


@case("unregistered-generator", gs.UnsupportedError)
def generator_of_ones_own(rt):
    own, known = torch.Generator(rt.device), torch.Generator(rt.device)
    rt.register_generator(known)

    def breaking():
        return torch.rand(3, device=rt.device, generator=own)  # BREAKS

    return bodies(rt, breaking, lambda: torch.rand(3, device=rt.device, generator=known))


@case("rng-state", gs.UnsupportedError)
def seeding(rt):
    def breaking():
        torch.manual_seed(0)  # BREAKS
        return torch.rand(3, device=rt.device)

    def twin():
        torch.manual_seed(0)
        capture(rt, lambda: torch.rand(3, device=rt.device))

    return lambda: capture(rt, breaking), twin


@case("rng-state", gs.UnsupportedError)
def checkpoint_that_keeps_the_rng(rt):
    w, x = leaf(rt, 4), data(rt, 4)

    def trains(preserve):
        def body():
            w.grad.zero_()
            y = checkpoint(lambda v: (v * w).sin(), x, use_reentrant=False, preserve_rng_state=preserve)  # BREAKS
            y.sum().backward()
            return w.grad

        return body

    return bodies(rt, trains(True), trains(False))


@case("host-randomness", gs.MetadataError)
def python_random(rt):
    x = data(rt, 4)

    def breaking():
        return x * random.random()  # BREAKS

    return bodies(rt, breaking, lambda: x * torch.rand(1, device=rt.device))


@case("host-randomness", gs.MetadataError)
def numpy_random(rt):
    x = data(rt, 4)

    def breaking():
        return x * float(numpy.random.uniform())  # BREAKS

    return bodies(rt, breaking, lambda: x * torch.rand(1, device=rt.device))

# Work that is not recorded.


@case("other-device", gs.UnsupportedError)
def copy_to_another_device(rt):
    x = data(rt, 4)

    def breaking():
        return x.to("meta")  # BREAKS

    return bodies(rt, breaking, lambda: x.to(rt.device))


@case("other-device", gs.UnsupportedError)
def copy_into_another_device(rt):
    x, other, own = data(rt, 4), torch.empty(4, device="meta"), torch.empty(4, device=rt.device)

    def breaking():
        other.copy_(x)  # BREAKS

    return bodies(rt, breaking, lambda: own.copy_(x))


@case("not-capturable", gs.UnsupportedError)
def work_in_a_thread(rt):
    x = data(rt, 4)

    def breaking():
        thread = threading.Thread(target=lambda: x.mul_(2))
        thread.start()  # BREAKS
        thread.join()
        return x + 1

    return bodies(rt, breaking, lambda: x.mul_(2) + 1)


@case("not-capturable", gs.UnsupportedError, devices=("cpu", "cuda"))
def sparse(rt):
    x = data(rt, 4)

    def breaking():
        return x.relu().to_sparse()  # BREAKS

    return bodies(rt, breaking, lambda: x.relu())


# Other ranks.


@case("collective", gs.DistributedError)
def collective(rt):
    x = data(rt, 4)
    distributed = torch.distributed

    def one_rank(body):
        def run():
            with tempfile.TemporaryDirectory() as folder:
                store = distributed.FileStore(f"{folder}/store", 1)
                distributed.init_process_group("gloo", store=store, rank=0, world_size=1)
                try:
                    with rt.capture() as graph:
                        graph.outputs(body())
                finally:
                    distributed.destroy_process_group()

        return run

    def breaking():
        y = x * 2
        distributed.all_reduce(y)  # BREAKS
        return y

    def twin():
        distributed.get_rank()
        return x * 2

    return one_rank(breaking), one_rank(twin)
