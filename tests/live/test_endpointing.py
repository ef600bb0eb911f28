"""Kaldi's endpointing rules on partial results."""

import math
import re
from dataclasses import replace

import pytest
import torch

from nemo_gpu_decoding.live.endpointing import (
    KALDI_RULES,
    EndpointConfig,
    EndpointRule,
    StreamProgress,
    find_endpoint,
    progress_of,
    read_rules,
    trailing_blank_frames,
)
from nemo_gpu_decoding.search.flexctc_beam.decoder import FlexCTCBeam
from nemo_gpu_decoding.search.transducer.alsd import ALSDPlusPlus
from nemo_gpu_decoding.search.word_graph.config import WFSTConfig
from nemo_gpu_decoding.search.word_graph.decoder import CudaWFST
from tests.graph.toy import BLANK, PIECES
from tests.search.transducer.table_networks import TableNetworks, random_frames
from tests.search.word_graph.models import toy_graph

FRAME = 0.08
LESS = 1e-3


def ends(length: float, silence: float, cost: float = math.inf) -> str | None:
    return find_endpoint(StreamProgress(length, silence, cost))


@pytest.mark.parametrize(
    ("rule", "progress"),
    [
        ("rule1", StreamProgress(5.0, 5.0)),
        ("rule2", StreamProgress(3.0, 0.5, 2.0)),
        ("rule3", StreamProgress(3.0, 1.0, 8.0)),
        ("rule4", StreamProgress(3.0, 2.0)),
        ("rule5", StreamProgress(20.0, 0.0)),
    ],
)
def test_endpoint_rules_at_their_thresholds(rule, progress):
    assert find_endpoint(progress) == rule
    asked = getattr(KALDI_RULES, rule)
    if asked.min_trailing_silence:
        shorter = replace(progress, trailing_silence=progress.trailing_silence - LESS)
        if rule == "rule1":  # nothing was said before either
            shorter = replace(shorter, utterance_length=shorter.trailing_silence)
        assert find_endpoint(shorter) is None
    if asked.max_relative_cost < math.inf:
        assert find_endpoint(replace(progress, relative_cost=progress.relative_cost + LESS)) is None
    if asked.min_utterance_length:
        assert find_endpoint(replace(progress, utterance_length=20.0 - LESS)) is None


def test_leading_silence_is_no_endpoint():
    assert ends(4.9, 4.9, cost=0.0) is None
    assert ends(4.9, 4.8, cost=0.0) == "rule2"
    assert ends(9.0, 1.9) is None
    assert ends(9.0, 1.9, cost=7.0) == "rule3"
    assert ends(9.0, 2.0) == "rule4"


def test_rules_can_be_changed_and_switched_off():
    progress = StreamProgress(30.0, 0.3, 0.0)
    config = EndpointConfig(rule2=EndpointRule(True, 0.2, 1.0), rule5=None)
    assert find_endpoint(progress) == "rule5"
    assert find_endpoint(progress, config) == "rule2"
    assert find_endpoint(progress, replace(config, rule2=None)) is None


def says(*labels: int) -> torch.Tensor:
    """[1, T, V + 1] log-probs that leave no doubt."""
    log_probs = torch.full((1, len(labels), len(PIECES) + 1), -20.0)
    log_probs[0, torch.arange(len(labels)), torch.tensor(labels)] = 0.0
    return log_probs


@pytest.fixture(params=["flexctc_beam", "cuda_wfst"])
def decoder(request):
    if request.param == "flexctc_beam":
        return FlexCTCBeam(len(PIECES), BLANK)
    pytest.importorskip("kaldifst")
    return CudaWFST(toy_graph(0), len(PIECES), BLANK, WFSTConfig(beam=40.0, threads=1, backend="cpu"))


def test_silence_is_counted_over_chunks_of_partial_results(decoder):
    streams = decoder.open(1)
    spelling = toy_graph(0).spellings
    first = int(spelling.tokens[spelling.begin[0]])
    seen = []
    for chunk in ([BLANK] * 3, [first, first, BLANK], [BLANK] * 5):
        decoder.push(streams, says(*chunk), [len(chunk)])
        (partial,) = decoder.partial(streams)
        progress = progress_of(partial, FRAME)
        assert progress.utterance_length == pytest.approx(partial.num_frames * FRAME)
        assert progress.trailing_silence == pytest.approx(trailing_blank_frames(partial) * FRAME)
        seen.append((partial.num_frames, trailing_blank_frames(partial), progress.contains_speech))
    assert seen == [(3, 3, False), (6, 1, True), (11, 6, True)]
    assert find_endpoint(progress_of(partial, FRAME, relative_cost=0.0)) is None  # 0.48 s of silence
    decoder.push(streams, says(BLANK), [1])
    (partial,) = decoder.partial(streams)
    assert find_endpoint(progress_of(partial, FRAME, relative_cost=0.0)) == "rule2"


def test_relative_cost_of_a_word_graph_is_that_of_its_end():
    pytest.importorskip("kaldifst")
    graph = toy_graph(0)
    decoder = CudaWFST(graph, len(PIECES), BLANK, WFSTConfig(beam=1e3, threads=1, backend="cpu"))
    spelling = graph.spellings.tokens[: graph.spellings.begin[1]].tolist()
    streams = decoder.open(1)
    decoder.push(streams, says(*spelling, *[BLANK] * 13), [len(spelling) + 13])
    (partial,) = decoder.partial(streams)
    (ended,) = decoder.close(streams)
    assert partial.relative_cost > 0  # the graph charges for the end
    assert partial.best.score - partial.relative_cost == pytest.approx(ended.best.score, abs=1e-3)
    assert ended.relative_cost is None
    assert progress_of(partial, FRAME).relative_cost == partial.relative_cost
    assert find_endpoint(progress_of(partial, FRAME)) in ("rule2", "rule3")


def test_stream_without_frames_has_no_endpoint():
    decoder = FlexCTCBeam(len(PIECES), BLANK)
    (partial,) = decoder.partial(decoder.open(1))
    assert find_endpoint(progress_of(partial, FRAME)) is None


def test_trailing_silence_is_never_negative():
    """Every token of this TDT model moves on by 4 frames."""
    decoder = ALSDPlusPlus(TableNetworks(9, (4,), seed=3, blank_bias=-20.0))
    streams = decoder.open(1)
    decoder.push(streams, random_frames(1, 2, seed=0), [2])
    (partial,) = decoder.partial(streams)
    assert partial.best.frames[-1] + partial.best.repeats[-1] > partial.num_frames
    assert trailing_blank_frames(partial) == 0
    assert progress_of(partial, FRAME).trailing_silence == 0


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: StreamProgress(-1.0, 0.0), "utterance_length is -1.0, expected a number >= 0"),
        (lambda: StreamProgress(1.0, 2.0), "trailing_silence is 2.0, expected at most 1.0"),
        (lambda: StreamProgress(1.0, 0.0, math.nan), "relative_cost is nan"),
        (lambda: EndpointRule(True, min_trailing_silence=-0.1), "min_trailing_silence is -0.1"),
        (lambda: progress_of(None, 0.0), "frame_seconds is 0.0, expected a finite number > 0"),
    ],
)
def test_invalid_number_of_a_rule_is_named(make, message):
    with pytest.raises(ValueError, match=message):
        make()


def test_rules_are_read_from_a_config_file():
    assert read_rules("kaldi") == KALDI_RULES
    rules = read_rules({"rule1": None, "rule2": {"min_trailing_silence": 0.8}})
    assert rules == replace(KALDI_RULES, rule1=None, rule2=replace(KALDI_RULES.rule2, min_trailing_silence=0.8))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ("nemo", "rules is 'nemo', expected kaldi, or conditions of rule1 .. rule5"),
        ({"rule6": {}}, "rules.rule6 is {}, expected a key of rule1, rule2"),
        ({"rule1": 5.0}, "rules.rule1 is 5.0, expected conditions, or null"),
        ({"rule1": {"silence": 1}}, "rules.rule1.silence is 1, expected a key of must_contain_speech"),
        ({"rule1": {"min_trailing_silence": -1}}, "rules.rule1.min_trailing_silence is -1, expected a number >= 0"),
        ({"rule1": {"max_relative_cost": "x"}}, "rules.rule1.max_relative_cost is 'x', expected a number >= 0"),
        ({"rule1": {"must_contain_speech": 1}}, "rules.rule1.must_contain_speech is 1, expected True or False"),
    ],
)
def test_wrong_rules_of_a_config_file_are_named(options, message):
    with pytest.raises(ValueError, match=re.escape(message)):
        read_rules(options)
