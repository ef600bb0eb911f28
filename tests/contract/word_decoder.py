"""What decoders of word graphs keep: the whole battery, and what concerns their words."""

from __future__ import annotations

import pytest

from nemo_gpu_decoding.fusion.automaton import empty_automaton
from nemo_gpu_decoding.fusion.fusion import Request
from tests.contract.log_probs import LogProbsContract
from tests.contract.subject import BATCH, LENGTHS, all_facts, facts

__all__ = ["WordDecoderContract", "all_facts", "facts"]


class WordDecoderContract(LogProbsContract):
    """The variants are CTC's topologies. Test classes add `columns`, the width, `make` and `wish`."""

    columns: int
    variants = ("compact", "normal", "minimal")
    most_partial = 1
    score_of_nothing = None
    tolerance = 1e-9

    @property
    def width(self) -> int:
        return self.columns

    def fused(self, variant, **options):
        return self.make(topology=variant, **{"beam": 9.0, **options})

    bare = fused

    def text(self, path):
        return tuple(word.label for word in path.words)

    def test_words_hold_all_tokens_in_their_order(self, decoder, inputs):
        for nbest, length in zip(decoder.decode(inputs, LENGTHS), LENGTHS, strict=True):
            for path in nbest:
                spans = [(word.first_token, word.end_token) for word in path.words]
                assert [i for span in spans for i in range(*span)] == list(range(len(path.tokens)))
                times = [t for word in path.words for t in (word.start_frame, word.end_frame)]
                assert times == sorted(times)
                assert all(0 <= t <= length for t in times)

    def test_boosting_is_what_the_automaton_says(self, decoder, inputs):
        wish = self.wish()
        for nbest in decoder.decode(inputs, LENGTHS, [wish] * BATCH):
            for path in nbest:
                bonus = wish.boosting.score([word.label for word in path.words])
                assert path.parts.boosting == pytest.approx(wish.boosting_weight * bonus, abs=1e-3)

    def test_weight_zero_means_absent(self, decoder, inputs, expected):
        requests = [Request(boosting=self.wish().boosting, boosting_weight=0.0)] * BATCH
        assert all_facts(decoder.decode(inputs, LENGTHS, requests)) == expected

    def test_phrases_over_another_graph_are_named(self, decoder, inputs):
        wrong = Request(boosting=empty_automaton(3))
        with pytest.raises(ValueError, match=r"requests\[0\].boosting .* made for 3 words, expected"):
            decoder.decode(inputs, LENGTHS, [wrong, None, None, None, None, None])
