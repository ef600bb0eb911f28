"""Print the hardware and software of a GPU host."""

from __future__ import annotations

import os
import platform
import shutil
import subprocess
import sys
from importlib.metadata import PackageNotFoundError, version

PACKAGES = (
    "torch", "triton", "numpy", "numba", "llvmlite", "cuda-bindings", "cuda-python", "nvidia-cuda-nvrtc",
    "nemo-toolkit", "lightning", "omegaconf", "kaldialign", "sentencepiece", "pytest",
)  # fmt: skip
TOOLS = ("nvidia-smi", "compute-sanitizer", "nvcc", "ncu", "cuobjdump")


def main() -> int:
    """Returns 0 if torch sees a GPU."""
    print(f"{platform.platform()}, {os.cpu_count()} cores, Python {platform.python_version()}")
    for package in PACKAGES:
        try:
            print(f"{package} {version(package)}")
        except PackageNotFoundError:
            print(f"{package} -")
    for tool in TOOLS:
        print(f"{tool}: {shutil.which(tool) or '-'}")
    if shutil.which("nvidia-smi"):
        query = "name,driver_version,memory.total,clocks.max.sm,clocks.max.mem,power.limit"
        subprocess.run(["nvidia-smi", f"--query-gpu={query}", "--format=csv"], check=False)
        subprocess.run(["nvidia-smi", "-q", "-d", "CLOCK,ECC"], check=False)
    import torch

    if not torch.cuda.is_available():
        print(f"torch {torch.__version__} sees no GPU")
        return 1
    properties = torch.cuda.get_device_properties(0)
    print(f"torch {torch.__version__}, CUDA {torch.version.cuda}: {properties}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
