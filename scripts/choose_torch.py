"""Print the torch requirement that suits this machine, for `make setup`.

With an NVIDIA GPU, and on systems where torch's ordinary wheels are CPU builds, this is plain torch. On Linux without
a GPU, plain torch installs several GB of unused CUDA libraries. The script then chooses the newest CPU build (`+cpu`)
that pip finds. If there is none, it stops with instructions. Run it with the Python of the new environment.
"""

from __future__ import annotations

import importlib.metadata
import platform
import re
import shutil
import subprocess
import sys
from pathlib import Path

OLDEST = (2, 6)  # as in pyproject.toml
ANY_BUILD = "torch>=2.6"

NO_CPU_BUILD = """\
choose_torch: no GPU was found here, and pip sees only CUDA builds of torch (several GB of libraries
that this machine cannot use). Choose one of:
  make setup TORCH="torch --index-url URL"   URL of an index with CPU builds; pytorch.org names its own
  PIP_FIND_LINKS=FOLDER make setup           a folder that holds a torch-*+cpu wheel
  make setup TORCH=torch                     take the CUDA build all the same
pip sees: {versions}"""


def main() -> int:
    installed = installed_torch()
    if installed:
        print(f"torch=={installed}")
        return 0
    if platform.system() != "Linux" or has_nvidia_gpu():
        print(ANY_BUILD)
        return 0
    versions = visible_versions()
    build = newest_cpu_build(versions)
    if build is None:
        seen = ", ".join(versions[:8]) or "no torch at all"
        print(NO_CPU_BUILD.format(versions=seen), file=sys.stderr)
        return 1
    print(f"torch=={build}")
    return 0


def installed_torch() -> str | None:
    """The version of torch in this environment, which is kept; None if there is none."""
    try:
        return importlib.metadata.version("torch")
    except importlib.metadata.PackageNotFoundError:
        return None


def has_nvidia_gpu() -> bool:
    devices = ("nvidia[0-9]*", "nvhost-gpu", "dxg")  # cards, Jetson, WSL
    if any(found for pattern in devices for found in Path("/dev").glob(pattern)):
        return True
    nvidia_smi = shutil.which("nvidia-smi")
    if nvidia_smi is None:
        return False
    listed = subprocess.run([nvidia_smi, "-L"], capture_output=True, text=True, check=False)
    return listed.returncode == 0 and "GPU" in listed.stdout


def visible_versions() -> list[str]:
    """Versions of torch that pip would consider with its present settings, newest first."""
    command = [sys.executable, "-m", "pip", "index", "versions", "torch", "--disable-pip-version-check"]
    answer = subprocess.run(command, capture_output=True, text=True, check=False)
    found = re.search(r"^Available versions: (.*)$", answer.stdout, re.MULTILINE)
    return [version.strip() for version in found[1].split(",")] if found else []


def newest_cpu_build(versions: list[str]) -> str | None:
    """The newest `X.Y.Z+cpu` that is not older than `OLDEST`.

    >>> newest_cpu_build(["2.15.0", "2.13.0+cpu", "2.9.1+cpu", "2.13.0"])
    '2.13.0+cpu'
    """
    builds = []
    for version in versions:
        numbers = re.fullmatch(r"(\d+)\.(\d+)\.(\d+)\+cpu", version)
        if numbers:
            builds.append((tuple(map(int, numbers.groups())), version))
    usable = [build for build in builds if build[0] >= OLDEST]
    return max(usable)[1] if usable else None


if __name__ == "__main__":
    sys.exit(main())
