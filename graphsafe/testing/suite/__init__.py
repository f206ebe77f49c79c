"""The contract suite: what every runtime must do, as tests on plain torch operators.

Requirements
------------
1. A subclass of :class:`ContractSuite` with a ``runtime`` fixture tests an adapter; a part of the suite can be taken
   alone (:class:`CaptureSuite` and so on).
2. The tests hold on every device: a body that is captured may or may not have run, results are read after a replay,
   outside any capture, and after a synchronisation.
3. Sizes are small and seeds fixed; each test ends in well under a second on a CPU.
"""

from __future__ import annotations

from graphsafe.testing.suite.arenas import ArenaSuite
from graphsafe.testing.suite.capture import CaptureSuite
from graphsafe.testing.suite.failure import FailureSuite
from graphsafe.testing.suite.graphed import GraphedSuite
from graphsafe.testing.suite.inputs import InputSuite
from graphsafe.testing.suite.lifetime import LifetimeSuite
from graphsafe.testing.suite.order import OrderSuite
from graphsafe.testing.suite.random_numbers import RandomSuite
from graphsafe.testing.suite.roles import RolesSuite
from graphsafe.testing.suite.rules import RulesSuite
from graphsafe.testing.suite.tables import TablesSuite
from graphsafe.testing.suite.train import TrainSuite
from graphsafe.testing.suite.verify import VerifySuite

__all__ = [
    "ArenaSuite",
    "CaptureSuite",
    "ContractSuite",
    "FailureSuite",
    "GraphedSuite",
    "InputSuite",
    "LifetimeSuite",
    "OrderSuite",
    "RandomSuite",
    "RolesSuite",
    "RulesSuite",
    "TablesSuite",
    "TrainSuite",
    "VerifySuite",
]


class ContractSuite(
    RolesSuite,
    CaptureSuite,
    RulesSuite,
    FailureSuite,
    LifetimeSuite,
    OrderSuite,
    RandomSuite,
    TablesSuite,
    ArenaSuite,
    GraphedSuite,
    InputSuite,
    TrainSuite,
    VerifySuite,
):
    """Every part of the contract."""
