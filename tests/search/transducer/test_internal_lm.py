"""The internal LM of a transducer: a bigram of its prediction network and joint."""

import numpy as np
import pytest
import torch

from nemo_gpu_decoding import Fusion, load_ngram_lm, write_arpa
from nemo_gpu_decoding.search.transducer import internal_lm as module
from nemo_gpu_decoding.search.transducer.internal_lm import internal_lm
from tests.search.transducer.lstm import lstm_networks

TOKENS = 9


def expected_bigrams(networks):
    """log10 p(v | u), [V + 1, V]; row 0 is the begin of a text."""
    rows = []
    with networks.evaluation():
        silence = networks.project_encoder(torch.zeros(1, networks.encoder_size))
        start, state = networks.start()
        for label in range(-1, TOKENS):
            prediction = start if label < 0 else networks.predict(torch.tensor([label]), state)[0]
            rows.append(torch.log_softmax(networks.join(silence, prediction)[0, :TOKENS].double(), -1) / np.log(10))
    return torch.stack(rows).detach().numpy()


def probability(lm, context, token):
    """p(token | context) by back-off, from the n-grams of the LM."""
    ones, twos = lm.orders
    for pair, log10_prob in zip(twos.symbols.tolist(), twos.log10_probs, strict=True):
        if pair == [context, token + 1]:
            return 10**log10_prob
    return 10 ** (ones.log10_backoffs[context] + ones.log10_probs[token + 1])


@pytest.mark.parametrize(("chunk", "durations"), [(256, ()), (4, (0, 1, 2))])
def test_bigrams_are_those_of_the_networks(monkeypatch, chunk, durations):
    monkeypatch.setattr(module, "CHUNK", chunk)
    networks = lstm_networks(TOKENS, durations=durations)
    lm, expected = internal_lm(networks), expected_bigrams(networks)
    found = [[np.log10(probability(lm, u, v)) for v in range(TOKENS)] for u in range(TOKENS + 1)]
    np.testing.assert_allclose(found, expected, atol=1e-5)
    np.testing.assert_allclose(10 ** lm.orders[0].log10_probs[1:], (10**expected).mean(0), rtol=1e-5)


def test_contexts_with_few_bigrams_sum_to_one(monkeypatch):
    monkeypatch.setattr(module, "MOST_SUCCESSORS", 3)
    networks = lstm_networks(TOKENS)
    lm, expected = internal_lm(networks), 10 ** expected_bigrams(networks)
    assert len(lm.orders[1].symbols) == 3 * (TOKENS + 1)
    for context in range(TOKENS + 1):
        found = np.array([probability(lm, context, token) for token in range(TOKENS)])
        assert found.sum() == pytest.approx(1)
        likely = np.argsort(expected[context])[-3:]
        np.testing.assert_allclose(found[likely], expected[context][likely], rtol=1e-5)


def test_internal_lm_is_usable_as_a_source_lm(tmp_path):
    networks = lstm_networks(TOKENS)
    write_arpa(internal_lm(networks), tmp_path / "source.arpa")
    lm = load_ngram_lm(tmp_path / "source.arpa", TOKENS)
    expected = expected_bigrams(networks) * np.log(10)
    text, contexts = [3, 1, 4, 1, 5], [0, 4, 2, 5, 2]
    assert lm.score(text) == pytest.approx(expected[contexts, text].sum(), abs=1e-3)
    Fusion(lm=lm, lm_weight=0.5, source_lm=lm, source_lm_weight=0.2)
