"""The names of the package: loaded on first use, and what the docs say they are."""

from __future__ import annotations

import ast
import inspect
import json
import re
import subprocess
import sys

import pytest

import nemo_gpu_decoding
from tests.assets import ROOT

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
def test_every_name_is_there_and_explained(name):
    assert inspect.getdoc(getattr(nemo_gpu_decoding, name))
    assert name in dir(nemo_gpu_decoding)


def test_unknown_names_are_attribute_errors():
    with pytest.raises(AttributeError, match="has no attribute 'FlexCTCBeem'"):
        _ = nemo_gpu_decoding.FlexCTCBeem


def test_type_checkers_see_the_same_names():
    tree = ast.parse(inspect.getsource(nemo_gpu_decoding))
    (block,) = [node for node in tree.body if isinstance(node, ast.If)]
    homes = {
        alias.name: node.module.removeprefix("nemo_gpu_decoding.")
        for node in block.body
        if isinstance(node, ast.ImportFrom)
        for alias in node.names
    }
    assert homes == nemo_gpu_decoding._HOMES


def test_the_docs_list_every_name_once():
    rows = [
        line.split("|")[1]
        for line in (ROOT / "docs" / "api.md").read_text().splitlines()
        if "`" in line and line[0] == "|"
    ]
    listed = [name for row in rows for name in re.findall(r"`(\w+)`", row)]
    assert sorted(listed) == sorted(NAMES)


def test_readme_and_tutorials_import_nothing_else():
    sources = re.findall(r"^```python\n(.*?)^```", (ROOT / "README.md").read_text(), re.M | re.S)
    for notebook in ROOT.glob("tutorials/*.ipynb"):
        cells = json.loads(notebook.read_text())["cells"]
        code = ["".join(cell["source"]) for cell in cells if cell["cell_type"] == "code"]
        sources += [re.sub(r"^[%!].*$", "", text, flags=re.M) for text in code]
    used = set().union(*map(imported_names, sources))
    assert used
    assert used <= set(NAMES)


def test_importing_the_package_imports_neither_torch_nor_numba_nor_nemo():
    code = (
        "import sys, nemo_gpu_decoding;"
        "print([m for m in ('torch', 'numba', 'nemo', 'cuda') if m in sys.modules])"
    )
    shown = subprocess.run(
        [sys.executable, "-c", code], check=True, capture_output=True, text=True
    ).stdout
    assert shown.strip() == "[]"
