"""An option of a strategy is one declaration: checks, help and NeMo's section know it."""

import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import pytest
from omegaconf import OmegaConf

from nemo_gpu_decoding.checks import FieldError
from nemo_gpu_decoding.cli.decoding import DecodingOptions
from nemo_gpu_decoding.cli.options import help_text, parse_options, with_options_of
from nemo_gpu_decoding.cli.tune import TuneOptions
from nemo_gpu_decoding.schema import checked_options, option
from nemo_gpu_decoding.search.flexctc_beam import config as flexctc_beam
from tests.sixth_strategy.toy import ToyConfig


@checked_options
@dataclass(frozen=True)
class WiderConfig(ToyConfig):
    # Number of labels per frame that are tried, 1 .. 9.
    labels: int = option(3, low=1, high=9, nemo="num_labels", cli=True)


@pytest.mark.parametrize("value", [0, 10, "3", None])
def test_invalid_value_raises_an_error_with_the_range(value):
    with pytest.raises(FieldError, match=f"labels is {value!r}, expected an integer 1 .. 9"):
        WiderConfig(labels=value)


def test_help_shows_the_default_and_the_comment():
    text = help_text("toy", "decodes", WiderConfig, [])
    assert "  labels=3\n      Number of labels per frame that are tried, 1 .. 9.\n" in text


def test_commands_have_the_option_with_the_key_as_its_name():
    transcribe = with_options_of([WiderConfig])(DecodingOptions)
    text = help_text("toy", "decodes", transcribe, [])
    assert text.count("  num_labels=null\n      Number of labels per frame that are tried, 1 .. 9.\n") == 1
    assert parse_options(transcribe, ["model=m", "num_labels=5"]).num_labels == 5
    tune = with_options_of([WiderConfig], listed=True)(TuneOptions)
    assert parse_options(tune, ["model=m", "manifest=m", "num_labels=2,3"]).num_labels == [2, 3]
    with pytest.raises(ValueError, match="num_labels=x"):
        parse_options(transcribe, ["model=m", "num_labels=x"])


WITH_LABELS = """
import importlib.util, sys

name = "nemo_gpu_decoding.search.flexctc_beam.config"
spec = importlib.util.spec_from_file_location(name, sys.argv[1])
sys.modules[name] = importlib.util.module_from_spec(spec)
spec.loader.exec_module(sys.modules[name])

from nemo_gpu_decoding.cli import decoding, grid, transcribe, tune
from nemo_gpu_decoding.cli.options import help_text, parse_options

assert "  labels=null\\n      Number of labels." in help_text("toy", "decodes", transcribe.OPTIONS, [])
options = parse_options(transcribe.OPTIONS, ["model=m", "labels=5"])
assert decoding.config_with_n_best(options, "ctc", 1).beam.labels == 5
options = parse_options(tune.OPTIONS, ["model=m", "manifest=m", "labels=2,3"])
absent = {"has_lm": False, "has_phrases": False}
assert {point.labels for point in grid.points_of(options, "flexctc_beam", **absent)} == {2, 3}
try:
    grid.points_of(options, "alsd_pp", **absent)
except ValueError as error:
    sys.exit(str(error) != "labels is [2, 3], which has no effect with alsd_pp without lm or phrases")
"""


def test_a_new_option_of_flexctc_beam_is_a_change_of_one_file(tmp_path):
    source = Path(flexctc_beam.__file__).read_text()
    option = "    # Number of labels.\n    labels: int = option(3, low=1, cli=True)\n"
    (tmp_path / "config.py").write_text(source.replace("    # How hypotheses", f"{option}    # How hypotheses", 1))
    subprocess.run([sys.executable, "-c", WITH_LABELS, str(tmp_path / "config.py")], check=True)


@pytest.mark.nemo
def test_section_reads_the_key():
    from nemo_gpu_decoding.nemo_plugin.beam_sections import MORE
    from nemo_gpu_decoding.nemo_plugin.section import Section

    def read(**beam):
        return Section("toy", "ctc", "beam", WiderConfig, MORE).read(OmegaConf.create({"beam": beam}))

    assert read(num_labels=5).config(WiderConfig, n_best=1).labels == 5
    assert read().config(WiderConfig, n_best=1).labels == 3
    with pytest.raises(FieldError, match=r"beam\.num_labels is 0, expected an integer 1 .. 9"):
        read(num_labels=0).config(WiderConfig, n_best=1)
    with pytest.raises(ValueError, match=r"unknown key 'beam\.num_label' \(did you mean 'num_labels'\?\)"):
        read(num_label=5)
