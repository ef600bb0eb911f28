"""List the modules of each optional dependency group (extra) of pyproject.toml, and check their installation."""

import sys
from importlib.util import find_spec

# extra -> its imported modules, the best-known module first
MODULES: dict[str, tuple[str, ...]] = {
    "nemo": ("nemo", "soundfile", "hydra", "fsspec", "sentencepiece"),
    "wfst": ("kaldifst", "sentencepiece"),
    "serve": ("starlette", "uvicorn", "websockets", "prometheus_client", "soxr", "python_multipart"),
    "cluster": ("ray",),
    "plot": ("matplotlib",),
    "hf": ("huggingface_hub", "transformers"),
    "onnx": ("onnxruntime", "onnx"),
    "demo": ("rich",),
}


def require(*names: str) -> None:
    """Check that optional dependencies are installed, without importing them.

    Args:
        names: extras of pyproject.toml, or single modules of an extra.

    Raises:
        ModuleNotFoundError: modules are missing; the message has the command that installs them.
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
    """Return whether a top-level module is installed, without importing it."""
    if module in sys.modules:
        return sys.modules[module] is not None
    return find_spec(module) is not None


def extra_of(module: str) -> str:
    """Return the name of the extra with the fewest modules that contains this module."""
    return min((extra for extra, modules in MODULES.items() if module in modules), key=lambda e: len(MODULES[e]))


def install_command(*extras: str) -> str:
    """Return the pip command that installs these extras."""
    return f"pip install 'nemo-gpu-decoding[{','.join(extras)}]'"
