"""numba's cache on disk; if the disk is full or a file is damaged, the code is compiled again."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

from numba.core import caching
from numba.core.caching import CompileResultCacheImpl, FunctionCache

logger = logging.getLogger("nemo_gpu_decoding")

_INTERNALS: Any = caching
# numba before 0.62 has the second name
_FOLDER_LOCATOR = getattr(caching, "UserProvidedCacheLocator", None) or _INTERNALS._UserProvidedCacheLocator
_warned: set[str] = set()  # folders with a warning so far


class _FolderOnly(CompileResultCacheImpl):
    """Entries in the folder `numba.core.config.CACHE_DIR` only.

    numba's other folders may contain stale code, because their names have no fingerprint of all sources.
    """

    _locator_classes = [_FOLDER_LOCATOR]  # noqa: RUF012  (as numba declares it)


class ForgivingCache(FunctionCache):
    """The cache of a function; its errors become warnings, one per folder.

    Raises:
        RuntimeError: numba cannot write to the folder; raised by the constructor.
    """

    _impl_class = _FolderOnly

    def load_overload(self, sig: Any, target_context: Any) -> Any:
        try:
            return super().load_overload(sig, target_context)
        except Exception as error:  # damaged pickles raise errors of many types
            warn_once(self.cache_path, error)
            self._remove_index()
            return None

    def save_overload(self, sig: Any, data: Any) -> None:
        try:
            super().save_overload(sig, data)
        except Exception as error:  # OSError of the disk, or a damaged index that another process has written
            warn_once(self.cache_path, error)
            self.disable()

    def _remove_index(self) -> None:
        try:
            Path(self._cache_file._index_path).unlink(missing_ok=True)
        except OSError:
            self.disable()


def warn_once(folder: Any, error: Exception) -> None:
    """Warn once per folder and version that its compiled code is not used."""
    root = next(
        (str(parent) for parent in [Path(folder), *Path(folder).parents] if "jit-" in parent.name), str(folder)
    )
    if root not in _warned:
        _warned.add(root)
        logger.warning(
            "the cache of compiled code in %s cannot be used (%s: %s); what it lacks is compiled for this process",
            root, type(error).__name__, error,
        )  # fmt: skip
