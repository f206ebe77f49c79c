"""Every runtime under test (``--graphsafe-device``, by default the CPU) keeps the whole contract."""

from graphsafe.testing.suite import ContractSuite


class TestContract(ContractSuite):
    """All parts; ``runtime`` comes from the plugin."""
