"""The installed torch_npu offers what is recorded of its version."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch_npu
from record_signatures import RECORD, offered


def test_the_installed_version_is_as_recorded():
    record = json.loads(RECORD.read_text())
    version = torch_npu.__version__.split("+")[0]
    if version not in record:
        pytest.fail(f"torch_npu {version} is not recorded: run {RECORD.with_name('record_signatures.py')} on its wheel")
    folder = Path(torch_npu.__file__).parent
    library = folder / "lib" / "libtorch_npu.so"
    assert offered(lambda file: (folder / file).read_text(), [library.read_bytes()]) == record[version]
