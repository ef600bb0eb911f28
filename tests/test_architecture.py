"""Rooms build on those before them; nothing imports upwards, and nothing in a circle. Public names."""

import ast
import inspect
import json
import re
import subprocess
import sys
from collections.abc import Iterator

import pytest

import nemo_gpu_decoding
from nemo_gpu_decoding.cuda.compile import PACKAGE
from tests.assets import ROOT as REPOSITORY
from tests.lines_of_code import lines_of_code, lines_of_code_by_folder

# Each room may import those before it and those in its own row; files at the root are rooms, too.
ORDER = [
    {"__init__", "checks", "schema", "extras", "jit", "vocabulary", "words", "cache", "container", "metrics"}
    | {"plain_text", "presets", "audio", "jit_linked"},
    {"cuda"},
    {"fusion", "lm"},
    {"graph"},
    {"search"},
    {"live", "compat", "manifest", "transcript"},
    {"nemo_plugin"},
    {"cluster"},
    {"cli"},
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


def test_every_folder_has_a_layer():
    assert all(floor(module) >= 0 for module in MODULES)


def test_nothing_imports_upwards():
    above = [
        f"{module} imports {name}"
        for module, path in MODULES.items()
        for name in imports(path, lazy=True)
        if module != ROOT and floor(name) > floor(module)  # the root's names are loaded on first use
    ]
    assert not above


# Imports that close a circle: they are for types alone, or late. importer -> imported, and why
CIRCLES = {
    ("search.self_check", "search.built_in_problems"): "late: only where no other process can use the GPU",
    ("search.result", "search.word_graph.lattice.lattice"): "the type of a field that word-graph searches fill",
    ("search.word_graph.best_path", "search.word_graph.stream_state"): "the type of an argument",
    ("cli.tune_plot", "cli.tune"): "the type of an argument",
    ("cli.grid", "cli.tune"): "the type of an argument",
}


def test_no_import_circles():
    """Imports for types and in functions count as well, but for those of `CIRCLES`."""
    allowed = {(f"{ROOT}.{importer}", f"{ROOT}.{imported}") for importer, imported in CIRCLES}
    graph = {name: set(imports(path, lazy=True)) - {name, ROOT} for name, path in MODULES.items()}
    assert all(imported in graph[importer] for importer, imported in allowed)
    graph = {name: {other for other in needs if (name, other) not in allowed} for name, needs in graph.items()}
    while True:
        leaves = {name for name, needs in graph.items() if not needs & graph.keys()}
        if not leaves:
            break
        graph = {name: needs for name, needs in graph.items() if name not in leaves}
    assert not graph, f"a circle among {sorted(graph)}"


def read_with(module: str) -> set[str]:
    """A module and all of `search` that it imports, one by way of another."""
    found, waiting = set(), [module]
    while waiting:
        if (name := waiting.pop()) not in found and name.startswith(f"{ROOT}.search."):
            found.add(name)
            waiting += imports(MODULES[name], lazy=False)
    return found


def test_a_frame_of_word_graphs_is_read_in_few_files():
    """What else a file needs, results and lattices above all, stands beside the frame and not in it."""
    room = f"{ROOT}.search.word_graph"
    frame = read_with(f"{room}.frame")
    assert {f"{room}.large_lm.{name}" for name in ("scorer", "contexts")} < frame
    assert len(frame) <= 10
    assert len({name for name in frame if ".large_lm." not in name}) <= 8
    assert sum(MODULES[name].read_text(encoding="utf-8").count("\n") for name in frame) <= 2150


def packages_of(path) -> set[str]:
    """Names of the packages that a file imports, anywhere in it."""
    return {
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


def test_only_the_plugin_imports_nemo_and_only_cluster_imports_ray():
    for module, path in MODULES.items():
        names = packages_of(path)
        is_plugin = module.startswith(f"{ROOT}.nemo_plugin")
        assert is_plugin or not names & {"nemo", "lightning", "pytorch_lightning"}, module
        assert module.startswith(f"{ROOT}.cluster") or "ray" not in names, module


def test_package_does_not_import_benchmarks_and_tools():
    for module, path in MODULES.items():
        assert not packages_of(path) & {"benchmarks", "tools", "tests", "scripts"}, module
    for path in (*REPOSITORY.glob("benchmarks/**/*.py"), *REPOSITORY.glob("tools/**/*.py")):
        assert path.parent.name == "peers" or "nemo" not in packages_of(path), path


# ---------------------- The names of the package: loaded on first use, and what the docs say they are
NAMES = [name for name in nemo_gpu_decoding.__all__ if name != "__version__"]


def imported_names(source: str) -> set[str]:
    """What a piece of Python imports from the package itself."""
    return {
        alias.name
        for node in ast.walk(ast.parse(source))
        if isinstance(node, ast.ImportFrom) and node.module == "nemo_gpu_decoding"
        for alias in node.names
    }


@pytest.mark.parametrize("name", NAMES)
def test_every_public_name_exists_and_has_a_docstring(name):
    value = getattr(nemo_gpu_decoding, name)
    assert inspect.getdoc(value)
    assert value.__module__.startswith("nemo_gpu_decoding.")
    assert name in dir(nemo_gpu_decoding)


def test_unknown_names_are_attribute_errors():
    with pytest.raises(AttributeError, match="has no attribute 'FlexCTCBeem'"):
        _ = nemo_gpu_decoding.FlexCTCBeem


def test_the_docs_list_every_name_once():
    rows = [
        line.split("|")[1]
        for line in (REPOSITORY / "docs" / "api.md").read_text().splitlines()
        if "`" in line and line[0] == "|"
    ]
    assert sorted(name for row in rows for name in re.findall(r"`(\w+)`", row)) == sorted(NAMES)


def test_docs_and_tutorials_import_nothing_else():
    pages = [REPOSITORY / "README.md", *REPOSITORY.glob("docs/**/*.md")]
    sources = [code for page in pages for code in re.findall(r"^```python\n(.*?)^```", page.read_text(), re.M | re.S)]
    for notebook in REPOSITORY.glob("tutorials/*.ipynb"):
        cells = json.loads(notebook.read_text())["cells"]
        code = ["".join(cell["source"]) for cell in cells if cell["cell_type"] == "code"]
        sources += [re.sub(r"^[%!].*$", "", text, flags=re.M) for text in code]
    used = set().union(*map(imported_names, sources))
    assert used
    assert used <= set(NAMES)


def test_importing_the_package_imports_neither_torch_nor_numba_nor_nemo():
    code = "import sys, nemo_gpu_decoding;print([m for m in ('torch', 'numba', 'nemo', 'cuda') if m in sys.modules])"
    shown = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True).stdout
    assert shown.strip() == "[]"


# ---------------------- Budgets: the package, its tests and its docs grow on purpose or not at all
# folder of the package -> most lines of code: without docstrings, comments and blank lines, with its subfolders
CODE_BUDGETS = {
    "(root)": 2014,
    "cli": 2065,
    "cluster": 431,
    "compat": 965,
    "cuda": 948,
    "fusion": 2102,
    "graph": 1549,
    "live": 1245,
    "lm": 1846,
    "nemo_plugin": 3692,
    "search": 10987,
}
# most lines of all kinds, files and words
PACKAGE_LINES = 41610
PACKAGE_FILES = 191
TESTS_LINES = 38999
# words, as `wc -w` counts them. Users' pages are docs/*.md, except docs/papers.md
USERS_WORDS = 16000
USERS_PAGE_WORDS = 1400
SHORT_PAGES = {"performance.md": 1200, "gpus.md": 900}
PAPERS_WORDS = 4648
DEVELOPERS_WORDS = 820
EXPERIMENTS_WORDS = 13769


def within(what: str, count: int, budget: int):
    assert count <= budget, (
        f"{what}: {count:,}, {count - budget:,} above the budget of {budget:,}. Remove something. "
        "Or raise the number in tests/test_architecture.py in the same commit, "
        "and say in its message what you remove elsewhere or why the growth is worth it."
    )


def count_lines(paths) -> int:
    return sum(path.read_text(encoding="utf-8").count("\n") for path in paths)


def test_each_folder_of_the_package_keeps_its_budget_of_code():
    totals = lines_of_code_by_folder(PACKAGE)
    assert totals.keys() == CODE_BUDGETS.keys(), "each folder of the package has a row in CODE_BUDGETS"
    for folder, lines in sorted(totals.items()):
        within(f"lines of code in {ROOT}/{folder}", lines, CODE_BUDGETS[folder])


def test_package_tests_and_docs_keep_their_budgets():
    within(f"lines in {ROOT}/", count_lines(FILES), PACKAGE_LINES)
    within(f"Python files in {ROOT}/", len(FILES), PACKAGE_FILES)
    within("lines of Python in tests/", count_lines((REPOSITORY / "tests").rglob("*.py")), TESTS_LINES)


def test_docs_keep_their_budgets_of_words():
    docs = REPOSITORY / "docs"
    pages = {page.name: len(page.read_text(encoding="utf-8").split()) for page in docs.glob("*.md")}
    within("words in docs/papers.md", pages.pop("papers.md"), PAPERS_WORDS)
    for name, words in pages.items():
        within(f"words in docs/{name}", words, SHORT_PAGES.get(name, USERS_PAGE_WORDS))
    within("words in users' pages of docs/", sum(pages.values()), USERS_WORDS)
    for folder, budget in (("developers", DEVELOPERS_WORDS), ("experiments", EXPERIMENTS_WORDS)):
        words = sum(len(page.read_text(encoding="utf-8").split()) for page in docs.glob(f"{folder}/*.md"))
        within(f"words in docs/{folder}/", words, budget)


def test_docstrings_comments_and_blank_lines_are_no_code():
    function = '# why\ndef double(x):  # twice\n    """Return 2 x."""\n\n    return (\n        2 * x\n    )\n'
    assert lines_of_code(f'"""Summary.\n\nMore.\n"""\n\n{function}') == 4
    assert lines_of_code('text = """a\n\nb"""\n') == 3  # a string that is no docstring
