"""What transducer decoders keep: the whole battery, and what concerns their networks and alignments.

The networks are tables whose output for a row is exact, so that results are compared to the bit.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from nemo_gpu_decoding.fusion.fusion import Fusion
from tests.contract.subject import BATCH, LENGTHS, all_facts, facts
from tests.contract.token_fusion import VOCAB, TokenFusionContract
from tests.search.transducer.table_networks import WIDTH, TableNetworks, random_frames

__all__ = ["VOCAB", "TransducerDecoderContract", "all_facts", "facts"]

KINDS = {"rnnt": (), "tdt": (0, 1, 2, 4)}


class TransducerDecoderContract(TokenFusionContract):
    """The variants are the kinds of models."""

    variants = tuple(KINDS)
    argument, axes = "encoder_output", "[B, T, D]"
    width = WIDTH
    forbidden = (float("nan"), float("inf"), -float("inf"))
    most_partial, n_best = 6, 4
    calls_per_thread = 3
    lm_scores_the_end = False

    def make(self, networks: TableNetworks, fusion: Fusion | None = None, **options: Any) -> Any:
        raise NotImplementedError

    def with_fusion(self, variant, fusion, **options):
        options = {"beam_size": 6, "n_best": self.n_best, "alignments": True, **options}
        return self.make(self.networks_of(variant), fusion, **options)

    def networks_of(self, variant: str) -> TableNetworks:
        return TableNetworks(VOCAB, KINDS[variant], seed=4)

    @pytest.fixture
    def networks(self, variant):
        return self.networks_of(variant)

    def random_inputs(self, batch, frames, *, seed):
        return random_frames(batch, frames, seed=seed)

    def blank_only(self, variant):
        networks = self.networks_of(variant)
        networks.bias[VOCAB] = 100.0
        return self.make(networks, beam_size=4), random_frames(1, 20, seed=3)

    def without_preference(self, variant):
        """Networks whose output is 0 for everything."""
        networks = TableNetworks(VOCAB, KINDS[variant], sharpness=0.0, blank_bias=0.0)
        decoder = self.make(networks, beam_size=6, n_best=self.n_best, alignments=True)
        return decoder, torch.zeros(3, 6, self.width)

    def least_n_best(self, frames):
        return 2 if frames > 0 else 1

    def rating(self, path):
        return path.score / (len(path) + 1)

    def let_threads_work(self, monkeypatch):
        from nemo_gpu_decoding.search.transducer import loop

        monkeypatch.setattr(loop, "WORK_PER_THREAD", 0)

    def wrong_width(self, width):
        return rf"encoder_output has shape \(2, 5, {width}\), expected \[B, T, {WIDTH}\]"

    # ------------------------------------------------------------------ results

    def test_without_score_norm_the_score_itself_sorts(self, variant, inputs):
        decoder = self.fused(variant, score_norm=False)
        for nbest, length in zip(decoder.decode(inputs, LENGTHS), LENGTHS, strict=True):
            scores = [path.score for path in nbest]
            assert scores == sorted(scores, reverse=True)
            texts = {self.text(path) for path in nbest}
            assert len(texts) == len(nbest) >= self.least_n_best(length)

    def test_durations_are_the_times_between_tokens(self, decoder, inputs):
        for nbest in decoder.decode(inputs, LENGTHS):
            for path in nbest:
                if path.durations is not None:
                    assert (np.diff(path.frames) >= path.durations[:-1]).all()
                    assert (path.repeats == np.maximum(path.durations, 1)).all()

    def test_alignments_hold_the_tokens_and_all_blanks(self, decoder, networks, inputs):
        for nbest, length in zip(decoder.decode(inputs, LENGTHS), LENGTHS, strict=True):
            for path in nbest:
                emits = path.alignment < VOCAB
                assert path.alignment[emits].tolist() == path.tokens.tolist()
                assert path.alignment_frames[emits].tolist() == path.frames.tolist()
                assert np.allclose(np.exp(path.alignment_log_probs[emits]), path.token_confidence)
                if not networks.durations:  # a blank ends every frame
                    assert path.alignment_frames[~emits].tolist() == list(range(length))

    # ------------------------------------------------------------------ edges

    def test_blanks_of_duration_zero_move_on(self, inputs):
        networks = TableNetworks(VOCAB, (0, 1, 2), seed=4)
        networks.bias[VOCAB], networks.bias[VOCAB + 1] = 100.0, 100.0
        best = self.make(networks, beam_size=4, alignments=True).decode(inputs[:1], [10])[0].best
        assert best.alignment.tolist() == [VOCAB] * 10
        assert best.alignment_frames.tolist() == list(range(10))

    def test_beam_wider_than_everything(self):
        networks = TableNetworks(2, max_length=2, seed=5)
        nbest = self.make(networks, beam_size=64, n_best=64).decode(random_frames(1, 2, seed=1), [2])[0]
        texts = {self.text(path) for path in nbest}
        assert texts <= {(), (0,), (1,), (0, 0), (0, 1), (1, 0), (1, 1)}
        assert len(texts) >= 3

    def test_temperature_divides_the_logits(self, networks, inputs):
        warm = self.make(networks, beam_size=4, softmax_temperature=2.0).decode(inputs, LENGTHS)
        plain = self.make(networks, beam_size=4).decode(inputs, LENGTHS)
        networks.output, networks.bias = networks.output / 2, networks.bias / 2
        halved = self.make(networks, beam_size=4).decode(inputs, LENGTHS)
        for a, b in zip(warm, halved, strict=True):
            assert a.best.tokens.tolist() == b.best.tokens.tolist()
            assert a.best.score == pytest.approx(b.best.score, abs=1e-4)
        assert warm[0].best.score != pytest.approx(plain[0].best.score, abs=1e-2)

    # ------------------------------------------------------------------ bad input

    @pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf")])
    def test_networks_that_fail_are_named(self, networks, inputs, value):
        decoder = self.make(networks, beam_size=4)
        networks.bias[:] = value
        streams = decoder.open(BATCH)
        with pytest.raises(ValueError, match=r"networks give NaN or \+inf for utterance 0"):
            decoder.push(streams, inputs, LENGTHS)
        with pytest.raises(ValueError, match="streams is closed"):
            decoder.close(streams)

    def test_nemos_order_of_axes_is_recognised(self, decoder):
        with pytest.raises(ValueError, match=r"NeMo's encoders give \[B, D, T\]"):
            decoder.decode(torch.zeros(2, WIDTH, 9), [5, 5])

    def test_networks_that_do_not_fit_are_named(self, networks):
        networks.durations = (0, 1, 2)
        with pytest.raises(ValueError, match=r"networks give \d+ columns, expected 16"):
            self.make(networks)
