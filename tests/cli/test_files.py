"""Files of commands: outputs are no inputs, and are complete whatever happens to stdout; any name will do."""

import json
import os
import shlex
import shutil
import subprocess
import sys
from urllib.parse import quote

import pytest

from nemo_gpu_decoding.cli.main import main
from nemo_gpu_decoding.cli.options import parse_options
from nemo_gpu_decoding.cli.transcribe import TranscribeOptions
from nemo_gpu_decoding.plain_text import path_of
from tests.assets import ROOT, speech

# command and options; IN is the input that an output names, by a link, too
CLASHES = [
    ("transcribe", "model=m.nemo audio=IN out=OUT"),
    ("transcribe", "model=m.nemo audio=[IN] out=OUT"),
    ("transcribe", "model=m.nemo audio=. out=OUT"),
    ("transcribe", "model=m.nemo audio=*.flac out=OUT"),
    ("transcribe", "model=m.nemo manifest=IN out=OUT"),
    ("transcribe", "model=m.nemo manifest=set.json out=OUT"),
    ("transcribe", "model=IN audio=b.flac out=OUT"),
    ("transcribe", "model=m.nemo audio=b.flac lm=IN out=OUT"),
    ("transcribe", "model=m.nemo audio=b.flac lms.a=IN out=OUT"),
    ("transcribe", "model=m.nemo audio=b.flac phrases=IN out=OUT"),
    ("transcribe", "model=m.nemo audio=b.flac rescore=IN n_best=2 out=OUT"),
    ("transcribe", "model=m.nemo audio=b.flac preset=IN out=OUT"),
    ("transcribe", "model=m.nemo audio=b.flac preset=lm.yaml out=OUT"),
    ("transcribe", "model=m.nemo audio=b.flac decoding.beam.ngram_lm_model=IN out=OUT"),
    ("transcribe", "model=m.nemo audio=b.flac subtitles=srt out=b.srt"),
    ("transcribe", "model=m.nemo audio=b.flac lm=b.srt subtitles=srt"),
    ("tune", "model=m.nemo manifest=IN out=OUT"),
    ("tune", "model=m.nemo manifest=set.json out=OUT"),
    ("tune", "model=m.nemo manifest=set.json plot=best.png out=./best.png"),
    ("tune", "model=m.nemo manifest=set.json out=best.png"),
    ("tune", "model=m.nemo manifest=set.json lm=IN out=OUT"),
    ("aliases", "model=m.nemo manifest=set.json phrases=IN out=OUT"),
    ("aliases", "model=m.nemo manifest=set.json phrases=p.txt out=OUT"),
    ("build-graph", "tokenizer=t.txt lm=IN out=OUT"),
    ("build-graph", "tokenizer=IN lm=lm.arpa out=OUT"),
    ("build-graph", "tokenizer=t.txt lm=lm.arpa out=g.graph oov=lm.arpa"),
    ("build-graph", "tokenizer=t.txt lm=lm.arpa out=g.graph oov=./g.graph"),
    ("build-lm", "text=IN out=OUT"),
    ("build-lm", "text=[p.txt,IN] out=OUT"),
    ("prune-lm", "lm=IN size=3 out=OUT"),
    ("pack-lm", "lm=IN out=OUT"),
]


@pytest.fixture
def here(tmp_path, monkeypatch):
    """A folder with an input, its links, and other files."""
    monkeypatch.chdir(tmp_path)
    source = speech()[0]["audio_filepath"]
    for name in ("in.flac", "b.flac"):
        shutil.copy(source, name)
    (tmp_path / "link.flac").symlink_to("in.flac")
    os.link("in.flac", "hard.flac")
    for name in ("lm.arpa", "p.txt", "t.txt", "b.srt"):
        (tmp_path / name).write_text("a\n")
    (tmp_path / "lm.yaml").write_text("strategy: flexctc_beam\nbeam: {ngram_lm_model: in.flac}\n")
    (tmp_path / "set.json").write_text(json.dumps({"audio_filepath": "in.flac", "text": "a"}))
    return tmp_path


@pytest.mark.parametrize(("command", "arguments"), CLASHES)
@pytest.mark.parametrize("out", ["in.flac", "link.flac", "hard.flac", "../{}/in.flac"])
def test_output_that_is_an_input_is_refused(command, arguments, out, here, capsys):
    before = {path.name: path.read_bytes() for path in here.iterdir()}
    assert main([command, *arguments.replace("IN", "in.flac").replace("OUT", out.format(here.name)).split()]) == 2
    err = capsys.readouterr().err
    assert "would overwrite" in err or "preset=in.flac" in err
    assert {path.name: path.read_bytes() for path in here.iterdir()} == before


def test_outputs_may_be_devices(here, capsys):
    (here / "lm.arpa").write_text("a b\nb a\n")
    assert main(["build-lm", "text=lm.arpa", "order=2", "out=/dev/null"]) == 0


SCRIPT = """
import sys, types
from dataclasses import dataclass
from nemo_gpu_decoding.cli.main import guarded, run_program
@dataclass
class Options:
    out: str | None = None
def run(options):
    for n in range(20000):
        print(f"line {n} Łucja")
    if options.out:
        open(options.out, "w").write("whole")
    return 3
module = types.SimpleNamespace(OPTIONS=Options, EXAMPLES=(), run=run)
sys.exit(guarded("p", lambda: run_program("p", "", module, sys.argv[1:]), "__main__"))
"""


def test_names_are_utf_8_in_the_locale_c(tmp_path):
    (tmp_path / "\u00fc.txt").write_text("a b\n")
    # -S: in the locale C, Python cannot read a .pth file that names a folder with non-ASCII letters
    command = [sys.executable, "-S", "-m", "nemo_gpu_decoding.cli.main", "build-lm", "text=\u00fc.txt", "out=\u00f6"]
    path = os.pathsep.join([str(ROOT), *filter(None, sys.path)])
    environment = {**os.environ, "LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONPATH": path}
    done = subprocess.run([*map(os.fsencode, command)], cwd=tmp_path, env=environment, capture_output=True)
    assert "n-grams written to \u00f6" in done.stderr.decode()


@pytest.mark.parametrize("buffered", ["", "1"])
@pytest.mark.parametrize("stdout", ["head", "/dev/full"])
def test_files_are_complete_whatever_happens_to_stdout(buffered, stdout, tmp_path):
    environment = {**os.environ, "PYTHONUNBUFFERED": buffered, "PYTHONPATH": str(ROOT), "PYTHONIOENCODING": "ascii"}
    for out in ([], [f"out={tmp_path}/out"]):
        command = [sys.executable, "-c", SCRIPT, *out]
        with open(stdout, "w") if stdout != "head" else open(os.devnull, "w") as sink:
            target = subprocess.PIPE if stdout == "head" else sink
            program = subprocess.Popen(command, stdout=target, stderr=subprocess.PIPE, env=environment)
            if program.stdout:
                assert program.stdout.readline() == b"line 0 ?ucja\n"
                program.stdout.close()
            err = program.stderr.read().decode()
            code = program.wait()
        if out:
            assert (code, (tmp_path / "out").read_text()) == (3, "whole")
            assert err == (
                "" if stdout == "head" else "the rest of stdout is lost: [Errno 28] No space left on device\n"
            )
        elif stdout == "head":
            assert (code, err) == (0, "")


@pytest.mark.parametrize(
    "streams", [">&-", "2>&-", ">&- 2>&-", "2>/dev/full", ">/dev/full 2>&1", "2>&1 >/dev/null | true"]
)
def test_files_are_complete_whatever_happens_to_stdout_and_stderr(streams, tmp_path):
    script = SCRIPT.replace('Łucja")', 'Łucja")\n        print(n, file=sys.stderr)')
    command = [sys.executable, "-c", script, f"out={tmp_path}/out"]
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    subprocess.run(f"{shlex.join(command)} {streams}", shell=True, env=environment, check=False, capture_output=True)
    assert (tmp_path / "out").read_text() == "whole"


NAMES = [
    "#1.flac", "~a.flac", "${x}.flac", "\\${x}.flac", "take #2.flac", "2024-11-28", "007", "1e3", "yes", "[1].flac",
    "a,b.flac", "{a}", "@x", "- x", "12:30", "a: b", "file:x",
]  # fmt: skip


@pytest.mark.parametrize("name", NAMES)
def test_file_of_any_name_is_accepted(name, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / name).touch()
    arguments = [f"{option}={name}" for option in ("model", "audio", "manifest", "lm", "phrases", "lms.a", "rescore")]
    options = parse_options(TranscribeOptions, [*arguments, "n_best=2", f"out={name}"])
    values = vars(options)
    assert {values[key] for key in ("model", "audio", "manifest", "lm", "phrases", "rescore", "out")} == {name}
    assert options.lms == {"a": name}
    if "," not in name:
        assert parse_options(TranscribeOptions, ["model=m", f"audio=[{name}, '{name}']"]).audio == [name, name]


@pytest.mark.parametrize("form", ["file://{}", "file://localhost{}", "FILE:{}"])
def test_url_names_a_file_by_its_escaped_path(form, tmp_path):
    path = tmp_path / "ü b%.flac"
    assert path_of(form.format(quote(str(path)))) == path
    assert str(path_of("~/lm.arpa")) == os.path.expanduser("~/lm.arpa")


def test_values_that_yaml_would_drop_stay_texts():
    given = {"a": "#1", "b": "x #2", "c": "2024-11-28", "d": "3", "e": "null", "f": "'#1'", "g": "[1,2]"}
    options = parse_options(TranscribeOptions, ["model=m", *(f"decoding.{key}={text}" for key, text in given.items())])
    assert options.decoding == {"a": "#1", "b": "x #2", "c": "2024-11-28", "d": 3, "e": None, "f": "#1", "g": [1, 2]}


@pytest.mark.parametrize("strategy", ["greedy", "greedy_batch", "alsd", "tsd", "beam", "maes", "malsd_batch"])
@pytest.mark.parametrize(
    "option",
    ["lm=f", "lm_weight=1", "phrases=f", "boosting_weight=1", "beam_size=4", "n_best=2", "lms.a=f", "grammar=f"],
)
def test_options_without_effect_are_named(strategy, option, tmp_path, monkeypatch, capsys):
    from nemo_gpu_decoding.cli.transcribe import build_decoding

    monkeypatch.chdir(tmp_path)
    (tmp_path / "f").write_text("a\n")
    name = option.partition("=")[0].partition(".")[0]
    takes = {"beam_size", "n_best"} if "greedy" not in strategy else set()
    takes |= {"lm", "lm_weight"} if strategy in ("beam", "maes", "malsd_batch") else set()
    takes |= {"phrases", "boosting_weight"} if strategy == "malsd_batch" else set()
    options = parse_options(TranscribeOptions, ["model=m", f"strategy={strategy}", option])
    if name in takes:
        build_decoding(options)
        return
    with pytest.raises(ValueError, match=f"^{name}=.* has no effect with strategy {strategy}, "):
        build_decoding(options)
