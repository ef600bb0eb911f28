"""An option of a strategy is one declaration: checks, help and NeMo's section know it."""

from dataclasses import dataclass

import pytest
from omegaconf import OmegaConf

from nemo_gpu_decoding.checks import FieldError
from nemo_gpu_decoding.cli.options import help_text
from nemo_gpu_decoding.schema import checked_options, option
from tests.sixth_strategy.toy import ToyConfig


@checked_options
@dataclass(frozen=True)
class WiderConfig(ToyConfig):
    # Number of labels per frame that are tried, 1 .. 9.
    labels: int = option(3, low=1, high=9, nemo="num_labels")


@pytest.mark.parametrize("value", [0, 10, "3", None])
def test_invalid_value_raises_an_error_with_the_range(value):
    with pytest.raises(FieldError, match=f"labels is {value!r}, expected an integer 1 .. 9"):
        WiderConfig(labels=value)


def test_help_shows_the_default_and_the_comment():
    text = help_text("toy", "decodes", WiderConfig, [])
    assert "  labels=3\n      Number of labels per frame that are tried, 1 .. 9.\n" in text


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
