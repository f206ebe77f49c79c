"""A pytest plugin: runtimes under test, captured tests, poisoned memory, known failures, failures by category.

Requirements
------------
1. The devices come from ``--graphsafe-device cpu,cuda`` or, without it, from the environment variable
   ``GRAPHSAFE_DEVICE``; the default is ``cpu``.
2. A test that asks for ``runtime`` runs once for each of them. An unknown or unavailable device is an error of every
   such test, never a skip.
3. A test marked ``graphsafe_captured`` is captured and replayed over layouts (``graphsafe.testing.captured``).
4. Known failures stand in files (``graphsafe.testing.known_failures``), an unexpected pass fails.
5. The failures of a run are listed at its end by the categories of the graph contract.
6. Under pytest-xdist all of it holds too.
7. It is loaded where a conftest asks for it (``pytest_plugins = ["graphsafe.testing.plugin"]``), never by itself.
"""

from __future__ import annotations

import os
from collections.abc import Generator, Iterator
from typing import Any

import pytest

from graphsafe.bucket import Bucket
from graphsafe.errors import Category, GraphSafeError
from graphsafe.explanations import explanations_of
from graphsafe.rules import rule
from graphsafe.runtime import GraphRuntime, get_runtime
from graphsafe.testing.captured import MARKER, replay_over_layouts
from graphsafe.testing.known_failures import KnownFailures
from graphsafe.testing.poison import poisoned_memory as _poisoned_memory

__all__ = ["devices"]

pytest.register_assert_rewrite("graphsafe.testing.suite")

_KNOWN = pytest.StashKey[KnownFailures]()
_UNUSED = pytest.StashKey[list[str]]()
"""Of a process of pytest-xdist that collects nothing itself: what its workers, each of which collects all, found."""
_FINDING = "graphsafe"
_OTHER = "of no category"


def pytest_addoption(parser: pytest.Parser) -> None:
    group = parser.getgroup("graphsafe")
    group.addoption(
        "--graphsafe-device",
        metavar="NAMES",
        help="runtimes under test, separated by commas; default: $GRAPHSAFE_DEVICE, else cpu",
    )
    group.addoption(
        "--graphsafe-known-failures",
        metavar="FOLDER",
        help="folder of DEVICE.txt files with a line 'test id: reason' for each test that is known to fail there",
    )
    parser.addini("graphsafe_known_failures", "the same folder, from the root of the project")


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line(
        "markers",
        f"{MARKER}(layouts=20, seed=0): capture the (function, batch) that the test returns, replay it over layouts of "
        "the fixture 'bucket', and compare each with eager",
    )
    given = config.getoption("--graphsafe-known-failures") or config.getini("graphsafe_known_failures")
    folder = config.rootpath / str(given) if given else None
    if folder is not None and not folder.is_dir():
        raise pytest.UsageError(f"known failures: {folder} is no folder")
    config.stash[_KNOWN] = KnownFailures(folder)
    config.stash[_UNUSED] = []


def devices(config: pytest.Config) -> list[str]:
    """The names of the runtimes under test, in the order given."""
    given = config.getoption("--graphsafe-device") or os.environ.get("GRAPHSAFE_DEVICE") or "cpu"
    names = [name.strip() for name in str(given).split(",") if name.strip()]
    if not names:
        raise pytest.UsageError(f"--graphsafe-device {given!r} names no runtime")
    return list(dict.fromkeys(names))


def pytest_report_header(config: pytest.Config) -> str:
    return f"graphsafe: runtimes under test: {', '.join(devices(config))}"


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    # a test module or class with a ``runtime`` fixture of its own does not ask for this one's parameter
    if "graphsafe_device" in metafunc.fixturenames:
        metafunc.parametrize("graphsafe_device", devices(metafunc.config), scope="session")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    under_test = devices(config)
    for item in items:
        callspec = getattr(item, "callspec", None)
        own = callspec.params.get("graphsafe_device") if callspec is not None else None
        for device in [own] if own is not None else under_test[:1]:
            known = config.stash[_KNOWN].find(str(device), item.nodeid)
            if known is not None:
                item.add_marker(pytest.mark.xfail(reason=known.reason, strict=True))


@pytest.fixture(scope="session")
def runtime(graphsafe_device: str) -> GraphRuntime:
    """Each runtime under test."""
    return get_runtime(graphsafe_device)


@pytest.fixture
def bucket() -> Bucket:
    """A small bucket; a test module may have a fixture of its own in its place."""
    return Bucket(tokens=96, sequences=5, chunk_size=32)


@pytest.fixture
def poisoned_memory() -> Iterator[None]:
    """Uninitialised memory holds NaN for the time of the test."""
    with _poisoned_memory():
        yield


@pytest.hookimpl(tryfirst=True)
def pytest_pyfunc_call(pyfuncitem: pytest.Function) -> bool | None:
    marker = pyfuncitem.get_closest_marker(MARKER)
    if marker is None:
        return None
    given: dict[str, Any] = pyfuncitem.funcargs
    if "runtime" not in given or "bucket" not in given:
        raise pytest.UsageError(f"{pyfuncitem.nodeid}: a test marked {MARKER} asks for 'runtime' and 'bucket'")
    names = pyfuncitem._fixtureinfo.argnames
    returned = pyfuncitem.obj(**{name: given[name] for name in names})
    replay_over_layouts(given["runtime"], given["bucket"], returned, **marker.kwargs)
    return True


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(
    item: pytest.Item, call: pytest.CallInfo[None]
) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    report = yield
    if report.failed and call.excinfo is not None:
        report.user_properties.append((_FINDING, _finding(call.excinfo.value)))
    return report


def _finding(problem: BaseException) -> tuple[str, str]:
    """(category, rule and place) of a failure; a device's own error has the category of its explanation."""
    if isinstance(problem, GraphSafeError):
        return str(problem.category), f"{problem.rule} at {problem.where}"
    known = explanations_of(f"{type(problem).__name__}: {problem}")
    if known:
        named = rule(known[0][1].rule)
        return str(named.category), f"{named}: {_first_line(problem)}"
    return _OTHER, f"{type(problem).__name__}: {_first_line(problem)}"


def _first_line(problem: BaseException) -> str:
    return (str(problem).strip().splitlines() or [""])[0]


def pytest_sessionfinish(session: pytest.Session) -> None:
    output: dict[str, Any] | None = getattr(session.config, "workeroutput", None)
    if output is not None:
        output["graphsafe_unused"] = session.config.stash[_KNOWN].unused()


@pytest.hookimpl(optionalhook=True)
def pytest_testnodedown(node: Any) -> None:
    output: dict[str, Any] | None = getattr(node, "workeroutput", None)
    if output is not None:  # a worker that died has none
        node.config.stash[_UNUSED] = output["graphsafe_unused"]


def pytest_terminal_summary(terminalreporter: Any, config: pytest.Config) -> None:
    found: dict[str, list[str]] = {}
    for report in [*terminalreporter.stats.get("failed", []), *terminalreporter.stats.get("error", [])]:
        category, text = dict(report.user_properties).get(_FINDING, (_OTHER, "an unexpected pass"))
        found.setdefault(category, []).append(f"{report.nodeid}: {text}")
    if found:
        terminalreporter.section("graphsafe: failures by category")
        for category in (*map(str, Category), _OTHER):
            if category in found:
                terminalreporter.write_line(f"{category}: {len(found[category])}")
                for line in sorted(found[category]):
                    terminalreporter.write_line(f"  {line}")
    unused = config.stash[_UNUSED] or config.stash[_KNOWN].unused()
    if unused:
        terminalreporter.section("graphsafe: known failures that fitted no test of this run")
        for line in unused:
            terminalreporter.write_line(f"  {line}")
