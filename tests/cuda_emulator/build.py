"""Compiles a CUDA C++ file with g++ into a library that runs its kernels on the CPU.

Two parts are linked: the engine (engine/*.cpp: fibers, scheduler, race checker), ordinary C++ compiled
once, and the kernel's file behind include/cuda_emulator.h. With the checker, the kernel's part alone is
compiled with -fsanitize=thread and linked without ThreadSanitizer: the engine has the hooks.

Results are kept by content: sources, headers that they include, flags, and the emulator's own files.
"""

import contextlib
import functools
import hashlib
import os
import re
import shutil
import subprocess
import tempfile
from collections.abc import Iterable, Mapping
from pathlib import Path

import nemo_gpu_decoding
from nemo_gpu_decoding.cuda import nvrtc
from nemo_gpu_decoding.cuda.compile import Architecture, compiler_options, printed_header, read_source
from tests.cuda_emulator.ptx import translate

HERE = Path(__file__).parent
PACKAGE = Path(nemo_gpu_decoding.__file__).parent
COMPILER = "g++"
MOST_KEPT = 700  # libraries, those used last; some 200 kB each

# -g1: line numbers, for messages
COMMON_FLAGS = ["-std=c++17", "-g1", "-fPIC", "-fno-strict-aliasing", "-fno-gnu-unique", "-w"]
# -ffp-contract=off: no fused multiply-add, as the kernels' own --fmad=false. -O0: tests are small, so that -O1 would
# take a tenth off them, and many times as long to compile
KERNEL_FLAGS = [*COMMON_FLAGS, "-O0", "-ffp-contract=off"]
ENGINE_FLAGS = [*COMMON_FLAGS, "-O2"]
# volatile accesses get hooks of their own, since they count as atomic. -O1: else records are copied without hooks
CHECK_FLAGS = ["-O1", "-fsanitize=thread", "--param=tsan-distinguish-volatile=1"]

PTX_ARCHITECTURE = Architecture(90, ptx=True)

INCLUDE = re.compile(r'^[ \t]*#[ \t]*include[ \t]*"([^"]+)"', re.MULTILINE)
KERNEL = re.compile(
    r'extern\s+"C"\s+__global__\s+(?:__launch_bounds__\s*\([^)]*\)\s*)?void\s+'
    r"(?:__launch_bounds__\s*\([^)]*\)\s*)?(\w+)\s*\("
)


class CompileError(RuntimeError):
    """g++ refused a kernel; holds its messages."""


def why_no_compiler() -> str | None:
    """None if kernels can be compiled here, else why not."""
    if shutil.which(COMPILER) is None:
        return f"the emulator compiles kernels with {COMPILER}, which is not installed"
    if os.uname().machine not in ("x86_64", "aarch64"):
        return f"the emulator switches stacks on x86_64 and aarch64, this is {os.uname().machine}"
    return None


def build(source: Path, cache: Path, *, check: bool, defines: Mapping[str, int | str], by_nvrtc: bool = False) -> Path:
    """The library of a .cu file; compiled at first use.

    Args:
        source: the file; its `#include "..."` are found beside it and from the package's root.
        cache: where libraries are kept.
        check: instrument memory accesses for the race and bounds checker.
        defines: preprocessor macros.
        by_nvrtc: compile the file as for a GPU, and translate the PTX that comes out; `check` is then a
            matter of launches alone.

    Raises:
        FileNotFoundError: the source, or a header that it includes, is not there.
        CompileError: with g++'s messages.
    """
    texts = _texts(source)
    macros = [f"-D{name}={value}" for name, value in sorted(defines.items())]
    flags = [*KERNEL_FLAGS, *macros, *(CHECK_FLAGS if check and not by_nvrtc else [])]
    options = compiler_options(PTX_ARCHITECTURE, defines) if by_nvrtc else []  # NVRTC's
    how = [*flags, *options]
    if by_nvrtc:
        how.insert(len(flags), str(nvrtc.version()))
    key = _key([*texts.values(), *_emulator_texts(by_nvrtc), *how])
    library = cache / f"{source.stem}-{key}.so"
    if library.exists():
        os.utime(library)
    else:
        cache.mkdir(parents=True, exist_ok=True)
        _forget_oldest(cache)
        with tempfile.TemporaryDirectory(dir=cache) as folder:
            if by_nvrtc:
                built = link_ptx(_ptx(source, options), cache, Path(folder))
            else:
                _write_printed(texts, Path(folder))
                built = _link(source, flags, _engine(cache), Path(folder))
            # In one step. Where another process was faster its file stays: by its name that process finds lines.
            with contextlib.suppress(FileExistsError):
                os.link(built, library)
    return library


def _forget_oldest(cache: Path) -> None:
    """Make room for one more library: every edit of a kernel leaves one behind."""
    libraries = sorted(cache.glob("*.so"), key=_last_use, reverse=True)
    for library in libraries[MOST_KEPT - 1 :]:
        library.unlink(missing_ok=True)


def _last_use(library: Path) -> float:
    try:
        return library.stat().st_mtime
    except FileNotFoundError:  # another process has made room, too
        return 0.0


def _link(source: Path, flags: list[str], engine: Path, folder: Path) -> Path:
    places = ["-I", str(HERE / "include"), "-I", str(PACKAGE), "-I", str(folder)]
    # without the emulator's headers, in which __global__ means nothing
    text = _run([COMPILER, *flags, *places, "-D__CUDA_EMULATOR__", "-E", "-P", "-x", "c++", str(source)])
    kernels = KERNEL.findall(text)
    wrapper = folder / "wrapper.cpp"
    entries = "".join(f"EMULATOR_ENTRY({kernel})\n" for kernel in kernels)
    wrapper.write_text(f'#include "{source}"\n{entries}EMULATOR_KERNELS("{" ".join(kernels)}")\n')
    return _library(wrapper, [*flags, *places, "-include", "cuda_emulator.h"], engine)


def _ptx(source: Path, options: list[str]) -> str:
    """What NVRTC makes of a file: the text that a driver would compile further."""
    found = read_source(str(source))
    compiled = nvrtc.compile_program(str(source), found.text, found.headers, options)
    return compiled.code.rstrip(b"\0").decode()


def link_ptx(ptx: str, cache: Path, folder: Path) -> Path:
    """The library of a PTX module, made in `folder`."""
    translated = folder / "translated.cpp"
    translated.write_text(translate(ptx))
    return _library(translated, [*KERNEL_FLAGS, "-I", str(HERE / "include")], _engine(cache))


def _library(text: Path, flags: list[str], engine: Path) -> Path:
    """The kernels of a C++ file and the engine, beside the file."""
    kernel_object, library = text.with_suffix(".o"), text.with_suffix(".so")
    _run([COMPILER, *flags, "-c", str(text), "-o", str(kernel_object)])
    # -Bsymbolic: a kernel may be named like a function of the C library
    _run([COMPILER, "-shared", "-Wl,-Bsymbolic", str(kernel_object), str(engine), "-o", str(library)])
    return library


def _engine(cache: Path) -> Path:
    engine = cache / f"engine-{_key([*_emulator_texts(False), *ENGINE_FLAGS])}.o"
    if not engine.exists():
        sources = sorted(str(path) for path in (HERE / "engine").glob("*.cpp"))
        with tempfile.TemporaryDirectory(dir=cache) as folder:
            built = Path(folder) / "engine.o"
            link = ["-r", "-nostdlib", "-I", str(HERE / "include")]
            _run([COMPILER, *ENGINE_FLAGS, *link, *sources, "-o", str(built)])
            os.replace(built, engine)
    return engine


def _run(command: list[str]) -> str:
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        raise CompileError(f"{' '.join(command)}\n{done.stderr}")
    return done.stdout


_known: dict[Path, tuple[dict[Path, str], list[tuple[Path, tuple[int, int]]]]] = {}  # texts, states of files


def _texts(source: Path) -> dict[Path, str]:
    """The text of a file and of its quoted includes; read again only if one of these files has changed."""
    texts, states = _known.get(source, ({}, []))
    if not texts or any(_state(path) != state for path, state in states):
        texts = _read_texts(source)
        _known[source] = texts, [(path, _state(path)) for path in texts if path.is_absolute()]
    return texts


def _state(path: Path) -> tuple[int, int]:
    try:
        found = os.stat(path)
    except FileNotFoundError:
        return 0, 0
    return found.st_mtime_ns, found.st_size


def _read_texts(source: Path) -> dict[Path, str]:
    texts: dict[Path, str] = {}
    todo = [(source, source.read_text())]
    while todo:
        path, text = todo.pop()
        if path in texts:
            continue
        texts[path] = text
        for name in INCLUDE.findall(text):
            found = [folder / name for folder in (path.parent, PACKAGE) if (folder / name).is_file()]
            printed = printed_header(name)
            if not found and printed is None:
                raise FileNotFoundError(f"{path} includes {name}: not beside it, not in {PACKAGE}")
            todo.append((found[0], found[0].read_text()) if found else (Path(name), printed or ""))
    return texts


def _write_printed(texts: Mapping[Path, str], folder: Path) -> None:
    """Write the headers that are no files, those with relative names, to a folder."""
    for name, text in texts.items():
        if not name.is_absolute():
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            (folder / name).write_text(text)


@functools.cache
def _emulator_texts(by_nvrtc: bool) -> list[str]:
    files = [*sorted(HERE.glob("include/*.h")), *sorted(HERE.glob("engine/*")), *[HERE / "ptx.py"] * by_nvrtc]
    return [path.read_text() for path in files]


def _key(parts: Iterable[str]) -> str:
    return hashlib.sha256("\0".join(parts).encode()).hexdigest()[:20]
