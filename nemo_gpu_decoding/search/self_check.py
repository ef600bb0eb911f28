"""Check the CUDA kernels against the CPU search. Before a strategy decodes on a GPU for the first time, its kernels
must give the CPU search's results on small problems (`built_in_problems.py`).

The problems run in a separate process. So a kernel that faults or hangs does not harm this process, and the check may
run while this process captures a CUDA graph. The result is stored on disk for this GPU type, driver, version and
kernel sources, so that a machine checks each combination once.
"""

import hashlib
import json
import logging
import os
import subprocess
import sys
import threading
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path

import torch

from nemo_gpu_decoding import __version__
from nemo_gpu_decoding.cache import one_process_at_a_time
from nemo_gpu_decoding.container import written_whole
from nemo_gpu_decoding.cuda import compile as kernels
from nemo_gpu_decoding.cuda.availability import driver_version

logger = logging.getLogger("nemo_gpu_decoding")

# strategy -> folder of its kernels
KERNELS = {
    "flexctc_beam": "flexctc_beam", "alsd_pp": "transducer", "aes_pp": "transducer",
    "cuda_wfst": "word_graph", "paged_biglm": "word_graph",
}  # fmt: skip
DRIVER = Path("/proc/driver/nvidia/version")  # of Linux
LONGEST = 1800.0  # seconds; compiling takes minutes on a slow machine
REPORT = "please report this with the output of `nemo-gpu-decoding doctor check=true`"

_lock = threading.Lock()
_reasons: dict[tuple[str, int], str | None] = {}  # by strategy and number of the GPU


@dataclass(frozen=True)
class Verdict:
    """The result of a check of a strategy's kernels."""

    difference: str | None  # the first one, or the fault of a kernel; None: there is none
    seconds: float = 0.0  # of the problems, after compiling
    is_kept: bool = True  # False: the next process checks again


def why_distrusted(strategy: str, device: torch.device) -> str | None:
    """Return None if a strategy's kernels passed the check on `device`, else why not. The first call checks them."""
    if device.type != "cuda" or strategy not in KERNELS:
        return None
    key = strategy, device.index
    if key not in _reasons:
        with _lock:
            if key not in _reasons:
                _reasons[key] = _reason(strategy, device)
    return _reasons[key]


def _reason(strategy: str, device: torch.device) -> str | None:
    difference = checked(strategy, device).difference
    if difference is None:
        return None
    reason = f"the CUDA kernels of {strategy} fail their self-check on {_gpu(device)}: {difference}; {REPORT}"
    logger.warning("%s", reason)
    return reason


def checked(strategy: str, device: torch.device, *, again: bool = False) -> Verdict:
    """Return the stored result for a strategy's kernels; check them now if there is none, or with `again`."""
    path = _path(strategy, device)
    path.parent.mkdir(parents=True, exist_ok=True)
    with one_process_at_a_time(path.with_suffix(".lock")):
        if not again and (kept := kept_verdict(strategy, device)):
            return kept
        logger.info("checking the CUDA kernels of %s on %s, once for this machine", strategy, _gpu(device))
        verdict = _in_a_process(strategy, device)
        if verdict is None:  # the GPU admits one process, or its memory is full
            from nemo_gpu_decoding.search.built_in_problems import verdict_on

            verdict = verdict_on(strategy, device)
        if verdict.is_kept:
            with suppress(OSError), written_whole(path) as temporary:
                temporary.write_text(json.dumps(asdict(verdict)))
        return verdict


def kept_verdict(strategy: str, device: torch.device) -> Verdict | None:
    """Return the verdict on disk, or None if these kernels were not checked on this machine."""
    try:
        return Verdict(**json.loads(_path(strategy, device).read_text()))
    except (OSError, ValueError, TypeError):  # missing, or damaged
        return None


def _path(strategy: str, device: torch.device) -> Path:
    """Return the file of a result; its name is a hash of everything on which the result depends."""
    arch = kernels.architecture(torch.cuda.get_device_capability(device))
    assert arch is not None, "availability.py has looked at this"
    names = [name for name in kernels.kernel_files() if name.startswith(f"search/{KERNELS[strategy]}/")]
    options = kernels.compiler_options(arch)
    entries = [kernels.entry_name(kernels.read_source(name), arch, options) for name in names]
    driver = DRIVER.read_text() if DRIVER.exists() else ""
    key = hashlib.sha256(json.dumps([__version__, torch.__version__, _gpu(device), driver, entries]).encode())
    return kernels.kernel_cache().parent / "self_check" / f"{strategy}-{key.hexdigest()[:32]}.json"


def _gpu(device: torch.device) -> str:
    """Return the type of a GPU, and its driver."""
    major, minor = torch.cuda.get_device_capability(device)
    cuda = "{}.{}".format(*driver_version())
    return f"{torch.cuda.get_device_name(device)} (sm_{major}{minor}, driver for CUDA {cuda})"


def _in_a_process(strategy: str, device: torch.device) -> Verdict | None:
    """Run the check in a new process; return its result, or None if the process cannot use the GPU."""
    command = [sys.executable, "-m", "nemo_gpu_decoding.search.built_in_problems", strategy, str(device.index)]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=LONGEST, env=environment)
        answer = json.loads(done.stdout)
    except subprocess.TimeoutExpired:
        return Verdict(f"no result after {LONGEST:.0f} seconds")
    except OSError:
        return None
    except ValueError:  # no answer
        last_line = done.stderr.strip().rpartition("\n")[2]
        return Verdict(f"the process of the check ends with {done.returncode}: {last_line}", is_kept=False)
    return answer and Verdict(**answer)


def name_fault(strategy: str, error: RuntimeError) -> None:
    """Add the strategy's name to the message of a GPU fault; other errors stay as they are."""
    if "CUDA" in str(error):
        advice = "" if isinstance(error, torch.cuda.OutOfMemoryError) else f"\nRestart this process, and {REPORT}."
        error.args = (f"{strategy} stops on the GPU: {error}{advice}", *error.args[1:])
