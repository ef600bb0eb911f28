"""Checks before a run that its packages are installed."""

from __future__ import annotations

import importlib.util
from collections.abc import Iterable, Iterator

from benchmarks.options import GRAPH_STRATEGIES, BenchOptions


def first_absent(modules: Iterable[str]) -> str | None:
    """The first of these modules that is not installed; None if all are."""
    for module in modules:
        try:
            found = importlib.util.find_spec(module)
        except (ImportError, ValueError):  # its parent is missing, or it is no module
            found = None
        if found is None:
            return module
    return None


def check_packages(options: BenchOptions) -> None:
    """Check that all required packages of a run are installed.

    Raises:
        ImportError: a package is missing; the message names it, the option that needs it and the pip command.
    """
    for needed_by, modules, install in _needs(options):
        module = first_absent(modules)
        if module is not None:
            raise ImportError(f"{needed_by} needs {module}, which is not installed: {install}")


def _needs(options: BenchOptions) -> Iterator[tuple[str, tuple[str, ...], str]]:
    """(option, modules, pip command)"""
    if "hard" in options.tasks and not (options.data or options.model):
        yield "the task hard", ("safetensors",), "pip install '.[bench]'"
    if options.strategy in GRAPH_STRATEGIES:
        yield f"strategy={options.strategy}", ("kaldifst",), "pip install '.[wfst]'"
    if options.model:
        yield f"model={options.model}", ("nemo",), "pip install '.[nemo]'"
    if options.mode == "cluster":
        yield "mode=cluster", ("ray",), "pip install '.[cluster]'"
        yield "mode=cluster", ("soundfile",), "pip install soundfile"
