"""These tests are about CUDA itself: collected only when cuda is among the devices under test."""

import os

if "cuda" not in os.environ.get("GRAPHSAFE_DEVICE", "cpu").split(","):
    collect_ignore_glob = ["test_*.py"]
