"""A token LM of another tokenizer is named after the first utterances."""

import logging

import numpy as np
import pytest
import torch

from nemo_gpu_decoding import FlexCTCBeam, FlexCTCConfig, Fusion, estimate_ngram_lm, load_ngram_lm, write_arpa

VOCAB = 50


@pytest.mark.parametrize("is_foreign", [False, True])
def test_lm_of_another_tokenizer_is_named_once(is_foreign, tmp_path, caplog):
    """Texts are walks over the tokens in steps of 1 to 3; the foreign LM has the tokens in another order."""
    rng = np.random.default_rng(0)
    texts = [(np.cumsum(rng.integers(1, 4, 12)) % VOCAB).tolist() for _ in range(400)]
    names = rng.permutation(VOCAB) if is_foreign else np.arange(VOCAB)
    lines = [[str(names[token]) for token in text] for text in texts]
    write_arpa(estimate_ngram_lm(lines, order=2), tmp_path / "tokens.arpa")
    lm = load_ngram_lm(tmp_path / "tokens.arpa", vocab_size=VOCAB)
    decoder = FlexCTCBeam(VOCAB, VOCAB, FlexCTCConfig(beam_size=4), Fusion(lm=lm, lm_weight=0.3))
    labels = torch.tensor([[label for token in text for label in (token, VOCAB)] for text in texts[:30]])
    log_probs = torch.log_softmax(20.0 * torch.nn.functional.one_hot(labels, VOCAB + 1), dim=-1)
    with caplog.at_level(logging.WARNING, "nemo_gpu_decoding"):
        for batch in log_probs.split(3):
            decoder.decode(batch)
    messages = [message for message in caplog.messages if "another tokenizer" in message]
    assert len(messages) == is_foreign
    assert all(f"the LM {lm.name} gives the decoded tokens" in message for message in messages)
