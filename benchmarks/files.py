"""Files that are created once and kept between runs."""

from __future__ import annotations

import gzip
import hashlib
import os
import shutil
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path


def cache_dir() -> Path:
    """`$XDG_CACHE_HOME/nemo_gpu_decoding/bench`, by default below `~/.cache`; made if missing."""
    home = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    path = Path(home) / "nemo_gpu_decoding" / "bench"
    path.mkdir(parents=True, exist_ok=True)
    return path


def cached(name: str, make: Callable[[Path], object]) -> Path:
    """Path of the cached file `name`; `make(path)` writes it (aside, then renamed) if missing."""
    path = cache_dir() / name
    if not path.exists():
        print(f"making {name}, once; kept in {path.parent}", file=sys.stderr, flush=True)
        with tempfile.TemporaryDirectory(dir=path.parent) as folder:
            make(Path(folder) / name)
            (Path(folder) / name).replace(path)
    return path


def plain_file(path: str | Path | None) -> Path | None:
    """The file itself, or its unpacked copy if it ends in .gz."""
    if path is None or Path(path).suffix != ".gz":
        return None if path is None else Path(path)

    def unpack(target: Path) -> None:
        with gzip.open(path, "rb") as packed, target.open("wb") as plain:
            shutil.copyfileobj(packed, plain)

    return cached(f"{content_key(path)}-{Path(path).stem}", unpack)


def content_key(path: str | Path) -> str:
    """Short digest of a file's content, for the names of files made from it."""
    digest = hashlib.sha256()
    with Path(path).open("rb") as file:
        for block in iter(lambda: file.read(1 << 20), b""):
            digest.update(block)
    return digest.hexdigest()[:16]
