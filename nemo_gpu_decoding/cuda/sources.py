"""A kernel's source text and the headers that it includes.

Names of headers are relative to the package: `#include "cuda/common.cuh"`. A header x.cuh without a file is
printed from the records of x.py, see `records.py`. NVRTC gets all headers as texts, so it needs no include
folders, and the key of the compile cache covers all texts of a kernel.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path, PurePosixPath

from nemo_gpu_decoding.cuda.records import header_of

PACKAGE = Path(__file__).parent.parent

_INCLUDE = re.compile(r'^[ \t]*#[ \t]*include[ \t]*"([^"]+)"', re.MULTILINE)


@dataclass(frozen=True)
class Source:
    """One translation unit."""

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
    """The text of a header x.cuh that is printed from the records of x.py; None if there is no x.py."""
    module = PurePosixPath(name).with_suffix("")
    if not (PACKAGE / module).with_suffix(".py").is_file():
        return None
    return header_of(".".join([PACKAGE.name, *module.parts]))


def kernel_files(root: Path = PACKAGE) -> list[str]:
    """The names of all kernel files of the package, sorted."""
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
