"""`nemo-gpu-decoding doctor` prints installed libraries, GPUs, and the backend of each strategy on this machine.

The functions import the libraries that they examine, so that `--help` imports no torch.
"""

from __future__ import annotations

import importlib.metadata
import importlib.util
import json
import os
import platform
import subprocess
import tempfile
from contextlib import suppress
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING

from nemo_gpu_decoding import __version__
from nemo_gpu_decoding.extras import MODULES, install_command, is_installed
from nemo_gpu_decoding.nemo_plugin.register import STRATEGIES, StrategySpec
from nemo_gpu_decoding.plain_text import format_table

if TYPE_CHECKING:
    import torch

OLDEST_NEMO, NEWEST_NEMO = (2, 7), (3, 0)  # tested
NOT_INSTALLED = "not installed"
EXAMPLES = ("", "json=true", "check=true")


@dataclass
class DoctorOptions:
    """Options of `doctor`."""

    # Print JSON instead of a table, for scripts and bug reports.
    json: bool = False
    # On a GPU, check each strategy's kernels now, and show the time of the check. Without it, the table shows the
    # state: strategies are checked before they decode on a GPU for the first time.
    check: bool = False


OPTIONS = DoctorOptions


@dataclass(frozen=True)
class Fact:
    """One line of the report of `doctor`."""

    name: str
    found: str
    advice: str = ""  # what to do about it, if anything


def run(options: DoctorOptions) -> int:
    """Print the report. Load no model, do not import NeMo, and write no files but the results of kernel checks."""
    rows = [asdict(fact) for fact in examine(check=options.check)]
    table = format_table(list(rows[0]), [list(row.values()) for row in rows])
    print(json.dumps(rows, indent=2) if options.json else table)
    return 0


def examine(*, check: bool = False) -> list[Fact]:
    """Return all lines of the report, from Python to the strategies; with `check`, check the CUDA kernels now."""
    import torch

    gpu = usable_gpu()
    build = f"built for CUDA {torch.version.cuda}" if torch.version.cuda else "CPU build"
    return [
        Fact("nemo-gpu-decoding", __version__),
        Fact("Python", f"{platform.python_version()} on {platform.system()} {platform.machine()}"),
        Fact("CPU cores", str(len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count())),
        Fact("CPU threads", str(torch.get_num_threads()), "OMP_NUM_THREADS=N changes it"),
        Fact("torch", f"{torch.__version__}, {build}"),
        *gpu_facts(),
        driver_fact(),
        Fact("cuda-python", installed_version("cuda-bindings")),
        nvrtc_fact(),
        nemo_fact(),
        registration_fact(),
        *extra_facts(),
        Fact("numba", installed_version("numba")),
        compiled_code_fact(),
        *(strategy_fact(strategy, gpu, check=check) for strategy in STRATEGIES.values()),
    ]


def gpu_facts() -> list[Fact]:
    """Return a line for each GPU that torch finds, with the reason if CUDA kernels cannot run on it."""
    import torch

    from nemo_gpu_decoding.cuda.launch import runtime

    facts = []
    for index in range(torch.cuda.device_count()) if torch.cuda.is_available() else ():
        try:
            device = torch.cuda.get_device_properties(index)
            shown = f"{device.name}, {device.total_memory / 2**30:.0f} GiB, sm_{device.major}{device.minor}"
        except RuntimeError:
            shown = "torch cannot use it"
        why_not = runtime().why_not(torch.device("cuda", index))
        facts.append(Fact(f"GPU {index}", shown, f"no CUDA kernels: {why_not}" if why_not else ""))
    return facts or [Fact("GPU", "none that torch can use", runtime().why_not(torch.device("cuda")) or "")]


def driver_fact() -> Fact:
    """Return the version of NVIDIA's driver that nvidia-smi reports."""
    query = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
    try:
        answer = subprocess.run(query, capture_output=True, text=True, check=False, timeout=30)
    except FileNotFoundError:
        return Fact("NVIDIA driver", "none")
    except (OSError, subprocess.TimeoutExpired) as error:
        return Fact("NVIDIA driver", "nvidia-smi does not answer", f"{error}"[:80])
    if answer.returncode:
        return Fact("NVIDIA driver", "nvidia-smi fails", (answer.stdout + answer.stderr).strip()[:80])
    return Fact("NVIDIA driver", answer.stdout.split("\n", 1)[0].strip())


def nvrtc_fact() -> Fact:
    """Return the version of NVRTC, which compiles CUDA kernels; torch's CUDA builds contain it."""
    from nemo_gpu_decoding.cuda import nvrtc

    try:
        major, minor = nvrtc.version()
    except Exception:  # the loader raises many types for a missing library
        return Fact("NVRTC", "not usable")
    return Fact("NVRTC", f"{major}.{minor}")


def nemo_fact() -> Fact:
    """Return NeMo's version. If NeMo is missing, `extra_facts` names the command that installs NeMo."""
    version = installed_version("nemo_toolkit")
    if version == NOT_INSTALLED:
        return Fact("NeMo", version, "plain log-probs need none")
    is_tested = OLDEST_NEMO <= tuple(map(int, version.split(".")[:2])) <= NEWEST_NEMO
    tested = "{}.{} .. {}.{}".format(*OLDEST_NEMO, *NEWEST_NEMO)
    return Fact("NeMo", version, "" if is_tested else f"tested with {tested}")


def registration_fact() -> Fact:
    """Return whether NeMo registers the strategies by itself, without a call of `register()`."""
    with suppress(ModuleNotFoundError):
        if importlib.util.find_spec("hydra_plugins.nemo_gpu_decoding") is not None:
            return Fact("plugin", "registers itself when NeMo is imported")
    return Fact("plugin", "does not register itself", "call nemo_gpu_decoding.register()")


def extra_facts() -> list[Fact]:
    """Return a line for each extra of pyproject.toml whose modules are not all installed."""
    missing = {extra: [name for name in modules if not is_installed(name)] for extra, modules in MODULES.items()}
    return [Fact(f"[{e}]", f"no {', '.join(names)}", install_command(e)) for e, names in missing.items() if names]


def compiled_code_fact() -> Fact:
    """Return the folder of numba's compiled code. If there is no usable folder, every process compiles again."""
    from nemo_gpu_decoding.jit import CACHE_VARIABLE, cache_folder

    folder = cache_folder()
    is_temporary = folder.is_relative_to(tempfile.gettempdir())
    advice = f"a temporary folder: {CACHE_VARIABLE}=FOLDER names a lasting one" if is_temporary else ""
    return Fact("compiled code", str(folder), advice)


def usable_gpu() -> torch.device | None:
    """Return torch's current GPU, or None if CUDA kernels cannot run on it (`gpu_facts` gives the reason)."""
    import torch

    from nemo_gpu_decoding.cuda.launch import runtime

    try:
        device = runtime().device_for(torch.device("cuda"))
    except RuntimeError:  # torch finds a GPU and cannot use it
        return None
    return None if runtime().why_not(device) else device


def strategy_fact(strategy: StrategySpec, gpu: torch.device | None, *, check: bool = False) -> Fact:
    """Return the backend that `auto` selects for a strategy, and the result of the check of its CUDA kernels."""
    if strategy.section == "wfst" and not is_installed("kaldifst"):
        return Fact(strategy.name, "needs [wfst] or a ready-made graph")
    if gpu is None:
        return Fact(strategy.name, "cpu")
    from nemo_gpu_decoding.search.self_check import checked, kept_verdict

    try:
        verdict = checked(strategy.name, gpu, again=True) if check else kept_verdict(strategy.name, gpu)
    except Exception as error:  # CUDA's libraries raise many types
        return Fact(strategy.name, "cuda", f"its kernels can't be checked: {error}".split("\n", 1)[0])
    if verdict is None:
        return Fact(strategy.name, "cuda", "its kernels are checked before the first decoding")
    if verdict.difference is None:
        return Fact(strategy.name, f"cuda, kernels checked in {verdict.seconds:.2f} s")
    return Fact(strategy.name, "cpu", f"its kernels fail their self-check: {verdict.difference}")


def installed_version(distribution: str) -> str:
    try:
        return importlib.metadata.version(distribution)
    except importlib.metadata.PackageNotFoundError:
        return NOT_INSTALLED
