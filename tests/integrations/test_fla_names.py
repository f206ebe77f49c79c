"""Code that imports flash-linear-attention's operators by name gets this project's, and is told what there is not."""

from __future__ import annotations

import subprocess
import sys
import textwrap

import pytest
import torch

import graphsafe_kernels.conv
import graphsafe_kernels.gdn
import graphsafe_kernels.kda
import graphsafe_kernels.layers
import graphsafe_kernels.norm
from graphsafe.errors import ArgumentError
from graphsafe_kernels.integrations import fla_names, install_fla_names


@pytest.fixture
def installed(monkeypatch):
    """The names, as in a process that has not imported the other package, which ``transformers`` imports if it can."""
    for name in [n for n in sys.modules if n.partition(".")[0] == "fla"]:
        monkeypatch.delitem(sys.modules, name)
    install_fla_names(replace=True)
    yield
    fla_names.remove_fla_names()


def test_every_name_is_this_projects(installed):
    import importlib

    for module, names in fla_names.NAMES.items():
        found = importlib.import_module(module)
        assert sorted(names) == found.__all__
        for name, package in names.items():
            assert getattr(found, name) is getattr(getattr(graphsafe_kernels, package), name)


def test_code_written_for_the_other_package_runs(installed):
    from fla.modules import FusedRMSNormGated, ShortConvolution
    from fla.ops.gated_delta_rule import chunk_gated_delta_rule
    from fla.ops.kda import chunk_kda

    q, v, g = torch.randn(1, 9, 2, 8), torch.randn(1, 9, 2, 8), -torch.rand(1, 9, 2)
    cu = torch.tensor([0, 4, 9])
    x, _ = ShortConvolution(16, 4)(q.flatten(2), cu_seqlens=cu)
    beta = torch.rand(1, 9, 2)
    o, state = chunk_gated_delta_rule(x.view_as(q), q, v, g, beta, output_final_state=True, cu_seqlens=cu)
    assert state.shape == (2, 2, 8, 8)
    o2, _ = chunk_kda(x.view_as(q), q, v, g[..., None].expand_as(q), beta, cu_seqlens=cu)
    assert FusedRMSNormGated(8)(o, o2).shape == o.shape


def test_what_is_not_there_is_named(installed):
    with pytest.raises(ImportError, match="chunk_simple_gla"):
        from fla.ops import chunk_simple_gla  # noqa: F401
    with pytest.raises(ModuleNotFoundError, match=r"fla\.ops\.simple_gla"):
        import fla.ops.simple_gla
    import fla.ops

    with pytest.raises(AttributeError, match="chunk_kda"):
        fla.ops.chunk_nothing  # noqa: B018


def test_removing_leaves_nothing_behind(installed):
    import fla.ops.kda  # noqa: F401

    install_fla_names()  # a second time changes nothing
    fla_names.remove_fla_names()
    assert not [n for n in sys.modules if n == "fla" or n.startswith("fla.")]
    assert fla_names._installed() is None


def run(tmp_path, code):
    package = tmp_path / "fla"
    package.mkdir()
    (package / "__init__.py").write_text("real = True\n")
    script = tmp_path / "script.py"
    script.write_text(textwrap.dedent(code))
    done = subprocess.run([sys.executable, str(script)], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr


def test_an_installed_package_is_hidden_only_where_asked(tmp_path):
    run(tmp_path, """
        from graphsafe.errors import ArgumentError
        from graphsafe_kernels.integrations import install_fla_names
        try:
            install_fla_names()
            raise SystemExit("installed over the real package")
        except ArgumentError as refused:
            assert "replace=True" in str(refused)
        install_fla_names(replace=True)
        import fla
        assert not hasattr(fla, "real")
        from fla.layers import GatedDeltaNet
        import graphsafe_kernels.layers
        assert GatedDeltaNet is graphsafe_kernels.layers.GatedDeltaNet
    """)


def test_a_package_that_was_imported_is_refused(monkeypatch):
    monkeypatch.setitem(sys.modules, "fla", sys)
    with pytest.raises(ArgumentError, match="before"):
        install_fla_names(replace=True)
