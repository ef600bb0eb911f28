"""What decoders with an LM and phrases over tokens keep beyond the battery."""

from __future__ import annotations

from typing import Any

import pytest

from nemo_gpu_decoding.fusion.fusion import Fusion, Request
from tests.contract.battery import DecoderContract
from tests.contract.subject import BATCH, LENGTHS, all_facts
from tests.random_models import random_boosting, random_lm

VOCAB = 12


class TokenFusionContract(DecoderContract):
    """flexctc_beam, alsd_pp, aes_pp."""

    lm_scores_the_end = True

    def with_fusion(self, variant: str, fusion: Fusion, **options: Any) -> Any:
        """A decoder with the options that `fused` has."""
        raise NotImplementedError

    def fused(self, variant, **options):
        return self.with_fusion(variant, self.fusion(), **options)

    def bare(self, variant, **options):
        return self.with_fusion(variant, Fusion(), **options)

    def fusion(self) -> Fusion:
        return Fusion(random_lm(VOCAB, seed=1), 0.4, random_boosting(VOCAB, seed=2), 0.5)

    def wish(self):
        tree = random_boosting(VOCAB, seed=9, bonus=4.0)
        return Request(boosting=tree, boosting_weight=2.0, lm_weight=0.1)

    @pytest.mark.parametrize("requested", [False, True])
    def test_parts_are_what_the_automata_say(self, decoder, inputs, requested):
        own, wish = self.fusion(), self.wish()
        says = Fusion(own.lm, 0.1, wish.boosting, 2.0) if requested else own
        for nbest in decoder.decode(inputs, LENGTHS, [wish] * BATCH if requested else None):
            for path in nbest:
                lm = says.lm.score(path.tokens, final=self.lm_scores_the_end)
                assert path.parts.lm == pytest.approx(says.lm_weight * lm, abs=1e-3)
                boosting = says.boosting.score(path.tokens)
                assert path.parts.boosting == pytest.approx(says.boosting_weight * boosting, abs=1e-3)

    def test_ties_go_to_the_smaller_label(self, variant):
        decoder, flat = self.without_preference(variant)
        assert set(decoder.decode(flat[:1], [6])[0].best.tokens.tolist()) <= {0, 1}

    def test_requests_are_as_good_as_a_decoder_made_so(self, variant, decoder, inputs):
        lm, wish = self.fusion().lm, self.wish()
        other = self.with_fusion(variant, Fusion(lm, 0.1, wish.boosting, 2.0))
        requested = decoder.decode(inputs, LENGTHS, [wish] * BATCH)
        assert all_facts(requested) == all_facts(other.decode(inputs, LENGTHS))

    def test_weight_zero_means_absent(self, variant, decoder, inputs):
        own, bare = self.fusion(), all_facts(self.bare(variant).decode(inputs, LENGTHS))
        off = self.with_fusion(variant, Fusion(own.lm, 0.0, own.boosting, 0.0))
        assert all_facts(off.decode(inputs, LENGTHS)) == bare
        requests = [Request(lm_weight=0.0, boosting_weight=0.0)] * BATCH
        assert all_facts(decoder.decode(inputs, LENGTHS, requests)) == bare

    def test_phrases_over_another_vocabulary_are_named(self, decoder, inputs):
        wrong = Request(boosting=random_boosting(VOCAB + 1, seed=0))
        with pytest.raises(
            ValueError, match=r"requests\[0\].boosting .* made for 13 tokens, expected 12"
        ):
            decoder.decode(inputs, LENGTHS, [wrong, None, None, None, None, None])

    def test_lm_weights_need_an_lm(self, variant, inputs):
        with pytest.raises(
            ValueError, match=r"requests\[0\].lm_weight is 0.5, but the decoder has no LM"
        ):
            self.bare(variant).decode(inputs[:1], [3], [Request(lm_weight=0.5)])

    def test_wrong_lm_is_named(self, variant):
        with pytest.raises(
            ValueError, match=r"fusion.lm \(random LM 0\) was made for 5 tokens, expected 12"
        ):
            self.with_fusion(variant, Fusion(lm=random_lm(5, seed=0)))
