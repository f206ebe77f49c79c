"""A pytest plugin: the runtimes under test, and poisoned memory.

Requirements
------------
1. The devices come from ``--graphsafe-device cpu,cuda`` or, without it, from the environment variable
   ``GRAPHSAFE_DEVICE``; the default is ``cpu``.
2. A test that asks for ``runtime`` runs once for each of them. An unknown or unavailable device is an error of every
   such test, never a skip.
3. It is loaded where a conftest asks for it (``pytest_plugins = ["graphsafe.testing.plugin"]``), never by itself.
"""

from __future__ import annotations

import os
from collections.abc import Iterator

import pytest

from graphsafe.runtime import GraphRuntime, get_runtime
from graphsafe.testing.poison import poisoned_memory as _poisoned_memory

__all__ = ["devices"]

pytest.register_assert_rewrite("graphsafe.testing.suite")


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.getgroup("graphsafe").addoption(
        "--graphsafe-device",
        metavar="NAMES",
        help="runtimes under test, separated by commas; default: $GRAPHSAFE_DEVICE, else cpu",
    )


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


@pytest.fixture(scope="session")
def runtime(graphsafe_device: str) -> GraphRuntime:
    """Each runtime under test."""
    return get_runtime(graphsafe_device)


@pytest.fixture
def poisoned_memory() -> Iterator[None]:
    """Uninitialised memory holds NaN for the time of the test."""
    with _poisoned_memory():
        yield
