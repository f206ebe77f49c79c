"""What only the CPU runtime sees or does: its tape, raw addresses, generators' methods, compilers."""

from __future__ import annotations

import copy
import gc

import pytest
import torch
from torch.testing._internal.two_tensor import TwoTensor

import graphsafe as gs
from graphsafe.testing.suite.checks import Worker, captured, refused
from graphsafe_cpu.memory import live_bytes

rt = gs.get_runtime("cpu")


def capture(body):
    with rt.capture() as graph:
        graph.outputs(body())
    return graph


def test_views_and_uninitialised_memory_cost_nothing_at_replay():
    x = torch.ones(4, 4)
    graph = capture(lambda: (x.t()[1:].detach(), torch.empty(3), x.expand(2, 4, 4)))
    assert graph.launches == 0
    assert capture(lambda: (x * 2).view(16) + 1).launches == 2


def test_marks_of_a_profiler_are_no_launches():
    x = torch.ones(4)

    def body():
        with torch.profiler.record_function("mark"):
            return x * 2

    assert capture(body).launches == 1
    assert captured(rt, body)[0].tape.names() == ["aten::mul.Tensor"]


def test_an_assertion_on_the_device_is_replayed():
    x = torch.ones(4)
    graph = capture(lambda: torch._assert_async((x > 0).all()))
    graph.replay()
    x.fill_(-1)
    with pytest.raises(RuntimeError, match="Expected Tensor with single nonzero value"):
        graph.replay()


@pytest.mark.parametrize(
    "hand_out", [torch.Tensor.data_ptr, lambda x: x.__dlpack__(), torch.from_dlpack], ids=["data_ptr", "dlpack", "from"]
)
def test_raw_addresses_are_refused_since_work_on_them_is_no_operator(hand_out):
    x = torch.ones(4)
    problem = refused("not-capturable", capture, lambda: hand_out(x))
    assert "raw address" in problem.what


@pytest.mark.parametrize("when", ["before the last draw", "after the last draw"])
@pytest.mark.parametrize("how", ["manual_seed", "set_state"])
def test_methods_of_a_generator_are_seen(when, how):
    generator = torch.Generator().manual_seed(7)
    rt.register_generator(generator)
    state = torch.Generator().manual_seed(8).get_state()

    def body():
        first = torch.rand(2, generator=generator)
        generator.manual_seed(7) if how == "manual_seed" else generator.set_state(state)
        return first + torch.rand(2, generator=generator) if when == "before the last draw" else first

    before = generator.get_state()
    refused("rng-state", capture, body)
    assert torch.equal(generator.get_state(), before)


def test_a_custom_operator_that_draws_is_followed():
    @torch.library.custom_op("graphsafe_test_cpu::noise", mutates_args=())
    def noise(x: torch.Tensor) -> torch.Tensor:
        return x + torch.randn(x.shape)

    call = gs.graphed(lambda x: noise(x) * torch.rand(3), runtime=rt)
    call.verify(torch.ones(3))


@pytest.mark.parametrize("warm", [False, True], ids=["cold", "warm"])
def test_a_compiled_function_is_refused_by_name_and_works_afterwards(warm):
    compiled = torch.compile(lambda x: x * 2 + 1, backend="eager")
    x = torch.ones(3)
    if warm:
        compiled(x)
    with pytest.raises(gs.UnsupportedError, match=r"torch\.compile") as caught:
        capture(lambda: compiled(x))
    assert caught.value.rule.name == "cold-kernel"
    assert torch.equal(compiled(x), torch.full((3,), 3.0))


@pytest.mark.parametrize("how", ["warm-up", "refused", "unguarded"])
def test_a_compiled_function_stays_compiled(how):
    """Called under a mode of its own, torch would run it as it was written for the rest of the process."""
    runs = []

    def backend(module, _):
        return lambda *args: runs.append(1) or module(*args)

    compiled, x = torch.compile(lambda x: x * 2 + 1, backend=backend), torch.ones(3)
    compiled(x)
    if how == "warm-up":
        gs.get_runtime("cpu").warm_up(lambda: compiled(x))
    elif how == "refused":
        with pytest.raises(gs.UnsupportedError, match=r"torch\.compile"):
            capture(lambda: compiled(x))
    else:
        with gs.get_runtime("cpu").capture(guard="off") as graph:
            graph.outputs(compiled(x))
    assert len(runs) == 1
    compiled(x)
    assert len(runs) == 2


def test_a_watch_of_compiled_functions_leaves_them_compiled():
    """What a device's capture without guard has."""
    from graphsafe._state import SavedState
    from graphsafe._watch import Watch

    runs = []

    def backend(module, _):
        return lambda *args: runs.append(1) or args[0]

    compiled, x = torch.compile(lambda x: x * 2 + 1, backend=backend), torch.ones(3)
    compiled(x)
    with Watch(torch.device("cpu"), check=False, saved=SavedState(), compiled=True).active():
        compiled(x)
    assert len(runs) == 2


def test_what_torch_keeps_from_its_compiler_is_captured():
    """What torch.compiler.disable wraps goes through the same code of torch as a compiled function."""
    torch.compile(lambda x: x, backend="eager")  # loads the compiler
    x = torch.ones(3)
    result = []
    graph = capture(lambda: result.append(torch.compiler.disable(lambda: x * 2)()) or result[0])
    x.fill_(5)
    graph.replay()
    assert torch.equal(result[0], torch.full((3,), 10.0))


def test_a_shape_that_an_operator_hides_is_found_at_the_replay():
    x, lengths = torch.ones(2, 4, 1), torch.tensor([4, 2])
    graph = capture(lambda: torch.nn.utils.rnn.pack_padded_sequence(x, lengths, batch_first=True).data * 1)
    graph.replay()
    lengths.fill_(1)
    refused("data-dependent-shape", graph.replay)


@pytest.mark.parametrize(
    "make",
    [
        lambda x: x.to_sparse(), lambda x: x.view(2, 2).to_sparse_csr(), lambda x: torch.nested.nested_tensor([x, x]),
        lambda x: torch.quantize_per_tensor(x, 0.1, 0, torch.quint8), lambda x: TwoTensor(x, x),
    ],
    ids=["sparse", "csr", "nested", "quantized", "subclass"],
)  # fmt: skip
@pytest.mark.filterwarnings("ignore")
def test_tensors_without_one_storage_are_refused(make):
    x = torch.ones(4)
    outside = make(x)
    refused("not-capturable", capture, lambda: make(x) * 1)
    refused("not-capturable", capture, lambda: outside * 1)
    refused("not-capturable", gs.graphed(lambda x: x, runtime=rt), outside)


def test_a_subclass_with_one_storage_is_a_tensor():
    class Named(torch.Tensor):
        pass

    call = gs.graphed(lambda x: x * 2, runtime=rt)
    for value in (1.0, 3.0):
        assert call(torch.full((2,), value).as_subclass(Named)).tolist() == [2 * value] * 2
    refused("host-read", capture, lambda: torch.ones(2).as_subclass(Named).sum().item())


def test_modules_copied_inside_belong_to_the_graph():
    linear, x = torch.nn.Linear(3, 3), torch.ones(2, 3)
    with rt.capture() as graph:
        y = copy.deepcopy(linear)(x)
    with torch.no_grad():
        linear.weight.mul_(2)
    graph.replay()
    assert torch.equal(y, linear(x))


def test_host_memory_wrapped_inside_has_died_at_the_replay():
    x, memory = torch.ones(2), bytearray(8)
    graph = capture(lambda: x + torch.frombuffer(memory, dtype=torch.float32))
    refused("input-died", graph.replay)


def test_ambient_modes_do_not_hide_a_rule():
    x = torch.ones(4)
    with torch.device("cpu"):
        refused("host-read", capture, lambda: x.sum().item())
        graph, y = captured(rt, lambda: x + torch.ones(4))
    x.fill_(2.0)
    graph.replay()
    assert y.tolist() == [3.0] * 4
    for context in (torch.no_grad(), torch.inference_mode(), torch.autocast("cpu", torch.bfloat16)):
        with context:
            refused("host-read", capture, lambda: x.sum().item())


def test_a_replay_inside_other_modes_is_the_same():
    x = torch.ones(4)
    graph, y = captured(rt, lambda: (x @ x.view(4, 1)).exp())
    graph.replay()
    want = y.clone()
    for context in (torch.no_grad(), torch.inference_mode(), torch.autocast("cpu", torch.bfloat16)):
        graph.poison()
        with context:
            graph.replay()
        assert torch.equal(y, want)


def test_live_bytes_count_each_storage_once():
    gc.collect()
    before = live_bytes()
    x = torch.zeros(1000)
    views = [x[i:] for i in range(5)]
    assert live_bytes() - before == 4000
    del x, views
    assert live_bytes() == before


def test_an_event_that_was_not_recorded_is_refused():
    first, second = rt.event(), rt.event()
    refused("out-of-order", first.elapsed_time, second)
    first.record()
    second.record()
    assert first.elapsed_time(second) >= 0


def test_the_peak_is_the_most_that_was_seen():
    held = torch.zeros(100_000)
    most = rt.memory().held
    del held
    figures = rt.memory()
    assert figures.held < most <= figures.peak


def test_code_that_asks_whether_a_stream_is_captured_is_answered():
    answers = []
    x = torch.ones(2)

    def body():
        answers.append((torch.cuda.is_current_stream_capturing(), rt.capturing))
        return x + 1

    before = torch.cuda.is_current_stream_capturing
    rt.warm_up(body)
    elsewhere = []
    worker = Worker(lambda: elsewhere.append((torch.cuda.is_current_stream_capturing(), rt.capturing)))
    with rt.capture() as graph:
        graph.outputs(body())
        assert worker.result() is None
    assert answers == [(False, False), (True, True)]
    assert elsewhere == [(False, False)]
    assert torch.cuda.is_current_stream_capturing is before
    assert not rt.capturing
