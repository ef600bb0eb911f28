"""Streams of any length: their scores stay small inside a search, and memory grows with the length."""

import difflib
import resource

import pytest
import torch
from torch import nn

from nemo_gpu_decoding import (
    AESConfig,
    AESPlusPlus,
    ALSDConfig,
    ALSDPlusPlus,
    CudaWFST,
    FlexCTCBeam,
    FlexCTCConfig,
    StatelessNetworks,
    Vocabulary,
    WFSTConfig,
    build_graph,
)
from nemo_gpu_decoding.search import numerics
from tests.oracles.ngram import arpa_text, random_table

WIDTH, TAIL = 9, 200


def transducer(kind, config):
    """Its joint gives the frames: 4 tokens and the blank, and durations 0, 1, 2, 4."""
    size = WIDTH
    copy, silent = nn.Linear(size, size, bias=False), nn.Linear(4, size, bias=False)
    copy.weight.data, silent.weight.data = torch.eye(size), torch.zeros(size, 4)
    networks = StatelessNetworks(
        [nn.Embedding(5, 4)], nn.Identity(), copy, silent, nn.Identity(), durations=(0, 1, 2, 4)
    )
    return kind(networks, config)


DECODERS = {
    **{
        f"flexctc_beam {merge}": lambda merge=merge: FlexCTCBeam(8, 8, FlexCTCConfig(beam_size=8, merge=merge))
        for merge in ("max", "sum", "prefix")
    },
    "alsd_pp": lambda: transducer(ALSDPlusPlus, ALSDConfig(beam_size=4, score_norm=False)),
    "alsd_pp normalised": lambda: transducer(ALSDPlusPlus, ALSDConfig(beam_size=4)),
    "aes_pp": lambda: transducer(AESPlusPlus, AESConfig(beam_size=4)),
}


def random_frames(count, seed):
    return torch.log_softmax(torch.randn(1, count, WIDTH, generator=torch.Generator().manual_seed(seed)), dim=-1)


@pytest.mark.parametrize("name", DECODERS)
def test_a_long_stream_is_decoded_as_a_short_one_and_its_score_is_the_sum(name):
    decoder = DECODERS[name]()
    long, tail = random_frames(12_000, 0), random_frames(TAIL, 1)
    frames = torch.cat((long, tail), dim=1)
    streams = decoder.open(2)
    decoder.push(streams, torch.cat((frames, frames)), [frames.shape[1]] * 2)
    state = streams.engine._state
    assert abs(getattr(state, "beams", state).beam["score"][0, 0]) < 2 * numerics.MOST_SCORE
    (best,) = (nbest.best for nbest in decoder.close(streams, rows=[0]))
    assert best.score < -numerics.MOST_SCORE
    assert best.score == pytest.approx(sum((best.parts.acoustic, best.parts.lm, best.parts.boosting)), rel=1e-6)

    near = decoder.decode(frames[:, -TAIL - 500 :])[0].best  # of the same last frames
    wanted, found = (
        [
            token
            for token, frame in zip(path.tokens.tolist(), path.frames.tolist(), strict=True)
            if frame >= count - TAIL
        ]
        for path, count in ((near, TAIL + 500), (best, frames.shape[1]))
    )
    blocks = difflib.SequenceMatcher(None, wanted, found, autojunk=False).get_matching_blocks()
    assert sum(block.size for block in blocks) >= len(wanted) - 3

    short = decoder.decode(tail)[0].best
    decoder.reopen(streams, [0])  # the next utterance begins at 0, and the other stream goes on
    decoder.push(streams, torch.cat((tail, tail)), [TAIL] * 2)
    again, other = (nbest.best for nbest in decoder.close(streams))
    assert (again.tokens.tolist(), again.score) == (short.tokens.tolist(), pytest.approx(short.score))
    assert other.score < best.score


@pytest.mark.parametrize("name", DECODERS)
def test_results_do_not_depend_on_chunks_where_scores_are_subtracted(name):
    decoder, frames = DECODERS[name](), random_frames(6000, 2)
    whole = decoder.decode(frames)[0].best
    assert whole.score < -numerics.MOST_SCORE
    streams = decoder.open(1)
    for chunk in frames.split(1700, dim=1):
        decoder.push(streams, chunk)
    (nbest,) = decoder.close(streams)
    assert (nbest.best.tokens.tolist(), nbest.best.score) == (whole.tokens.tolist(), whole.score)


def test_memory_of_the_words_of_a_path_grows_with_its_length(tmp_path):
    pytest.importorskip("kaldifst")
    (tmp_path / "lm.arpa").write_text(arpa_text(random_table(["a", "b", "ab", "ba"], order=1, keep=1.0, seed=0)))
    graph = build_graph(tmp_path / "lm.arpa", Vocabulary.from_pieces(["▁a", "▁b", "a", "b"]), cache=False)
    decoder = CudaWFST(graph, 4, 4, config=WFSTConfig(beam=8.0))
    log_probs = torch.log_softmax(torch.randn(1, 100_000, 5, generator=torch.Generator().manual_seed(0)), dim=-1)
    decoder.decode(log_probs[:, :1000])
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss  # in kB
    assert len(decoder.decode(log_probs)[0].best.words) > 10_000
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 150_000
