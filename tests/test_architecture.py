"""Rooms build on those before them; nothing imports upwards, and nothing in a circle."""

from __future__ import annotations

import ast
from collections.abc import Iterator

from nemo_gpu_decoding.cuda.sources import PACKAGE

# Each room may import those before it and those in its own row; files at the root are rooms, too.
ORDER = [
    {"__init__", "checks", "jit", "vocabulary", "cache", "container", "metrics", "manifest", "report"}
    | {"presets"},
    {"cuda"},
    {"fusion", "lm"},
    {"graph"},
    {"search"},
    {"live"},
    {"nemo_plugin"},
    {"cli", "bench"},
]
ROOT = PACKAGE.name


def module_name(path) -> str:
    parts = path.relative_to(PACKAGE.parent).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def imports(path, *, lazy: bool) -> Iterator[str]:
    """Modules that a file imports from the package; `lazy`: in functions and for types as well."""
    tree = ast.parse(path.read_text(encoding="utf-8"))
    for node in ast.walk(tree) if lazy else tree.body:
        if isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] == ROOT:
            for alias in node.names:
                inner = f"{node.module}.{alias.name}"
                yield inner if inner in MODULES else str(node.module)
        elif isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names if alias.name.split(".")[0] == ROOT)


FILES = sorted(PACKAGE.rglob("*.py"))
MODULES = {module_name(path): path for path in FILES}


def floor(module: str) -> int:
    room = module.split(".")[1] if "." in module else "__init__"
    return next(number for number, rooms in enumerate(ORDER) if room in rooms)


def test_every_room_has_its_floor():
    assert all(floor(module) >= 0 for module in MODULES)


def test_nothing_imports_upwards():
    above = [
        f"{module} imports {name}"
        for module, path in MODULES.items()
        for name in imports(path, lazy=True)
        if module != ROOT and floor(name) > floor(module)  # the root's names are loaded on first use
    ]
    assert not above


def test_no_import_circles():
    graph = {name: set(imports(path, lazy=False)) - {name, ROOT} for name, path in MODULES.items()}
    while True:
        leaves = {name for name, needs in graph.items() if not needs & graph.keys()}
        if not leaves:
            break
        graph = {name: needs for name, needs in graph.items() if name not in leaves}
    assert not graph, f"a circle among {sorted(graph)}"


def test_only_the_plugin_and_peers_import_nemo():
    for module, path in MODULES.items():
        names = {
            name.split(".")[0]
            for node in ast.walk(ast.parse(path.read_text(encoding="utf-8")))
            for name in (
                [node.module or ""]
                if isinstance(node, ast.ImportFrom) and node.level == 0
                else [alias.name for alias in node.names]
                if isinstance(node, ast.Import)
                else []
            )
        }
        allowed = module.startswith((f"{ROOT}.nemo_plugin", f"{ROOT}.bench.peers"))
        assert allowed or not names & {"nemo", "lightning", "pytorch_lightning"}, module
