"""Compile CUDA C++ to CUBIN or PTX with NVRTC through cuda-python, without a driver or GPU."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

SUCCESS = 0


class CompileError(RuntimeError):
    """An error of a kernel that does not compile; the message is NVRTC's log with files and lines."""


@dataclass(frozen=True)
class Compiled:
    """The code that NVRTC returns for one program."""

    code: bytes  # CUBIN or PTX
    log: str  # warnings, and the output of other options


@lru_cache(maxsize=1)
def version() -> tuple[int, int]:
    """Return the major and minor version of the NVRTC library that cuda-python finds."""
    major, minor = _checked("nvrtcVersion", _bindings().nvrtcVersion())
    return int(major), int(minor)


@lru_cache(maxsize=1)
def architectures() -> tuple[int, ...]:
    """Return the GPU architectures that this NVRTC compiles for: 90 means sm_90."""
    (values,) = _checked("nvrtcGetSupportedArchs", _bindings().nvrtcGetSupportedArchs())
    return tuple(sorted(int(value) for value in values))


def compile_program(name: str, text: str, headers: Mapping[str, str], options: Sequence[str]) -> Compiled:
    """Compile one translation unit.

    Args:
        name: name of the unit in messages.
        text: CUDA C++.
        headers: name in #include -> text.
        options: NVRTC's options; "--gpu-architecture=sm_90" compiles to CUBIN, "compute_90" to PTX.
    """
    nvrtc = _bindings()
    names = [header.encode() for header in headers]
    texts = [body.encode() for body in headers.values()]
    created = nvrtc.nvrtcCreateProgram(text.encode(), name.encode(), len(names), texts, names)
    (program,) = _checked("nvrtcCreateProgram", created)
    try:
        (status,) = nvrtc.nvrtcCompileProgram(program, len(options), [o.encode() for o in options])
        log = _read(nvrtc.nvrtcGetProgramLogSize, nvrtc.nvrtcGetProgramLog, program)
        message = log.rstrip(b"\0 \n").decode(errors="replace")
        if int(status) != SUCCESS:
            raise CompileError(f"{name} does not compile with {' '.join(options)}:\n{message or status}")
        if any(option.startswith("--gpu-architecture=compute_") for option in options):
            return Compiled(_read(nvrtc.nvrtcGetPTXSize, nvrtc.nvrtcGetPTX, program), message)
        return Compiled(_read(nvrtc.nvrtcGetCUBINSize, nvrtc.nvrtcGetCUBIN, program), message)
    finally:
        nvrtc.nvrtcDestroyProgram(program)


def _bindings() -> Any:
    from cuda.bindings import nvrtc

    return nvrtc


def _read(size_of: Any, read: Any, program: Any) -> bytes:
    (size,) = _checked(size_of.__name__, size_of(program))
    content = bytearray(size)  # the library writes into it; Python shares short `bytes` objects
    _checked(read.__name__, read(program, content))
    return bytes(content)


def _checked(call: str, result: tuple[Any, ...]) -> tuple[Any, ...]:
    status, *values = result
    if int(status) != SUCCESS:
        raise RuntimeError(f"{call} fails with {status}")
    return tuple(values)
