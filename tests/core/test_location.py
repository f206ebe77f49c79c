"""The caller's line is found behind this project, torch, triton, pytest and the standard library's wrappers."""

from __future__ import annotations

import _thread
import contextlib
import functools
import sys
import threading

import torch

import graphsafe
from graphsafe._location import Location, caller, is_internal


def line():
    return sys._getframe(1).f_lineno


def test_the_innermost_frame_of_the_caller():
    here, expected = caller(), line()
    assert here == Location(__file__, expected, "test_the_innermost_frame_of_the_caller")
    assert str(here) == f"{__file__}:{expected} in test_the_innermost_frame_of_the_caller"


def test_torchs_frames_are_passed_over():
    found = []

    class Module(torch.nn.Module):
        def forward(self, x):
            found.append((caller(), line()))
            return x

    Module()(torch.ones(1))
    (here, expected), = found
    assert (here.file, here.line, here.function) == (__file__, expected, "forward")


def test_a_hook_called_by_torch_leads_back_to_the_callers_line():
    found = []
    w = torch.ones(1, requires_grad=True)
    w.register_hook(lambda grad: found.append(caller()))
    (w * 2).sum().backward()
    assert found[0].function == "<lambda>"


def test_wrappers_of_the_standard_library_are_passed_over():
    @contextlib.contextmanager
    def block():
        yield caller()

    @functools.wraps(block)
    def wrapped():
        with block() as inner:
            return inner

    assert wrapped().function == "block"
    assert functools.partial(caller)().function == "test_wrappers_of_the_standard_library_are_passed_over"


def test_code_without_a_file_is_still_the_callers():
    scope = {"caller": caller, "__name__": "notebook"}
    exec(compile("found = caller()", "<cell 3>", "exec"), scope)
    assert scope["found"] == Location("<cell 3>", 1, "<module>")


def test_a_thread_of_the_caller_has_lines_of_its_own():
    found = []
    thread = threading.Thread(target=lambda: found.append(caller()))
    thread.start()
    thread.join()
    assert found[0].file == __file__


def test_where_there_is_no_line_of_a_caller_there_is_none():
    found = []
    scope = {"__name__": "graphsafe.made_up", "caller": caller, "found": found}
    exec(compile("def run(): found.append(caller())", "made_up.py", "exec"), scope)
    thread = threading.Thread(target=scope["run"])
    thread.start()
    thread.join()
    assert found == [None]
    assert "no line of the caller" in str(graphsafe.GraphSafeError(graphsafe.rules.rule("GS101"), "x", where=None))


def test_what_is_internal():
    for module in ("graphsafe", "graphsafe.base", "graphsafe_cpu.tape", "torch.nn.modules.linear", "triton.language",
                   "graphsafe_kernels.gdn.op", "contextlib", "functools", "threading"):  # fmt: skip
        assert is_internal(module, "x.py"), module
    for module in ("graphsafe.testing.suite.rules", "graphsafe.cli.app", "graphsafe.demo.model", "graphsafe_user",
                   "torchvision.models", "my.torch", "__main__", ""):  # fmt: skip
        assert not is_internal(module, "x.py"), module
    assert is_internal("_pytest.python", "/site-packages/_pytest/python.py")
    assert is_internal("anything", "<frozen importlib._bootstrap>")


def test_a_thread_of_autograd_is_told_by_the_line_that_waits_for_it():
    found, done = [], threading.Event()
    names = {"__name__": "torch.autograd.stand_in", "caller": caller, "found": found, "done": done}
    exec("def work():\n    found.append(caller())\n    done.set()\n", names)
    _thread.start_new_thread(names["work"], ())
    done.wait(60)
    (where,) = found
    assert where.file == __file__
    assert where.function == "test_a_thread_of_autograd_is_told_by_the_line_that_waits_for_it"
    known = threading.Thread(target=names["work"])
    known.start()
    known.join()
    assert found[1] is None
