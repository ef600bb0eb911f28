"""A language lock on emissions that drift into a second script."""

import numpy as np
import pytest
import torch

from nemo_gpu_decoding.fusion.allowed import allowed_tokens
from nemo_gpu_decoding.fusion.fusion import Request
from nemo_gpu_decoding.metrics import word_errors
from nemo_gpu_decoding.search.flexctc_beam.config import FlexCTCConfig
from nemo_gpu_decoding.search.flexctc_beam.decoder import FlexCTCBeam
from nemo_gpu_decoding.vocabulary import Vocabulary

LATIN, CYRILLIC = "abdeghiklmnoprstuvz", "абдегхиклмнопрстувз"
VOCABULARY = Vocabulary((*("▁" + c for c in LATIN), *LATIN, *("▁" + c for c in CYRILLIC), *CYRILLIC), "bpe")
HALF, BLANK = 2 * len(LATIN), len(VOCABULARY)


def emissions(drift, *, utterances=40, tokens=30, seed=0):
    """Log-probs [B, T, V + 1] and references; of `drift` of the tokens the Cyrillic twin is the most probable one."""
    rng = np.random.default_rng(seed)
    said = rng.integers(0, HALF, (utterances, tokens))
    logits = rng.normal(0, 1, (utterances, 2 * tokens, BLANK + 1))
    logits[:, 1::2, BLANK] += 9  # a blank after each token
    rows, places = np.indices(said.shape)
    logits[rows, 2 * places, said] += 6
    drifts = rng.random(said.shape) < drift
    logits[rows[drifts], 2 * places[drifts], said[drifts] + HALF] += 8
    return torch.log_softmax(torch.from_numpy(logits).float(), -1), [VOCABULARY.text(row.tolist()) for row in said]


@pytest.mark.parametrize("beam_size", [1, 8])
def test_lock_keeps_the_language_of_its_request_alone(beam_size):
    log_probs, references = emissions(0.15)
    allowed = allowed_tokens(VOCABULARY, scripts=["Latin"])
    assert allowed.is_allowed == (True,) * HALF + (False,) * HALF
    decoder = FlexCTCBeam(BLANK, BLANK, FlexCTCConfig(beam_size=beam_size))
    counted = Request(allowed=allowed_tokens(VOCABULARY, scripts=["Latin"], price=0.0))

    def decode(*requests):
        paths = [n.best for n in decoder.decode(log_probs, requests=list(requests) * (len(references) // 2))]
        texts = [VOCABULARY.text(path.tokens.tolist()) for path in paths]
        return paths, texts, word_errors(references, texts).wer

    plain, free, wer_before = decode(counted, counted)
    assert np.mean([path.outside_share for path in plain]) > 0.1
    locked, texts, wer = decode(Request(allowed=allowed), Request(allowed=allowed))
    assert [path.outside_share for path in locked] == [0.0] * len(locked)
    assert wer < 0.2 * wer_before
    _, mixed, _ = decode(Request(allowed=allowed), None)
    assert mixed == [(texts if i % 2 == 0 else free)[i] for i in range(len(texts))]


def test_an_utterance_of_the_other_script_costs_its_price():
    log_probs, references = emissions(1.0)
    decoder = FlexCTCBeam(BLANK, BLANK, FlexCTCConfig(beam_size=8))
    for price, share in ((1.0, 1.0), (1.9, 0.8), (2.1, 0.2), (3.0, 0.05)):
        request = Request(allowed=allowed_tokens(VOCABULARY, scripts=["Latin"], price=price))
        found = decoder.decode(log_probs, requests=[request] * len(references))
        mean = np.mean([nbest.best.outside_share for nbest in found])
        assert mean > 0.5 if share > 0.5 else mean < 0.5
