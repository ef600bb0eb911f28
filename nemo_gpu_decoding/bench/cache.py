"""Files made once and kept between runs: unpacked ARPAs, LMs in a peer's own format, synthetic LMs."""

from __future__ import annotations

import gzip
import hashlib
import os
import shutil
import tempfile
from collections.abc import Callable
from pathlib import Path


def cache_dir() -> Path:
    """`$XDG_CACHE_HOME/nemo_gpu_decoding/bench`, by default below `~/.cache`; made if missing."""
    home = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    path = Path(home) / "nemo_gpu_decoding" / "bench"
    path.mkdir(parents=True, exist_ok=True)
    return path


def cached(name: str, make: Callable[[Path], None]) -> Path:
    """Path of the cached file `name`; `make(path)` writes it if it is not there yet.

    A run that is cut off leaves no half-written file: it is written aside and then renamed.
    """
    path = cache_dir() / name
    if not path.exists():
        with tempfile.TemporaryDirectory(dir=path.parent) as folder:
            fresh = Path(folder) / name
            make(fresh)
            fresh.replace(path)
    return path


def plain_file(path: str | Path) -> Path:
    """The file itself, or its unpacked copy if it ends in .gz."""
    path = Path(path)
    if path.suffix != ".gz":
        return path

    def unpack(target: Path) -> None:
        with gzip.open(path, "rb") as packed, target.open("wb") as plain:
            shutil.copyfileobj(packed, plain)

    return cached(f"{content_key(path)}-{path.stem}", unpack)


def content_key(path: str | Path) -> str:
    """Short digest of a file's content, for the names of files made from it."""
    digest = hashlib.sha256()
    with Path(path).open("rb") as file:
        for block in iter(lambda: file.read(1 << 20), b""):
            digest.update(block)
    return digest.hexdigest()[:16]
