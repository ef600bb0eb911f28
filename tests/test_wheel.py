"""The package as pip installs it: a wheel from the sdist, without extras, in an environment that has nothing else."""

import os
import re
import subprocess
import sys
from importlib.metadata import PackageNotFoundError, version

import pytest

from tests.assets import ROOT, build

pytestmark = pytest.mark.slow

DECODES_AND_READS = """
import sys
import torch
from nemo_gpu_decoding import FlexCTCBeam, FlexCTCConfig, read_arpa

tokens = torch.tensor([[1, 1, 4, 0, 2, 4]])  # a token per frame; 4 is the blank
log_probs = torch.log_softmax(5.0 * torch.nn.functional.one_hot(tokens, 5).float(), dim=-1)
decoder = FlexCTCBeam(vocab_size=4, blank_id=4, config=FlexCTCConfig(beam_size=4))
(nbest,) = decoder.decode(log_probs, [6])
print([int(token) for token in nbest.best.tokens], len(read_arpa(sys.argv[1]).orders))
"""
ENVIRONMENT = ("PATH", "LANG", "LC_ALL", "SYSTEMROOT", "TMPDIR")  # what the processes keep of ours


def pip(python, *arguments):
    """pip of this environment, at work in another one, which need not have a pip of its own."""
    command = [sys.executable, "-m", "pip", "--python", str(python), "install", "--quiet", "--no-compile"]
    return subprocess.run([*command, *map(str, arguments)], capture_output=True, text=True, check=False)


def direct_dependencies():
    """The dependencies of pyproject.toml, in the versions that are installed here."""
    (listed,) = re.findall(r"^dependencies = \[(.*?)^\]", (ROOT / "pyproject.toml").read_text(), re.M | re.S)
    names = re.findall(r'"([\w-]+)', listed)
    try:
        return [f"{name}=={version(name)}" for name in names]
    except PackageNotFoundError as error:
        pytest.fail(f"{error} is a dependency that is not installed")


@pytest.fixture(scope="module")
def installed(tmp_path_factory):
    """Runs Python in an environment with the wheel: `installed("-c", CODE)`."""
    pytest.importorskip("hatchling")
    folder = tmp_path_factory.mktemp("wheel")
    subprocess.run(["tar", "-xf", build(ROOT, "sdist", folder)], cwd=folder, check=True)
    (source,) = [path for path in folder.iterdir() if path.is_dir()]
    wheel = build(source, "wheel", folder)
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", folder / "venv"], check=True)
    python = folder / "venv" / "bin" / "python"
    found = pip(python, *direct_dependencies())
    if found.returncode:
        pytest.skip(f"pip cannot fetch the dependencies here: {found.stderr.strip().splitlines()[-1]}")
    found = pip(python, "--no-index", wheel)  # the wheel may need nothing more than these
    assert found.returncode == 0, found.stderr
    home = folder / "home"
    home.mkdir()
    kept = {name: os.environ[name] for name in ENVIRONMENT if name in os.environ}

    def run(*arguments):
        return subprocess.run(
            [python, "-I", *map(str, arguments)],
            env={**kept, "HOME": str(home)}, cwd=home, capture_output=True, text=True, check=False,
        )  # fmt: skip

    run.python = python
    return run


def test_the_wheel_decodes_and_reads_an_lm_without_any_extra(installed):
    done = installed("-c", DECODES_AND_READS, ROOT / "assets" / "self" / "lm" / "word3.arpa")
    assert done.returncode == 0, done.stderr
    assert done.stdout == "[1, 0, 2] 3\n"
    done = installed("-c", "import nemo_gpu_decoding; print(nemo_gpu_decoding.__file__)")
    assert not done.stdout.startswith(str(ROOT))


@pytest.mark.parametrize(
    ("command", "message"),
    [
        ("tune model=a.nemo manifest=a.json", "nemo is not installed: pip install 'nemo-gpu-decoding[nemo]'"),
        ("serve model=a.nemo", "nemo and starlette are not installed: pip install 'nemo-gpu-decoding[nemo,serve]'"),
        (
            "build-lm text=a tokenizer=a.model out=b",
            "sentencepiece is not installed: pip install 'nemo-gpu-decoding[wfst]'",
        ),
    ],
)
def test_a_command_names_the_extra_that_it_lacks(installed, command, message):
    name, *arguments = command.split()
    done = installed("-m", "nemo_gpu_decoding.cli.main", name, *arguments)
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr == f"nemo-gpu-decoding {name}: {message}\n"


def test_commands_that_need_no_extra_work(installed):
    lm = ROOT / "assets" / "self" / "lm" / "word3.arpa"
    for command in (["pack-lm", f"lm={lm}", "out=a.packed"], ["prune-lm", f"lm={lm}", "out=a.arpa", "size=400"]):
        done = installed("-m", "nemo_gpu_decoding.cli.main", *command)
        assert done.returncode == 0, done.stderr
    done = installed("-m", "nemo_gpu_decoding.cli.main", "doctor")
    assert done.returncode == 0, done.stderr
    assert "pip install 'nemo-gpu-decoding[nemo]'" in done.stdout
