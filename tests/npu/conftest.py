"""These tests are about NPUGraph itself: collected only when npu is among the devices under test."""

import os

if "npu" not in os.environ.get("GRAPHSAFE_DEVICE", "cpu").split(","):
    collect_ignore_glob = ["test_*.py"]
