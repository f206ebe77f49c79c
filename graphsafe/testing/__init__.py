"""The contract suite that every adapter passes, and what tests of graphs need: layouts, poison, a pytest plugin.

Needs the ``test`` extra (pytest); nothing of graphsafe imports it. An adapter is tested by this file::

    import pytest

    from graphsafe.testing.suite import ContractSuite
    from my_adapter import MyRuntime

    pytest_plugins = ["graphsafe.testing.plugin"]


    class TestMyAdapter(ContractSuite):
        @pytest.fixture(scope="class")
        def runtime(self):
            return MyRuntime()
"""
