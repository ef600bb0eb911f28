"""What CTC decoders over tokens keep: the whole battery, and what follows from CTC's alignments."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from nemo_gpu_decoding.fusion.fusion import Fusion
from tests.contract.log_probs import LogProbsContract
from tests.contract.subject import BATCH, FRAMES, LENGTHS, facts
from tests.contract.token_fusion import VOCAB, TokenFusionContract
from tests.random_models import random_log_probs

__all__ = ["BATCH", "FRAMES", "VOCAB", "CTCDecoderContract", "facts"]


class CTCDecoderContract(LogProbsContract, TokenFusionContract):
    """The variants are the modes of `merge`."""

    variants = ("max", "sum", "prefix")
    width = VOCAB + 1
    most_partial, n_best = 8, 4
    insertion = 0.3

    def make(self, vocab_size: int, blank_id: int, fusion: Fusion | None = None, **options: Any) -> Any:
        raise NotImplementedError

    def with_fusion(self, variant, fusion, *, blank_id=VOCAB, **options):
        options = {"beam_size": 8, "n_best": self.n_best, "beam_beta": self.insertion, **options}
        return self.make(VOCAB, blank_id, fusion, merge=variant, **options)

    def test_tokens_last_as_long_as_their_frames(self, decoder, inputs):
        probabilities = inputs.exp().cpu().numpy()
        for b, nbest in enumerate(decoder.decode(inputs, LENGTHS)):
            for path in nbest:
                assert (path.frames + path.repeats <= LENGTHS[b]).all()
                assert (np.diff(path.frames) >= path.repeats[:-1]).all()
                for token, frame, repeats, confidence in zip(
                    path.tokens, path.frames, path.repeats, path.token_confidence, strict=True
                ):
                    mean = probabilities[b, frame : frame + repeats, token].mean()
                    assert confidence == pytest.approx(mean, rel=1e-4)

    def test_the_end_finds_no_new_text(self, decoder, inputs):
        """It changes scores by final weights, and so the order."""
        streams = decoder.open(BATCH)
        decoder.push(streams, inputs, LENGTHS)
        partial = decoder.partial(streams, n_best=self.most_partial)
        for early, nbest in zip(partial, decoder.close(streams), strict=True):
            assert {self.text(path) for path in nbest} <= {self.text(path) for path in early}

    def test_beam_of_one_is_greedy(self, inputs):
        """merge=max and a beam of one follow the best label of each frame: greedy's objective."""
        decoder = self.make(VOCAB, VOCAB, beam_size=1, merge="max")
        for b, nbest in enumerate(decoder.decode(inputs, LENGTHS)):
            labels = inputs[b, : LENGTHS[b]].argmax(-1).tolist()
            starts = [t for t, v in enumerate(labels) if v != VOCAB and (t == 0 or labels[t - 1] != v)]
            assert nbest.best.frames.tolist() == starts
            assert nbest.best.tokens.tolist() == [labels[t] for t in starts]

    def test_beam_wider_than_everything(self, variant):
        log_probs = random_log_probs(1, 2, 3, seed=5).to(self.device)
        options = {"beam_size": 64, "n_best": 64, "beam_threshold": float("inf")}
        nbest = self.make(2, 2, merge=variant, **options).decode(log_probs, [2])[0]
        assert {self.text(path) for path in nbest} == {(), (0,), (1,), (0, 1), (1, 0)}

    @pytest.mark.parametrize("blank_id", [0, 4, VOCAB])
    def test_blank_may_be_any_column(self, variant, decoder, inputs, blank_id):
        columns = [c for c in range(VOCAB + 1) if c != blank_id]
        moved = torch.empty_like(inputs)
        moved[:, :, columns] = inputs[:, :, :VOCAB]
        moved[:, :, blank_id] = inputs[:, :, VOCAB]
        usual = decoder.decode(inputs, LENGTHS)
        other = self.with_fusion(variant, self.fusion(), blank_id=blank_id).decode(moved, LENGTHS)
        for a, b in zip(usual, other, strict=True):
            assert [columns[token] for token in a.best.tokens] == b.best.tokens.tolist()
            assert a.best.score == b.best.score

    @pytest.mark.parametrize("blank_id", [-1, VOCAB + 1])
    def test_wrong_blank_is_named(self, blank_id):
        with pytest.raises(ValueError, match=f"blank_id is {blank_id}, expected 0 .. {VOCAB}"):
            self.make(VOCAB, blank_id)
