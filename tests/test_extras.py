"""Dependencies are declared where they are used, and a command that lacks one names the extra that brings it."""

import ast
import re
import shlex
import sys
from functools import cache
from pathlib import Path

import pytest

from nemo_gpu_decoding.cli.main import COMMANDS, NEEDS, file_of, load_command, main, needed
from nemo_gpu_decoding.cli.options import parse_options
from nemo_gpu_decoding.extras import MODULES, extra_of, install_command, require
from tests.assets import ROOT

PACKAGE = "nemo_gpu_decoding"
PROJECT = (ROOT / "pyproject.toml").read_text(encoding="utf-8")
# module -> distribution, where their names differ
DISTRIBUTIONS = {
    "cuda": "cuda-python", "flashlight": "flashlight-text", "hydra": "hydra-core", "nemo": "nemo_toolkit",
    "huggingface_hub": "huggingface-hub", "kaldi_decoder": "kaldi-decoder", "python_multipart": "python-multipart",
    "sklearn": "scikit-learn", "yaml": "pyyaml",
}  # fmt: skip
# where extras may be imported with the file: other files import these in functions only
FILES_OF_EXTRAS = {
    f"{PACKAGE}.nemo_plugin": "nemo", f"{PACKAGE}.cluster": "nemo", f"{PACKAGE}.live.batcher": "serve",
    f"{PACKAGE}.live.server": "serve", f"{PACKAGE}.live.transcriptions": "serve", "hydra_plugins": "nemo",
}  # fmt: skip
# imported where other software brings it: NeMo Curator calls `curator`; the peers of benchmarks are optional
BROUGHT_BY_OTHERS = {"nemo_curator", "pyctcdecode", "riva", "tests"}


@cache
def declared(table: str) -> set[str]:
    """Names of the distributions in one list of pyproject.toml; extras of our own are followed."""
    (listed,) = re.findall(rf"^{table} = (\[.*?\])$", PROJECT, re.M | re.S)
    found = set()
    for requirement in ast.literal_eval(listed):
        name, extras = re.match(r"([\w.-]+)(?:\[([\w,]+)\])?", requirement).groups()
        found |= set().union(*map(declared, extras.split(","))) if name == "nemo-gpu-decoding" else {name}
    return found


def third_party(path: Path) -> tuple[set[str], set[str]]:
    """Modules that are imported with a file, and those that its functions import; not those for type checkers."""
    tree = ast.parse(path.read_text(encoding="utf-8"))
    with_file, in_functions = set(), set()

    def visit(node: ast.AST, found: set[str]) -> None:
        if isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING":
            return
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
            found = in_functions
        if isinstance(node, ast.Import):
            found |= {alias.name.split(".")[0] for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.level == 0:
            found.add(str(node.module).split(".")[0])
        for child in ast.iter_child_nodes(node):
            visit(child, found)

    visit(tree, with_file)
    return tuple(found - sys.stdlib_module_names - {PACKAGE} for found in (with_file, in_functions))


def distributions(modules) -> set[str]:
    return {DISTRIBUTIONS.get(module, module) for module in modules}


FILES = sorted([*(ROOT / PACKAGE).rglob("*.py"), *(ROOT / "hydra_plugins").rglob("*.py")])
EXTRAS = re.findall(r"^([a-z0-9]+) = \[", PROJECT.split("[project.optional-dependencies]")[1].split("\n[")[0], re.M)


def test_the_lists_of_pyproject_are_read():
    assert {"numba", "torch", "wrapt"} < declared("dependencies")
    assert declared("plot") == {"matplotlib"} < declared("demo")
    assert {"nemo_toolkit", "kaldifst", "rich", "starlette"} < declared("demo")
    assert {*MODULES, "bench", "cuda12", "cuda13", "dev", "docs"} == set(EXTRAS)


@pytest.mark.parametrize("path", FILES, ids=lambda path: str(path.relative_to(ROOT)))
def test_imports_of_a_file_are_declared(path):
    """With the file: dependencies, or the extra that the file is for. In functions: extras as well."""
    name = ".".join(path.relative_to(ROOT).with_suffix("").parts)
    with_file, in_functions = third_party(path)
    extras = [declared(extra) for files, extra in FILES_OF_EXTRAS.items() if f"{name}.".startswith(f"{files}.")]
    assert distributions(with_file) <= declared("dependencies").union(*extras)
    optional = set().union(*map(declared, EXTRAS))
    assert distributions(in_functions - BROUGHT_BY_OTHERS) <= declared("dependencies") | optional


@pytest.mark.parametrize("extra", MODULES)
def test_modules_of_an_extra_are_what_it_installs(extra):
    assert distributions(MODULES[extra]) <= declared(extra)
    assert all(extra_of(module) in MODULES for module in MODULES[extra])


@pytest.mark.parametrize("command", COMMANDS)
def test_a_command_starts_without_any_extra(command):
    """The files that a command imports before it checks for its extras import none of them."""
    waiting, seen = ([ROOT / PACKAGE / "cli" / "main.py", ROOT / PACKAGE / "cli" / f"{file_of(command)}.py"], set())
    while waiting:
        path = waiting.pop()
        if path in seen:
            continue
        seen.add(path)
        assert distributions(third_party(path)[0]) <= declared("dependencies"), path
        for node in ast.parse(path.read_text(encoding="utf-8")).body:
            if isinstance(node, ast.ImportFrom) and str(node.module).startswith(PACKAGE):
                names = [node.module, *(f"{node.module}.{alias.name}" for alias in node.names)]
                files = [ROOT / name.replace(".", "/") for name in names]
                waiting += [file for folder in files for file in (folder.with_suffix(".py"), folder / "__init__.py")
                            if file.is_file()]  # fmt: skip
    assert len(seen) > 3


# ------------------------------------------------------------------------------------------ messages
@pytest.fixture
def lacking(monkeypatch):
    def hide(*modules: str) -> None:
        for module in modules:
            monkeypatch.setitem(sys.modules, module, None)

    return hide


@pytest.mark.parametrize(
    ("missing", "wanted", "message"),
    [
        (["soundfile"], ["nemo"], "soundfile is not installed: pip install 'nemo-gpu-decoding[nemo]'"),
        (["nemo", "soundfile", "hydra"], ["nemo"], "nemo is not installed: pip install 'nemo-gpu-decoding[nemo]'"),
        (["soxr"], ["nemo", "serve"], "soxr is not installed: pip install 'nemo-gpu-decoding[serve]'"),
        (
            ["nemo", "matplotlib"],
            ["nemo", "plot"],
            "nemo and matplotlib are not installed: pip install 'nemo-gpu-decoding[nemo,plot]'",
        ),
        (["kaldifst"], ["kaldifst"], "kaldifst is not installed: pip install 'nemo-gpu-decoding[wfst]'"),
        (
            ["sentencepiece"],
            ["sentencepiece"],
            "sentencepiece is not installed: pip install 'nemo-gpu-decoding[wfst]'",
        ),
        (["ray"], ["cluster"], "ray is not installed: pip install 'nemo-gpu-decoding[cluster]'"),
    ],
)
def test_the_message_names_what_is_missing_and_the_extra(missing, wanted, message, lacking):
    lacking(*missing)
    with pytest.raises(ModuleNotFoundError) as error:
        require(*wanted)
    assert str(error.value) == message
    assert error.value.name == missing[0]


ARPA = shlex.quote(str(ROOT / "assets" / "self" / "lm" / "word3.arpa"))
PRESETS = shlex.quote(str(ROOT / "assets" / "self"))


@pytest.mark.parametrize(
    ("command", "expected"),
    [
        ("transcribe model=m audio=a.wav", ["nemo"]),
        (f"transcribe model=m audio=a.wav strategy=cuda_wfst lm={ARPA}", ["nemo", "kaldifst"]),
        (f"transcribe model=m audio=a.wav strategy=cuda_wfst decoding.wfst.arpa_lm_path={ARPA}", ["nemo", "kaldifst"]),
        (f"transcribe model=m audio=a.wav preset={PRESETS}/demo_paged.yaml", ["nemo", "kaldifst"]),
        ("transcribe model=m audio=a.wav out=o/ workers=2", ["nemo", "cluster"]),
        ("tune model=m manifest=dev.json plot=a.png", ["nemo", "plot"]),
        (f"tune model=m manifest=dev.json strategy=paged_biglm lm={ARPA}", ["nemo", "kaldifst"]),
        ("aliases model=m phrases=p manifest=dev.json out=b", ["nemo"]),
        (f"serve model=m strategy=cuda_wfst lm={ARPA}", ["nemo", "serve", "kaldifst"]),
        ("build-graph lm=a out=b model=m", ["nemo", "kaldifst"]),
        ("build-graph lm=a out=b tokenizer=vocab.txt", ["kaldifst"]),
        ("build-graph lm=a out=b tokenizer=t.model", ["kaldifst", "sentencepiece"]),
        ("build-lm text=a out=b", []),
        ("build-lm text=a out=b model=m", ["nemo"]),
        ("pack-lm lm=a out=b", []),
    ],
)
def test_packages_of_a_command_follow_its_options(command, expected):
    name, *arguments = shlex.split(command)
    assert needed(name, parse_options(load_command(name).OPTIONS, arguments)) == expected


@pytest.mark.parametrize(("command", "extra"), [(c, name) for c, names in NEEDS.items() for name in names])
def test_missing_package_stops_a_command_before_its_work(command, extra, lacking, monkeypatch, capsys):
    monkeypatch.setitem(NEEDS, command, {extra: lambda options: True})
    monkeypatch.setattr(load_command(command), "run", lambda options: pytest.fail("it has started"))
    module = MODULES.get(extra, [extra])[0]
    lacking(module)
    required = {
        "build-graph": ["lm=a", "out=b", "model=m"], "build-lm": ["text=a", "out=b"], "serve": ["model=m"],
        "transcribe": ["model=m"], "tune": ["model=m", "manifest=dev.json"],
        "aliases": ["model=m", "out=b"],
    }  # fmt: skip
    assert main([command, *required[command]]) == 2
    install = install_command(extra if extra in MODULES else extra_of(extra))
    assert capsys.readouterr().err == f"nemo-gpu-decoding {command}: {module} is not installed: {install}\n"
