"""Lint reports everything that a graph cannot hold, at its line, in code that knows nothing of graphsafe."""

from __future__ import annotations

import inspect
import random

import lint_badly_allowed
import lint_programs as programs
import pytest
import torch

import graphsafe as gs


def expected(*sources):
    """(rule, line) of the statements marked in the sources."""
    found = set()
    for source in sources:
        lines, first = inspect.getsourcelines(source)
        found |= {
            (text.split("# FINDS ")[1].strip(), max(first, 1) + i) for i, text in enumerate(lines) if "# FINDS " in text
        }
    assert found
    return found


def lines(report):
    return {(f.rule.id, f.where.line) for f in report.findings}


def packed(lengths=(2, 4, 3)):
    return torch.randn(1, sum(lengths), 8), torch.tensor([0, *lengths]).cumsum(0)


def vector():
    return torch.arange(4.0) + 1


@pytest.mark.parametrize("lengths", [(2, 4, 3), (3, 3, 3)])
def test_a_naive_packed_layer(lengths):
    report = gs.lint(programs.NaiveVarlen(), *packed(lengths))
    assert lines(report) == expected(programs.NaiveVarlen), str(report)
    assert report.layouts == 2
    read = next(f for f in report.findings if f.rule.id == "GS101")
    assert read.tensor.startswith("argument 'cu_seqlens': int64[4]")
    assert read.where.file == programs.__file__
    assert read.count == 1


def test_its_masked_twin_is_clean():
    report = gs.lint(programs.MaskedVarlen(), *packed())
    assert report.clean, str(report)
    assert report.layouts == 2


@pytest.mark.parametrize("by", ["identity", "shape"])
def test_tables_kept_from_another_layout(by):
    report = gs.lint(programs.CachedTables(by), *packed())
    assert lines(report) == expected(programs.CachedTables), str(report)
    assert "earlier run made from sequence boundaries" in str(report)


def test_a_stale_table_that_is_only_returned():
    cache = {}

    def tables(cu_seqlens):
        return cache.setdefault(id(cu_seqlens), cu_seqlens.diff() if id(cu_seqlens) not in cache else None)

    cu_seqlens = packed()[1]
    tables(cu_seqlens)  # what was kept before does not hide what is kept now
    report = gs.lint(tables, cu_seqlens)
    assert lines(report) == {("GS303", inspect.getsourcelines(tables)[1])}, str(report)


def test_tables_built_in_each_run_are_clean():
    assert gs.lint(programs.BuiltTables(), *packed()).clean


def test_a_host_read_in_a_backward():
    report = gs.lint(programs.train, vector())
    assert lines(report) == expected(programs.Clip), str(report)


def test_everything_at_once_and_each_line_once_with_its_count():
    report = gs.lint(programs.many, vector())
    assert lines(report) == expected(programs.many), str(report)
    assert {f.rule.id: f.count for f in report.findings} == {
        "GS101": 3, "GS103": 1, "GS304": 1, "GS102": 1, "GS210": 1,
    }  # fmt: skip


def test_what_a_refused_function_does_inside_is_not_reported_again():
    report = gs.lint(programs.repeats, vector())
    assert lines(report) == expected(programs.repeats), str(report)
    assert [f.count for f in report.findings] == [2]


def test_a_python_number_that_changes_from_run_to_run():
    report = gs.lint(programs.Counts(), vector())
    assert lines(report) == expected(programs.Counts), str(report)
    assert report.layouts == 1


def test_code_that_asks_is_judged_on_the_path_it_takes_in_a_capture():
    asked = torch.cuda.is_current_stream_capturing
    assert gs.lint(programs.asks_whether_it_is_captured, vector()).clean
    report = gs.lint(programs.reads_only_when_captured, vector())
    assert lines(report) == expected(programs.reads_only_when_captured), str(report)
    assert torch.cuda.is_current_stream_capturing is asked


def test_an_everyday_module_is_clean():
    report = gs.lint(programs.everyday, torch.randn(2, 3, 8))
    assert report.clean, str(report)
    assert report.operators > 10


def test_comments_allow_with_a_reason():
    report = gs.lint(programs.allowed, vector())
    assert report.clean, str(report)
    assert [f.allowed for f in report.allowed] == [
        "the demonstration reads once, on purpose",
        "the same, on the line above the code",
    ]


def test_a_comment_without_a_reason_or_for_an_unknown_rule_is_reported_and_allows_nothing():
    report = gs.lint(lint_badly_allowed.badly_allowed, vector())
    assert not report.allowed
    source, first = inspect.getsourcelines(lint_badly_allowed.badly_allowed)
    a, b, c = (first + i for i, text in enumerate(source) if "allow" in text and "item" in text)
    assert lines(report) == {("GS101", a), ("GS112", a), ("GS101", b), ("GS112", b), ("GS101", c)}, str(report)


def test_nothing_is_changed():
    model = programs.Everyday()
    x, cu = packed()
    kept = {name: t.clone() for name, t in model.state_dict().items()}
    states = torch.get_rng_state(), random.getstate(), cu.clone()
    gs.lint(model, torch.randn(2, 3, 8, generator=torch.Generator().manual_seed(0)))
    y = vector()
    gs.lint(programs.many, y)
    gs.lint(programs.NaiveVarlen.forward, programs.varlen, x, cu)
    assert all(torch.equal(t, kept[name]) for name, t in model.state_dict().items())
    assert all(p.grad is None for p in model.parameters())
    assert torch.equal(torch.get_rng_state(), states[0])
    assert random.getstate() == states[1]
    assert torch.equal(cu, states[2])
    assert torch.equal(y, vector())


def test_a_body_that_fails_with_the_second_layout_only():
    def body(x, cu_seqlens, held=[]):  # noqa: B006
        held.append(int(cu_seqlens[1]))
        return x[:, : held[-1]] + x[:, : held[0]]

    report = gs.lint(body, *packed())
    assert ("GS303", inspect.getsourcelines(body)[1] + 2) in lines(report), str(report)


def test_what_the_autograd_graph_of_a_result_keeps_does_not_escape():
    p = torch.nn.Parameter(torch.ones(4))
    report = gs.lint(lambda x: programs.KeepsAnObject.apply(p * x), vector())
    assert report.clean, str(report)


def test_what_cannot_be_run_is_an_error():
    with pytest.raises(gs.BackendError, match="failed eagerly: RuntimeError"):
        gs.lint(programs.fails, vector())
    with pytest.raises(gs.ArgumentError, match="do not fit lint_programs:fails"):
        gs.lint(programs.fails)
    with pytest.raises(gs.ArgumentError, match="argument 'x' is float32"):
        gs.lint(programs.fails, torch.empty(3, device="meta"))
    with pytest.raises(gs.ArgumentError, match="takes the function that is captured"):
        gs.lint(gs.graphed(programs.fails, runtime=gs.get_runtime("cpu")), vector())


def test_a_finding_without_a_line_of_the_body_names_its_definition():
    report = gs.lint(torch.nn.ReLU(inplace=True), vector())
    (finding,) = report.findings
    assert finding.rule.name == "input-written"
    assert (finding.where.file, finding.where.function) == (inspect.getsourcefile(torch.nn.ReLU), "forward")


def test_a_compiled_function_is_looked_into():
    report = gs.lint(torch.compile(programs.repeats_in_a_loop, backend="eager"), vector())
    assert expected(programs.repeats_in_a_loop) <= lines(report), str(report)
