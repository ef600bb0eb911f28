from __future__ import annotations

import pytest

from nemo_gpu_decoding.bench.options import BenchOptions
from nemo_gpu_decoding.bench.run import run
from nemo_gpu_decoding.cli.options import help_text, parse_options


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"peers": ["nemo", "kaldi"]}, "peers holds kaldi"),
        ({"beams": []}, "beams is"),
        ({"beams": [0]}, "beams is"),
        ({"repeats": 0}, "repeats is 0"),
        ({"threads": 0}, "threads is 0"),
        ({"utterances": 0}, "utterances is 0"),
        ({"max_frames": 10}, "max_frames is 10"),
        ({"lm_weight": float("nan")}, "lm_weight is nan"),
        ({"pair_seconds": float("inf")}, "pair_seconds is inf"),
        ({"lm": "x.arpa"}, "lm is 'x.arpa' without data="),
        ({"data": "nowhere.npz"}, "data is 'nowhere.npz', expected an existing file"),
        ({"device": "gpu"}, "device is 'gpu', expected cpu, cuda or cuda:N"),
        ({"batches": [0]}, r"batches is \[0\]"),
        ({"check_utterances": 0}, "check_utterances is 0"),
        ({"encoder_width": 12}, "encoder_width is 12, expected a multiple of 8"),
        ({"encoder_precision": "int8"}, "encoder_precision is 'int8', expected bfloat16"),
        ({"model": "m.nemo"}, "model is 'm.nemo' with device=cpu"),
        ({"device": "cuda", "model": "m.nemo"}, "model and manifest go together"),
        ({"device": "cuda", "model": "m.nemo", "tokenizer": "t"}, "tokenizer is 't' with model="),
        ({"device": "cuda", "model": "m.nemo", "manifest": "m"}, "model is 'm.nemo', expected an exist"),
        ({"out": "nowhere/r.json"}, "out is 'nowhere/r.json'"),
    ],
)
def test_bad_values_name_the_option(changes, message):
    with pytest.raises(ValueError, match=message):
        BenchOptions(**changes)


def test_unknown_strategy_lists_the_known_ones():
    with pytest.raises(ValueError, match="strategy is 'nonsense', expected one of flexctc_beam"):
        run(BenchOptions(strategy="nonsense"))


def test_options_can_be_typed_on_a_command_line():
    options = parse_options(BenchOptions, ["peers=[nemo,flashlight]", "beams=[4,16]", "utterances=2"])
    assert options == BenchOptions(peers=["nemo", "flashlight"], beams=[4, 16], utterances=2)


def test_every_option_explains_itself():
    text = help_text("bench", "measure", BenchOptions, [])
    for name in ("peers", "beams", "data", "lm_weight", "probes"):
        assert f"  {name}=" in text
    assert "Beam sizes K." in text
