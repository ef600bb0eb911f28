"""Check whether kernels can run on a device; if not, give the reason and a remedy in one line.

The checks go from safe to unsafe calls. The driver's libraries are called only after torch has found a device, because
some calls hang without a device.
"""

import importlib
import re

import torch

from nemo_gpu_decoding.cuda import nvrtc
from nemo_gpu_decoding.cuda.compile import architecture
from nemo_gpu_decoding.extras import install_command

# Warp-synchronous code needs sm_70, but CUDA 13 compiles for nothing older than Turing. Asynchronous
# copies (sm_80) are used where they exist, and no kernel depends on them.
OLDEST_CAPABILITY = (7, 5)
OLDEST_CUDA_PYTHON = (12, 9)


def why_unavailable(device: torch.device) -> str | None:
    """Return None if kernels run on `device` (an index is optional), else the reason in one line; never raises."""
    try:
        return _torch_problem(device) or _cuda_python_problem() or _compiler_problem(device) or _driver_problem()
    except Exception as error:  # the libraries raise errors of many types; none may stop a decoder
        return f"CUDA does not answer: {_one_line(error)}"


def _torch_problem(device: torch.device) -> str | None:
    if device.type != "cuda":
        return f"kernels run on CUDA devices, not on '{device}'"
    if torch.version.cuda is None:
        return f"torch {torch.__version__} is built without CUDA"
    if not torch.cuda.is_available():
        return "torch finds no GPU (see nvidia-smi and CUDA_VISIBLE_DEVICES)"
    count = torch.cuda.device_count()
    if device.index is not None and device.index >= count:
        return f"there is no {device}, torch finds {count} GPU(s)"
    capability = torch.cuda.get_device_capability(device)
    if capability < OLDEST_CAPABILITY:
        oldest = _dotted(OLDEST_CAPABILITY)
        return f"{device} is too old: compute capability {_dotted(capability)}, needed is {oldest} or newer"
    return None


def _cuda_python_problem() -> str | None:
    try:
        found = importlib.import_module("cuda.bindings").__version__
    except (ImportError, AttributeError):
        return f"cuda-python is not installed: {install_advice()}"
    if tuple(map(int, re.findall(r"\d+", found)[:2])) < OLDEST_CUDA_PYTHON:
        return f"cuda-python {found} is older than {_dotted(OLDEST_CUDA_PYTHON)}: {install_advice()}"
    return None


def _compiler_problem(device: torch.device) -> str | None:
    try:
        version = nvrtc.version()
    except Exception as error:  # the loader's own types for a missing library
        return f"NVRTC can't be loaded ({_one_line(error)}): {install_advice()}"
    capability = torch.cuda.get_device_capability(device)
    if architecture(capability) is None:
        return f"NVRTC {_dotted(version)} can't compile for compute capability {_dotted(capability)}"
    return None


def _driver_problem() -> str | None:
    """Return why the driver cannot run the compiled code, or None. A driver can run code of older compilers."""
    supported, compiler = driver_version(), nvrtc.version()
    if supported[0] < compiler[0]:
        return (
            f"the driver is for CUDA {_dotted(supported)} and can't run what NVRTC {_dotted(compiler)} "
            f"compiles: take a newer driver, or {install_command(f'cuda{supported[0]}')}"
        )
    return None


def driver_version() -> tuple[int, int]:
    """Return the newest CUDA version whose programs the driver can run.

    Raises:
        RuntimeError: the driver does not answer.
        ImportError: cuda-python is not installed.
    """
    status, number = importlib.import_module("cuda.bindings.driver").cuDriverGetVersion()
    if int(status) != 0:
        raise RuntimeError(f"the NVIDIA driver fails with {status}")
    return number // 1000, number % 1000 // 10


def install_advice() -> str:
    """Return the command that installs the version of cuda-python that fits this torch."""
    major = (torch.version.cuda or "13").split(".")[0]
    return install_command(f"cuda{major}")


def _dotted(version: tuple[int, int]) -> str:
    return ".".join(map(str, version))


def _one_line(error: Exception) -> str:
    text = str(error).strip().split("\n", 1)[0]
    return f"{type(error).__name__}: {text[:120]}" if text else type(error).__name__
