"""Read the package's kernel files and compile them for the driver, with a cache on disk that processes may share."""

import hashlib
import json
import logging
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import NamedTuple

from nemo_gpu_decoding.container import written_whole
from nemo_gpu_decoding.cuda import nvrtc
from nemo_gpu_decoding.cuda.records import header_of
from nemo_gpu_decoding.jit import cache_folder

logger = logging.getLogger("nemo_gpu_decoding")

PACKAGE = Path(__file__).parent.parent

_INCLUDE = re.compile(r'^[ \t]*#[ \t]*include[ \t]*"([^"]+)"', re.MULTILINE)


@dataclass(frozen=True)
class Source:
    """One translation unit that NVRTC compiles."""

    name: str  # relative to the package, with slashes; compilers show it in messages
    text: str
    headers: dict[str, str]  # name in #include -> text, including headers of headers


def read_source(name: str, root: Path = PACKAGE) -> Source:
    """Read a kernel file and, recursively, its headers."""
    text = _read(root, name, needed_by=None)
    headers: dict[str, str] = {}
    open_ends = [(name, text)]
    while open_ends:
        includer, body = open_ends.pop()
        for header in _INCLUDE.findall(body):
            if header not in headers:
                headers[header] = _read(root, header, needed_by=includer)
                open_ends.append((header, headers[header]))
    return Source(name, text, headers)


def printed_header(name: str) -> str | None:
    """Return the text of the header x.cuh, generated from the records of x.py, or None if there is no x.py."""
    module = PurePosixPath(name).with_suffix("")
    if not (PACKAGE / module).with_suffix(".py").is_file():
        return None
    return header_of(".".join([PACKAGE.name, *module.parts]))


def kernel_files(root: Path = PACKAGE) -> list[str]:
    """Return the names of all kernel files of the package, sorted."""
    return sorted(path.relative_to(root).as_posix() for path in root.rglob("*.cu"))


def _read(root: Path, name: str, needed_by: str | None) -> str:
    try:
        return (root / name).read_text(encoding="utf-8")
    except FileNotFoundError:
        printed = printed_header(name)
        if printed is not None:
            return printed
        where = f" (included by {needed_by})" if needed_by else ""
        raise FileNotFoundError(f"kernel source {name}{where} is not in {root}") from None


# --fmad=false: a fused multiply-add rounds once, the CPU rounds twice; results would differ.
# --device-as-default-execution-space: the emulator's compiler reads the same text, without __device__.
OPTIONS = ("--std=c++17", "--fmad=false", "-lineinfo", "--device-as-default-execution-space")

Defines = Mapping[str, "int | str"]


class Architecture(NamedTuple):
    """The architecture that a compilation targets."""

    number: int  # 90 for sm_90
    ptx: bool = False  # True: the driver compiles it to machine code for the present device


def kernel_code(source: str, arch: Architecture, defines: Defines | None = None) -> bytes:
    """Return a kernel file as CUBIN (or PTX), from the disk cache or compiled now.

    Args:
        source: path relative to the package, "search/flexctc_beam/kernel.cu".
        arch: see `architecture`.
        defines: preprocessor macros.

    Raises:
        CompileError: with NVRTC's log, which names file and line.
        FileNotFoundError: a header is missing.
        ImportError, RuntimeError: there is no usable NVRTC.
    """
    text = read_source(source)
    options = compiler_options(arch, defines)
    path = kernel_cache() / entry_name(text, arch, options)
    kept = _read_entry(path)
    if kept is not None:
        return kept
    logger.info("compiling %s for %s, once for this machine", source, _target(arch))
    compiled = nvrtc.compile_program(text.name, text.text, text.headers, options)
    if compiled.log:
        logger.debug("NVRTC on %s: %s", source, compiled.log)
    _write_entry(path, compiled.code)
    return compiled.code


def compiler_options(arch: Architecture, defines: Defines | None = None) -> list[str]:
    """Return the options of NVRTC, in a fixed order."""
    macros = [f"--define-macro={name}={value}" for name, value in sorted((defines or {}).items())]
    return [f"--gpu-architecture={_target(arch)}", *OPTIONS, *macros]


def architecture(capability: tuple[int, int]) -> Architecture | None:
    """Return the architecture to compile for on a device of this compute capability, or None.

    Machine code runs on later minor versions of its major version. If a GPU is newer than the compiler, the code is
    that for the nearest older GPU of the same major version or, if there is none, PTX.
    """
    older = [number for number in nvrtc.architectures() if divmod(number, 10) <= capability]
    if not older:
        return None
    nearest = max(older)
    return Architecture(nearest, ptx=nearest // 10 != capability[0])


def _target(arch: Architecture) -> str:
    return f"{'compute' if arch.ptx else 'sm'}_{arch.number}"


def kernel_cache() -> Path:
    """Return the folder of compiled kernels, beside numba's compiled loops."""
    return cache_folder() / "cubin"


def entry_name(source: Source, arch: Architecture, options: list[str]) -> str:
    """Return the file name of a cache entry, a hash of all inputs of the compiler, so that no entry becomes stale."""
    parts = [nvrtc.version(), options, source.name, source.text, sorted(source.headers.items())]
    key = hashlib.sha256(json.dumps(parts).encode()).hexdigest()
    label = source.name.removesuffix(".cu").replace("/", "-")
    return f"{label}-{_target(arch)}-{key[:32]}.{'ptx' if arch.ptx else 'cubin'}"


def _read_entry(path: Path) -> bytes | None:
    """Return the code in a cache entry, or None if the entry is missing or damaged."""
    try:
        entry = path.read_bytes()
    except OSError:
        return None
    digest, content = entry[:32], entry[32:]
    if hashlib.sha256(content).digest() == digest:
        return content
    logger.warning("%s is damaged, compiling the kernel anew", path)
    return None


def _write_entry(path: Path, content: bytes) -> None:
    try:
        with written_whole(path) as temporary:
            temporary.write_bytes(hashlib.sha256(content).digest() + content)
    except OSError as error:
        logger.warning("can't keep a compiled kernel in %s (%s), it serves this process", path, error)
