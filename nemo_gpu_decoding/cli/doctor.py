"""`nemo-gpu-decoding doctor` prints what this machine has, and the backend of each strategy on it.

The functions import what they examine, so that `--help` imports no torch.
"""

import importlib.metadata
import importlib.util
import json
import os
import platform
import shutil
import subprocess
import tempfile
from dataclasses import asdict, dataclass

from nemo_gpu_decoding import __version__
from nemo_gpu_decoding.extras import MODULES, install_command, is_installed
from nemo_gpu_decoding.nemo_plugin.register import STRATEGIES
from nemo_gpu_decoding.plain_text import format_table

SUPPORTED_NEMO = "2.7 .. 3.0"
HEADS = {"ctc": "CTC, hybrid", "rnnt": "RNN-T, TDT, hybrid"}  # by family of strategies
USED = "tensors on the GPU are decoded there"
EXAMPLES = ("", "json=true", "check=true")


@dataclass
class DoctorOptions:
    """Options of `doctor`."""

    # Print JSON instead of tables, for scripts and bug reports.
    json: bool = False
    # On a GPU, check each strategy's kernels now, and show the time of the check. Without it, the table shows the
    # state: strategies are checked before they decode on a GPU for the first time.
    check: bool = False


OPTIONS = DoctorOptions


@dataclass(frozen=True)
class Fact:
    """One line of the report."""

    name: str
    found: str
    advice: str = ""  # what to do about it, if anything


@dataclass(frozen=True)
class StrategyPath:
    """The backend of one strategy on this machine."""

    strategy: str
    models: str  # which models it decodes
    path: str  # "cuda" or "cpu"
    why: str
    check: str  # of the kernels on the current GPU


def run(options: DoctorOptions) -> int:
    """Print the facts. This loads no model, does not import NeMo and changes nothing but the verdicts of checks."""
    facts = examine()
    paths = strategy_paths(check=options.check)
    if options.json:
        answer = {"facts": list(map(asdict, facts)), "strategies": list(map(asdict, paths))}
        print(json.dumps(answer, indent=2))
        return 0
    print(format_table(["what", "found", "advice"], [list(vars(fact).values()) for fact in facts]))
    print()
    print(format_table(["strategy", "models", "path", "why", "check"], [list(vars(p).values()) for p in paths]))
    return 0


def examine() -> list[Fact]:
    """Return all facts, from Python and torch up to the plugin."""
    return [
        Fact("nemo-gpu-decoding", __version__),
        Fact("Python", f"{platform.python_version()} on {platform.system()} {platform.machine()}"),
        Fact("CPU cores", str(len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count())),
        *torch_facts(),
        driver_fact(),
        cuda_python_fact(),
        nvrtc_fact(),
        kernels_fact(),
        nemo_fact(),
        registration_fact(),
        *extra_facts(),
        *numba_facts(),
    ]


def torch_facts() -> list[Fact]:
    """Return torch's build, its GPU and the default number of CPU threads of the decoders."""
    import torch

    from nemo_gpu_decoding.cuda.launch import runtime

    build = f"built for CUDA {torch.version.cuda}" if torch.version.cuda else "CPU build"
    facts = [Fact("torch", f"{torch.__version__}, {build}")]
    if torch.cuda.is_available():
        for index in range(torch.cuda.device_count()):
            device = torch.cuda.get_device_properties(index)
            memory = f"{device.total_memory / 2**30:.0f} GiB"
            shown = f"{device.name}, {memory}, sm_{device.major}{device.minor}"
            why_not = runtime().why_not(torch.device("cuda", index))
            facts.append(Fact(f"GPU {index}", shown, f"no CUDA kernels: {why_not}" if why_not else ""))
    else:
        facts.append(Fact("GPU", "none that torch can use", gpu_advice(torch.version.cuda is not None)))
    return [*facts, Fact("CPU threads", str(torch.get_num_threads()), "OMP_NUM_THREADS=N changes it")]


def gpu_advice(cuda_build: bool) -> str:
    """Return what is missing, which is a GPU, a driver or a CUDA build of torch."""
    if shutil.which("nvidia-smi") is None:
        return "decoding runs on the CPU"
    if cuda_build:
        return "there is a driver, but torch finds no device: see CUDA_VISIBLE_DEVICES and `nvidia-smi`"
    return "there is a driver, but torch is a CPU build: install a CUDA build of torch"


def driver_fact() -> Fact:
    """Return the version of NVIDIA's driver that nvidia-smi reports."""
    tool = shutil.which("nvidia-smi")
    if tool is None:
        return Fact("NVIDIA driver", "none")
    query = [tool, "--query-gpu=driver_version", "--format=csv,noheader"]
    try:
        answer = subprocess.run(query, capture_output=True, text=True, check=False, timeout=30)
    except (OSError, subprocess.TimeoutExpired) as error:
        return Fact("NVIDIA driver", "nvidia-smi does not answer", f"{error}"[:80])
    if answer.returncode:
        return Fact("NVIDIA driver", "nvidia-smi fails", (answer.stdout + answer.stderr).strip()[:80])
    return Fact("NVIDIA driver", answer.stdout.split("\n", 1)[0].strip())


def cuda_python_fact() -> Fact:
    from nemo_gpu_decoding.cuda.availability import install_advice

    version = installed_version("cuda-bindings")
    advice = f"only needed on a GPU: {install_advice()}"
    return Fact("cuda-python", version or "not installed", "" if version else advice)


def nvrtc_fact() -> Fact:
    """Return the version of NVRTC, which compiles kernels; torch's CUDA builds bring it."""
    from nemo_gpu_decoding.cuda import nvrtc

    try:
        major, minor = nvrtc.version()
    except Exception as error:  # the loader raises many types for a missing library
        return Fact("NVRTC", "not usable", f"only needed on a GPU ({type(error).__name__})")
    return Fact("NVRTC", f"{major}.{minor}")


def kernels_fact() -> Fact:
    """Return whether CUDA kernels run here, and if not, the reason."""
    why_not = cuda_obstacle()
    return Fact("CUDA kernels", "not available" if why_not else "run on the GPU", why_not or "")


def cuda_obstacle() -> str | None:
    """Return the reason why CUDA kernels cannot run on the current GPU, or None if they can."""
    import torch

    from nemo_gpu_decoding.cuda.launch import runtime

    try:
        device = runtime().device_for(torch.device("cuda"))
    except RuntimeError as error:  # torch finds a GPU and can't use it
        return str(error).split("\n", 1)[0]
    return runtime().why_not(device)


def nemo_fact() -> Fact:
    version = installed_version("nemo_toolkit")
    if version is None:
        return Fact("NeMo", "not installed", f"{install_command('nemo')} (plain log-probs need none)")
    supported = (2, 7) <= tuple(int(part) for part in version.split(".")[:2]) < (3, 1)
    return Fact("NeMo", version, "" if supported else f"tested with {SUPPORTED_NEMO}")


def registration_fact() -> Fact:
    """Return whether NeMo finds the strategies without a call of register()."""
    try:
        is_found = importlib.util.find_spec("hydra_plugins.nemo_gpu_decoding") is not None
    except ModuleNotFoundError:
        is_found = False
    if is_found:
        return Fact("plugin", "registers itself when NeMo is imported")
    return Fact("plugin", "does not register itself", "call nemo_gpu_decoding.register()")


def extra_facts() -> list[Fact]:
    """Return the extras that are not complete."""
    missing = {extra: [name for name in modules if not is_installed(name)] for extra, modules in MODULES.items()}
    return [Fact(f"[{e}]", f"no {', '.join(names)}", install_command(e)) for e, names in missing.items() if names]


def numba_facts() -> list[Fact]:
    """Return numba's version and its cache of compiled code. Without a cache every process compiles again."""
    from nemo_gpu_decoding.jit import CACHE_VARIABLE, cache_folder

    folder = cache_folder()
    lasting = not folder.is_relative_to(tempfile.gettempdir())
    advice = "" if lasting else f"a temporary folder: {CACHE_VARIABLE}=FOLDER names a lasting one"
    return [Fact("numba", installed_version("numba") or "not installed"), Fact("compiled code", str(folder), advice)]


def strategy_paths(*, check: bool = False) -> list[StrategyPath]:
    """Return the registered strategies and the backend that `auto` means. With `check`, check kernels now."""
    from nemo_gpu_decoding.cuda.compile import kernel_files

    why_not = cuda_obstacle() if kernel_files() else "it has no CUDA kernels in this version"
    lacking = f"{install_command('wfst')}; ready-made graphs need none"
    builds = is_installed("kaldifst")
    return [
        _path_of(s.name, HEADS[s.family], why_not, check)
        if builds or s.section != "wfst"
        else StrategyPath(s.name, HEADS[s.family], "needs [wfst]", lacking, "")
        for s in STRATEGIES.values()
    ]


def _path_of(strategy: str, models: str, why_not: str | None, check: bool) -> StrategyPath:
    if why_not:
        return StrategyPath(strategy, models, "cpu", why_not, "")
    import torch

    from nemo_gpu_decoding.cuda.launch import runtime
    from nemo_gpu_decoding.search.self_check import checked, kept_verdict

    device = runtime().device_for(torch.device("cuda"))
    try:
        verdict = checked(strategy, device, again=True) if check else kept_verdict(strategy, device)
    except Exception as error:  # CUDA's libraries raise many types
        return StrategyPath(strategy, models, "cuda", USED, f"can't be checked: {error}".split("\n", 1)[0])
    if verdict is None:
        return StrategyPath(strategy, models, "cuda", USED, "before the first decoding")
    if verdict.difference is None:
        return StrategyPath(strategy, models, "cuda", USED, f"passed in {verdict.seconds:.2f} s")
    return StrategyPath(strategy, models, "cpu", "the kernels fail their self-check", verdict.difference)


def installed_version(distribution: str) -> str | None:
    try:
        return importlib.metadata.version(distribution)
    except importlib.metadata.PackageNotFoundError:
        return None
