"""Optional dependencies: the modules that each extra of pyproject.toml brings, and one message if some are missing."""

from __future__ import annotations

import sys
from importlib.util import find_spec

# extra -> the modules of it that are imported, the one that its users know first
MODULES: dict[str, tuple[str, ...]] = {
    "nemo": ("nemo", "soundfile", "hydra", "lhotse", "webdataset", "fsspec", "sentencepiece", "transformers"),
    "wfst": ("kaldifst", "sentencepiece"),
    "serve": ("starlette", "uvicorn", "websockets", "prometheus_client", "soxr"),
    "cluster": ("ray", "pyarrow"),
    "plot": ("matplotlib",),
    "demo": ("rich",),
}


def require(*names: str) -> None:
    """Check that optional dependencies are installed, without importing them.

    Args:
        names: extras of pyproject.toml, or single modules of one.

    Raises:
        ModuleNotFoundError: some are missing. The message has the command that installs them.
    """
    missing: dict[str, str] = {}  # extra -> its first missing module
    for name in names:
        for module in MODULES.get(name, (name,)):
            extra = name if name in MODULES else extra_of(module)
            if extra not in missing and not is_installed(module):
                missing[extra] = module
    if missing:
        verb = "is" if len(missing) == 1 else "are"
        raise ModuleNotFoundError(
            f"{' and '.join(missing.values())} {verb} not installed: {install_command(*missing)}",
            name=next(iter(missing.values())),
        )


def is_installed(module: str) -> bool:
    """Whether a top-level module can be found."""
    if module in sys.modules:
        return sys.modules[module] is not None
    return find_spec(module) is not None


def extra_of(module: str) -> str:
    """The smallest extra that brings a module."""
    return min((extra for extra, modules in MODULES.items() if module in modules), key=lambda e: len(MODULES[e]))


def install_command(*extras: str) -> str:
    """What to type to get these extras."""
    return f"pip install 'nemo-gpu-decoding[{','.join(extras)}]'"
