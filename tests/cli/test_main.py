"""The program as a whole: help, exit codes, which errors are shown as one line."""

from __future__ import annotations

import subprocess
import sys

import pytest

from nemo_gpu_decoding import __version__
from nemo_gpu_decoding.cli import main as cli
from nemo_gpu_decoding.cli.main import COMMANDS, is_mendable, load_command, main
from nemo_gpu_decoding.cli.options import options_of


def test_overview_names_every_command(capsys):
    assert main(["--help"]) == 0
    out = capsys.readouterr().out
    assert all(f"  {name}" in out and command.summary in out for name, command in COMMANDS.items())


def test_without_a_command_the_overview_and_an_error_code(capsys):
    assert main([]) == 2
    assert "commands:" in capsys.readouterr().out


def test_version(capsys):
    assert main(["--version"]) == 0
    assert capsys.readouterr().out == f"nemo-gpu-decoding {__version__}\n"


@pytest.mark.parametrize("name", COMMANDS)
def test_help_of_a_command_explains_every_option(name, capsys):
    assert main([name, "--help"]) == 0
    out = capsys.readouterr().out
    module = load_command(name)
    for option in options_of(module.OPTIONS):
        assert f"  {option.name}=" in out
        assert option.comment, f"option {option.name} has no comment"
    assert all(f"nemo-gpu-decoding {name} {example}".rstrip() in out for example in module.EXAMPLES)


@pytest.mark.parametrize("name", COMMANDS)
def test_examples_parse(name):
    """The keys and types in the examples exist; files in them need not."""
    module = load_command(name)
    known = {option.name for option in options_of(module.OPTIONS)}
    keys = {part.split("=")[0].split(".")[0] for example in module.EXAMPLES for part in example.split()}
    assert keys <= known


def test_a_misspelt_command_is_corrected(capsys):
    assert main(["transcibe"]) == 2
    assert "did you mean transcribe?" in capsys.readouterr().err


def test_usage_errors_take_one_line_and_no_traceback(capsys):
    assert main(["transcribe", "model=m.nemo", "beam_size=x"]) == 2
    err = capsys.readouterr().err
    assert err.startswith("nemo-gpu-decoding transcribe: beam_size=x: ")
    assert "Traceback" not in err


def raising(error):
    def run(options):
        raise error

    return run


@pytest.mark.parametrize(
    ("error", "code", "shown"),
    [
        (KeyboardInterrupt(), 130, "interrupted"),
        (BrokenPipeError(), 0, ""),
        (FileNotFoundError(2, "No such file", "x.wav"), 2, "doctor: [Errno 2] No such file: 'x.wav'"),
        (ZeroDivisionError("ours"), 1, "Traceback"),
    ],
)
def test_exit_codes(error, code, shown, monkeypatch, capsys):
    monkeypatch.setattr(load_command("doctor"), "run", raising(error))
    monkeypatch.setattr(cli.sys, "stdout", sys.stdout)  # a broken pipe replaces it
    assert main(["doctor"]) == code
    assert shown in capsys.readouterr().err


def caught(function, *arguments) -> Exception:
    with pytest.raises(Exception) as info:  # noqa: PT011  (any type is wanted)
        function(*arguments)
    return info.value


def test_value_errors_are_mendable_only_where_our_code_raises_them():
    from nemo_gpu_decoding.metrics import word_errors

    assert is_mendable(caught(word_errors, ["a"], []))
    assert not is_mendable(caught(int, "x"))
    assert not is_mendable(caught(lambda: {}["x"]))


def test_help_needs_neither_torch_nor_nemo():
    code = (
        "import sys; from nemo_gpu_decoding.cli.main import main; main(['transcribe', '--help']);"
        "main(['tune', '--help']); main(['doctor', '--help']);"
        "sys.exit(any(m in sys.modules for m in ('torch', 'nemo', 'numba')))"
    )
    subprocess.run([sys.executable, "-c", code], check=True, stdout=subprocess.DEVNULL)
