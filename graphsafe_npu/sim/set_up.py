"""Make an environment with the real torch, torch_npu and Triton-Ascend on a simulated CANN: one command.

    python3.11 graphsafe_npu/sim/set_up.py FOLDER

On Debian 12 or later, x86_64; as root where its packages are missing. Afterwards ``FOLDER/venv/bin/python`` has device
``npu``. It may be run again: only what is missing is done. Needs the standard library alone.

Exit codes: 0 done; 75 if a package could not be had (no network, no such package, not root), which says nothing about
this project; anything else is a failure.
"""

from __future__ import annotations

import shutil
import subprocess
import sys
import venv
from importlib import metadata
from pathlib import Path

_PROGRAMS = {"mlir-opt-19": "mlir-19-tools", "llc-19": "llvm-19", "cc": "gcc", "nm": "binutils"}
"""Program -> Debian package that has it."""
_WHEELS = (
    "torch==2.13.0",
    "torch-npu==2.13.0",
    "triton-ascend==3.2.0",
    "ascendnpu-ir==1.2.0",
    "pybind11",  # imported by triton-ascend, which does not declare it
    "numpy",
    "pyyaml",
)
_PYTHON = (3, 11)
UNAVAILABLE = 75  # EX_TEMPFAIL


def _obtain(*command: str) -> None:
    """Run a command that gets packages from elsewhere."""
    try:
        subprocess.run(command, check=True)
    except (OSError, subprocess.CalledProcessError) as problem:
        print(f"not available here: {' '.join(command[:3])}: {problem}", file=sys.stderr)
        sys.exit(UNAVAILABLE)


def _programs() -> None:
    missing = [package for program, package in _PROGRAMS.items() if shutil.which(program) is None]
    if missing:
        _obtain("apt-get", "update", "-q")
        _obtain("apt-get", "install", "-y", "-q", "--no-install-recommends", *missing, "libc6-dev")


def main(folder: Path) -> None:
    """Debian packages, the virtual environment with its wheels and this project, the simulated libraries."""
    if sys.version_info[:2] != _PYTHON:
        sys.exit(f"Python {_PYTHON[0]}.{_PYTHON[1]} is needed: the wheels of triton-ascend are for one version each")
    here = Path(__file__).resolve().parent
    project = here.parent.parent
    _programs()
    python = folder / "venv" / "bin" / "python"
    if not python.exists():
        venv.create(folder / "venv", with_pip=True)
    pip = [str(python), "-m", "pip", "install", "-q", "--disable-pip-version-check"]
    _obtain(*pip, *_WHEELS)
    subprocess.run([*pip, "-e", f"{project}[test]"], check=True)
    site = next((folder / "venv" / "lib").glob("python*/site-packages"))
    # a torch for CUDA brings the stock triton, which overwrites triton-ascend's package of the same name
    if any(d.metadata["Name"].lower() == "triton" for d in metadata.distributions(path=[str(site)])):
        sys.exit(f"torch brought the stock triton: install a CPU build of {_WHEELS[0]}, then {_WHEELS[2]} again")
    subprocess.run([str(python), str(here / "build.py"), str(folder)], check=True)
    print(f"simulated Ascend: GRAPHSAFE_DEVICE=npu {python} -m pytest {project / 'tests' / 'contract'}")


if __name__ == "__main__":
    if len(sys.argv) != 2:
        sys.exit(__doc__)
    main(Path(sys.argv[1]).resolve())
