"""The runtimes under test come from ``--graphsafe-device`` or ``GRAPHSAFE_DEVICE``."""

pytest_plugins = ["graphsafe.testing.plugin"]
