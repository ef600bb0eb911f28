"""The program as a whole: help, exit codes, which errors are shown as one line; key=value options."""

import re
import subprocess
import sys
from dataclasses import dataclass, field
from typing import Any, get_args, get_origin, get_type_hints

import pytest
from omegaconf import MISSING

from nemo_gpu_decoding import __version__
from nemo_gpu_decoding.cli import main as cli
from nemo_gpu_decoding.cli.main import COMMANDS, is_mendable, load_command, main
from nemo_gpu_decoding.cli.options import help_text, options_of, parse_options


def test_overview_version_and_misspelt_commands(capsys):
    assert main(["--help"]) == 0
    out = capsys.readouterr().out
    assert all(f"  {name}" in out and summary in out for name, summary in COMMANDS.items())
    assert main([]) == 2
    assert "commands:" in capsys.readouterr().out
    assert main(["--version"]) == 0
    assert capsys.readouterr().out == f"nemo-gpu-decoding {__version__}\n"
    assert main(["transcibe"]) == 2
    assert "did you mean transcribe?" in capsys.readouterr().err


@pytest.mark.parametrize("name", COMMANDS)
def test_help_of_a_command_explains_every_option(name, capsys):
    assert main([name, "--help", "all"]) == 0
    out = capsys.readouterr().out
    module = load_command(name)
    for option in options_of(module.OPTIONS):
        assert f"  {option.name}=" in out
        assert option.comment, f"option {option.name} has no comment"
    assert all(f"nemo-gpu-decoding {name} {example}".rstrip() in out for example in module.EXAMPLES)


@pytest.mark.parametrize("name", ["transcribe", "serve", "tune", "aliases"])
def test_help_explains_ten_options_and_names_the_others_by_topic(name, capsys):
    module = load_command(name)
    assert main([name, "--help"]) == 0
    shown, _, others = capsys.readouterr().out.partition("other options")
    options = {option.name: option for option in options_of(module.OPTIONS)}
    assert re.findall(r"^  (\w+)=", shown, flags=re.M) == list(module.FIRST)
    assert len(module.FIRST) == 10
    assert all(option.required <= (name in module.FIRST) for name, option in options.items())
    for option in options.values():
        assert option.topic != "options", f"{option.name} has no topic"
        assert (option.name in module.FIRST) or re.search(rf"\b{option.name}\b", others)
    assert others.count(": ") >= 2
    assert "An error without phrases." not in shown  # the first sentence only


@pytest.mark.parametrize("name", COMMANDS)
def test_examples_of_help_parse(name):
    """The keys and types in the examples exist; files in them need not."""
    module = load_command(name)
    known = {option.name for option in options_of(module.OPTIONS)}
    parts = [part for example in module.EXAMPLES for part in example.split()]
    if hasattr(module, "POSITIONAL"):
        parts = [part for part in parts if "=" in part]
    assert {part.split("=")[0].split(".")[0] for part in parts} <= known


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
def test_exit_code_tells_user_errors_from_internal_ones(error, code, shown, monkeypatch, capsys):
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


def test_help_imports_neither_torch_nor_nemo():
    code = (
        "import sys; from nemo_gpu_decoding.cli.main import COMMANDS, main;"
        "[main([name, '--help']) for name in COMMANDS];"
        "sys.exit(any(m in sys.modules for m in ('torch', 'nemo', 'numba')))"
    )
    subprocess.run([sys.executable, "-c", code], check=True, stdout=subprocess.DEVNULL)


# ------------------------------------------------------------------------------------------ options
@dataclass
class Sample:
    # The thing to work on.
    model: str = MISSING
    # First line
    # and second line.
    beam_size: int | None = None
    weights: list[float] = field(default_factory=lambda: [0.5, 1.0])  # behind the field
    audio: Any = None
    raw: dict[str, Any] = field(default_factory=dict)
    names: list[str] = field(default_factory=list)
    note: str | None = None
    fast: bool = False

    def __post_init__(self) -> None:
        if self.beam_size == 13:
            raise ValueError("beam_size is 13, expected any other number")


def test_values_get_the_types_of_their_fields():
    arguments = ["model=7", "beam_size=4", "weights=[1,2.5]", "raw.beam.x=3", "raw.beam.y=z", "fast=true"]
    options = parse_options(Sample, [*arguments, "names=[a,b]", "note=[a,b]"])
    assert options == Sample("7", 4, [1.0, 2.5], None, {"beam": {"x": 3, "y": "z"}}, ["a", "b"], "[a,b]", fast=True)


@pytest.mark.parametrize("text", ["*.wav", "a=b.wav", "[odd.wav", "it's: odd", "null", "1e3"])
def test_text_needs_no_quoting(text):
    assert parse_options(Sample, [f"model={text}"]).model == text


@pytest.mark.parametrize(("text", "read"), [("*.wav", "*.wav"), ("[a.wav,b.wav]", ["a.wav", "b.wav"]), ("null", None)])
def test_a_field_of_any_type_takes_lists_and_patterns(text, read):
    assert parse_options(Sample, ["model=m", f"audio={text}"]).audio == read


@pytest.mark.parametrize(
    ("argument", "expected"),
    [("weights=0.7", [0.7]), ("weights=[0.7]", [0.7]), ("weights=3", [3.0]), ("weights=3,0.5", [3.0, 0.5])],
)
def test_a_list_needs_no_brackets_and_no_second_value(argument, expected):
    assert parse_options(Sample, ["model=m", argument]).weights == expected
    assert parse_options(Sample, ["model=m", "names=a, b"]).names == ["a", "b"]


@pytest.mark.parametrize("name", COMMANDS)
def test_list_options_accept_a_single_value(name):
    options_class = load_command(name).OPTIONS
    options = options_of(options_class)
    needed = ("lm", "phrases", "source_lm")
    required = [f"{option.name}=x" for option in options if option.required or option.name in needed]
    hints = get_type_hints(options_class)
    for option in options:
        kinds = [kind for kind in (hints[option.name], *get_args(hints[option.name])) if get_origin(kind) is list]
        if kinds:
            values = {(int,): 16, (float,): 0.5, (bool,): True}
            default = ["early"] if option.required else option.default or ["early"]
            known = {"blank_lm_score_mode": "no_score", "subtitles": "srt", "sentences": "PHRASE", "confidence": "min"}
            default = [known[option.name]] if option.name in known else default
            value = values.get(get_args(kinds[0])) or default[0]
            assert getattr(parse_options(options_class, [*required, f"{option.name}={value}"]), option.name) == [value]


def test_positional_list_needs_no_key():
    options = parse_options(Sample, ["a.json", "model=m", "b,c.json"], "names")
    assert (options.model, options.names) == ("m", ["a.json", "b,c.json"])
    with pytest.raises(ValueError, match="'--x' is not of the form"):
        parse_options(Sample, ["--x"], "names")
    usage = help_text("program", "does things", Sample, [], "model").splitlines()[2]
    assert usage == "usage: program MODEL ... [key=value ...]"


def test_options_accept_null_repeats_and_hydras_plus():
    options = parse_options(Sample, ["model=m", "beam_size=4", "beam_size=null", "note=x", "note=null"])
    assert options == Sample("m", None)
    assert parse_options(Sample, ["model=m", "beam_size=4", "beam_size=8"]).beam_size == 8
    assert parse_options(Sample, ["model=m", "+raw.x=1"]).raw == {"x": 1}


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["model=m", "beamsize=4"], r"^unknown option 'beamsize'; did you mean beam_size\?$"),
        (["model=m", "beam_size.x=4"], r"unknown option 'beam_size\.x'"),  # a dotted key needs a mapping
        (["model=m", "--beam-size=4"], r"not of the form key=value; did you mean .*beam_size=4\?$"),
        (["model=m", "--beam-size"], r"not of the form key=value; did you mean .*beam_size=\.\.\.\?$"),
        (["model=m", "beam_size"], r"not of the form key=value; did you mean .*beam_size=\.\.\.\?$"),
        (["zzz"], r"'zzz' is not of the form key=value$"),
        (["model=m", "beam_size=four"], r"(?s)beam_size=four: Value 'four'.*First line and second line\."),
        (["model=m", "weights=[1,2"], "brackets or quotes do not match"),
        ([], r"missing model=\.\.\.\n  model=\(required\)\n +The thing"),
        (["model=m", "beam_size=13"], "beam_size is 13"),  # the dataclass checks its values itself
    ],
)
def test_what_is_wrong_with_an_option_is_named(arguments, message):
    with pytest.raises(ValueError, match=message):
        parse_options(Sample, arguments)


@pytest.mark.parametrize(
    ("argument", "problem"),
    [("modle=x", "unknown option 'modle'; did you mean model?"), ("modle", "'modle' is not of the form key=value")],
)
def test_a_mistyped_option_leads_to_the_help_in_two_lines(argument, problem, capsys):
    assert main(["transcribe", argument]) == 2
    first, second = capsys.readouterr().err.splitlines()
    assert first.startswith(f"nemo-gpu-decoding transcribe: {problem}")
    assert second == "see `nemo-gpu-decoding transcribe --help`"


def test_help_shows_every_default_and_comment():
    text = help_text("nemo-gpu-decoding sample", "does things", Sample, ["model=x"])
    assert "usage: nemo-gpu-decoding sample model=... [key=value ...]" in text
    assert "  weights=[0.5,1.0]\n      behind the field" in text
    assert "  beam_size=null\n      First line and second line." in text
    assert "  fast=false" in text
    assert text.endswith("examples:\n  nemo-gpu-decoding sample model=x")


def test_only_dataclasses_are_options_and_inherited_ones_keep_their_comments():
    with pytest.raises(TypeError, match="int is no dataclass"):
        options_of(int)

    @dataclass
    class Child(Sample):
        extra: int = 1  # of the child

    comments = {option.name: option.comment for option in options_of(Child)}
    assert comments["beam_size"] == "First line and second line."
    assert comments["extra"] == "of the child"
