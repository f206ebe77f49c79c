"""flash-linear-attention's operators, modules and layers under their own import names.

Requirements
------------
1. After ``install_fla_names()``, ``from fla.ops.kda import chunk_kda`` and the other names of ``NAMES`` give this
   project's; a name or module that is not there says so, and what is.
2. Nothing is served by surprise: where the real package is installed it is an error unless ``replace=True``, and one
   that was already imported is always an error.
3. ``remove_fla_names()`` takes everything back.
"""

from __future__ import annotations

import importlib
import importlib.abc
import importlib.machinery
import importlib.util
import sys
from collections.abc import Sequence
from types import ModuleType
from typing import Any

from graphsafe.errors import error

__all__ = ["NAMES", "install_fla_names", "remove_fla_names"]

_GDN = {"chunk_gated_delta_rule": "gdn", "fused_recurrent_gated_delta_rule": "gdn"}
_KDA = {"chunk_kda": "kda", "fused_recurrent_kda": "kda", "fused_kda_gate": "kda"}
_MODULES = {"FusedRMSNormGated": "norm", "RMSNorm": "norm", "ShortConvolution": "layers"}
_LAYERS = {"GatedDeltaNet": "layers", "KimiDeltaAttention": "layers"}

NAMES: dict[str, dict[str, str]] = {
    "fla": _LAYERS,
    "fla.layers": _LAYERS,
    "fla.layers.gated_deltanet": {"GatedDeltaNet": "layers"},
    "fla.layers.kda": {"KimiDeltaAttention": "layers"},
    "fla.modules": _MODULES,
    "fla.modules.conv": {"causal_conv1d": "conv", "ShortConvolution": "layers"},
    "fla.modules.convolution": {"causal_conv1d": "conv", "ShortConvolution": "layers"},
    "fla.modules.fused_norm_gate": {"FusedRMSNormGated": "norm", "rms_norm_gated": "norm"},
    "fla.ops": {**_GDN, **_KDA},
    "fla.ops.gated_delta_rule": _GDN,
    "fla.ops.kda": _KDA,
    "fla.ops.kda.gate": {"fused_kda_gate": "kda"},
}
"""Module -> names in it and the package of ``graphsafe_kernels`` that has them."""


class _Names(ModuleType):
    def __getattr__(self, name: str) -> Any:
        names = NAMES[self.__name__]
        if name in names:
            value = getattr(importlib.import_module(f"graphsafe_kernels.{names[name]}"), name)
            setattr(self, name, value)
            return value
        if name.startswith("__"):
            raise AttributeError(name)
        raise AttributeError(f"{self.__name__} is served by graphsafe_kernels, which has no {name}; it has "
                             f"{', '.join(sorted(names))}")


class _Finder(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    def find_spec(self, name: str, path: Sequence[str] | None = None,
                  target: ModuleType | None = None) -> importlib.machinery.ModuleSpec | None:
        if name != "fla" and not name.startswith("fla."):
            return None
        if name not in NAMES:
            raise ModuleNotFoundError(f"fla is served by graphsafe_kernels, which has no {name}; it has "
                                      f"{', '.join(NAMES)}", name=name)
        return importlib.machinery.ModuleSpec(name, self, is_package=True, origin="graphsafe_kernels.integrations")

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> ModuleType:
        return _Names(spec.name, f"{spec.name}, served by graphsafe_kernels")

    def exec_module(self, module: ModuleType) -> None:
        module.__path__ = []  # type: ignore[attr-defined]
        module.__all__ = sorted(NAMES[module.__name__])  # type: ignore[attr-defined]


def _installed() -> _Finder | None:
    return next((f for f in sys.meta_path if isinstance(f, _Finder)), None)


def install_fla_names(*, replace: bool = False) -> None:
    """Let ``import fla`` and the modules of ``NAMES`` give this project's operators and layers.

    ``replace``: also where flash-linear-attention is installed, which is then not found. Raises rule ``argument``
    (GS108) where it is installed and not to be replaced, or already imported. Calling it again changes nothing.
    """
    if _installed() is not None:
        return
    if "fla" in sys.modules:
        raise error("argument", "fla was imported before install_fla_names()",
                    why="Code that holds its operators by name would go on using them.",
                    remedy="Call install_fla_names() first, before anything imports fla.")
    if not replace and importlib.util.find_spec("fla") is not None:
        raise error("argument", "flash-linear-attention is installed; its names would be hidden",
                    remedy="Pass replace=True to hide it in this process, or uninstall it.")
    sys.meta_path.insert(0, _Finder())


def remove_fla_names() -> None:
    """Undo :func:`install_fla_names`; modules imported meanwhile are forgotten."""
    finder = _installed()
    if finder is not None:
        sys.meta_path.remove(finder)
        for name in [n for n, m in sys.modules.items() if isinstance(m, _Names)]:
            del sys.modules[name]
