"""What every decoder of word graphs keeps, on every backend. A test class inherits this."""

from __future__ import annotations

import threading
from typing import Any

import numpy as np
import pytest
import torch

from nemo_gpu_decoding.fusion.fusion import Request
from tests.random_models import random_log_probs

FRAMES, BATCH = 30, 6
LENGTHS = [30, 17, 0, 1, 25, 9]


def facts(nbest) -> list[tuple[Any, ...]]:
    """All of a result that can be compared exactly."""
    return [
        (
            path.tokens.tolist(), path.frames.tolist(), path.repeats.tolist(),
            path.token_confidence.tolist(), path.words, path.score, path.parts, nbest.notes,
        )
        for path in nbest
    ]  # fmt: skip


def all_facts(results):
    return [facts(nbest) for nbest in results]


class WordDecoderContract:
    """B utterances of up to T frames over a toy graph with `columns` columns, the last the blank."""

    columns: int

    def make(self, **options: Any):
        raise NotImplementedError

    def wish(self) -> Request:
        """A request that changes results."""
        raise NotImplementedError

    @pytest.fixture(params=["compact", "normal", "minimal"])
    def decoder(self, request):
        return self.make(topology=request.param, beam=9.0)

    @pytest.fixture
    def log_probs(self):
        return random_log_probs(BATCH, FRAMES, self.columns, seed=3)

    # ------------------------------------------------------------------ invariances

    def test_batch_does_not_matter(self, decoder, log_probs):
        together = decoder.decode(log_probs, LENGTHS)
        for b, length in enumerate(LENGTHS):
            alone = decoder.decode(log_probs[b : b + 1, :length], [length])
            assert facts(alone[0]) == facts(together[b])

    @pytest.mark.parametrize("poison", [float("nan"), float("inf"), 0.0, -1e30])
    def test_padding_is_never_read(self, decoder, log_probs, poison):
        expected = decoder.decode(log_probs, LENGTHS)
        padded = torch.cat([log_probs, log_probs], dim=1)
        for b, length in enumerate(LENGTHS):
            padded[b, length:] = poison
        assert all_facts(decoder.decode(padded, LENGTHS)) == all_facts(expected)

    def test_order_does_not_matter(self, decoder, log_probs):
        order = [4, 2, 0, 5, 3, 1]
        expected = decoder.decode(log_probs, LENGTHS)
        shuffled = decoder.decode(log_probs[order], [LENGTHS[i] for i in order])
        assert all_facts(shuffled) == [facts(expected[i]) for i in order]

    @pytest.mark.parametrize("seed", range(4))
    def test_chunks_do_not_matter(self, decoder, log_probs, seed):
        rng = np.random.default_rng(seed)
        streams = decoder.open(BATCH)
        done = np.zeros(BATCH, int)
        while (done < LENGTHS).any():
            sizes = np.minimum(rng.integers(0, 8, BATCH), np.array(LENGTHS) - done)
            chunk = torch.full((BATCH, 8, self.columns), float("nan"))
            for b, size in enumerate(sizes):
                chunk[b, :size] = log_probs[b, done[b] : done[b] + size]
            decoder.push(streams, chunk, sizes.tolist())
            decoder.partial(streams)
            done += sizes
        assert all_facts(decoder.close(streams)) == all_facts(decoder.decode(log_probs, LENGTHS))

    def test_threads_do_not_matter(self, log_probs):
        results = [
            all_facts(self.make(threads=threads).decode(log_probs, LENGTHS)) for threads in (1, 2, 5)
        ]
        assert results[1:] == results[:1] * 2

    def test_callers_may_share_a_decoder(self, decoder, log_probs):
        expected = all_facts(decoder.decode(log_probs, LENGTHS))
        seen, errors = [], []

        def work():
            try:
                for _ in range(5):
                    seen.append(all_facts(decoder.decode(log_probs, LENGTHS)))
            except Exception as error:
                errors.append(error)

        threads = [threading.Thread(target=work) for _ in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert not errors
        assert seen == [expected] * 20

    def test_requests_change_only_their_utterance(self, log_probs):
        decoder, wish = self.make(), self.wish()
        mixed = decoder.decode(log_probs, LENGTHS, [wish, None, wish, None, None, wish])
        plain = decoder.decode(log_probs, LENGTHS)
        own = decoder.decode(log_probs, LENGTHS, [wish] * BATCH)
        assert all_facts(mixed) == [facts((own if b in (0, 2, 5) else plain)[b]) for b in range(BATCH)]
        assert facts(own[0]) != facts(plain[0])

    # ------------------------------------------------------------------ results

    def test_parts_add_up_to_the_score(self, log_probs):
        for nbest in self.make().decode(log_probs, LENGTHS, [self.wish()] * BATCH):
            for path in nbest:
                parts = path.parts
                assert parts.acoustic + parts.lm + parts.boosting == pytest.approx(path.score, abs=1e-9)
                assert parts.acoustic <= 1e-3

    def test_partial_follows_the_stream(self, decoder, log_probs):
        streams = decoder.open(BATCH)
        assert [len(nbest.best) for nbest in decoder.partial(streams)] == [0] * BATCH
        decoder.push(streams, log_probs, LENGTHS)
        partial = decoder.partial(streams)
        assert [nbest.num_frames for nbest in partial] == LENGTHS
        assert all(len(n.best) for n, length in zip(partial, LENGTHS, strict=True) if length > 5)
        assert all_facts(decoder.close(streams)) == all_facts(decoder.decode(log_probs, LENGTHS))

    # ------------------------------------------------------------------ edges and bad input

    def test_empty_batch(self, decoder):
        assert decoder.decode(torch.zeros(0, 5, self.columns), []) == []

    def test_all_blank(self, decoder):
        log_probs = torch.full((1, 20, self.columns), -30.0)
        log_probs[:, :, -1] = 0.0
        assert not decoder.decode(log_probs, [20])[0].best.words

    @pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float64])
    def test_other_float_types(self, decoder, log_probs, dtype):
        rounded = log_probs.to(dtype)
        expected = decoder.decode(rounded.float(), LENGTHS)
        assert all_facts(decoder.decode(rounded, LENGTHS)) == all_facts(expected)

    def test_impossible_labels_are_fine(self, decoder, log_probs):
        log_probs[:, :, 2] = -float("inf")
        assert all(2 not in nbest.best.tokens for nbest in decoder.decode(log_probs, LENGTHS))

    @pytest.mark.parametrize("value", [float("nan"), float("inf")])
    @pytest.mark.parametrize("column", [0, 3, -1])
    def test_bad_values_are_named(self, decoder, log_probs, value, column):
        log_probs[4, 20, column] = value
        named = column % self.columns
        with pytest.raises(ValueError, match=rf"log_probs\[4, 20, {named}\] is (nan|inf)"):
            decoder.decode(log_probs, LENGTHS)

    def test_a_frame_without_any_label_is_named(self, decoder, log_probs):
        log_probs[1, 6] = -float("inf")
        with pytest.raises(ValueError, match=r"log_probs\[1, 6\] leaves no label possible"):
            decoder.decode(log_probs, LENGTHS)

    def test_a_refused_chunk_leaves_the_streams_alone(self, decoder, log_probs):
        streams = decoder.open(BATCH)
        decoder.push(streams, log_probs[:, :5], np.minimum(LENGTHS, 5).tolist())
        bad, rest = log_probs[:, 5:].clone(), [max(0, length - 5) for length in LENGTHS]
        bad[0, 9, 2] = float("nan")
        with pytest.raises(ValueError, match=r"log_probs\[0, 9, 2\] is nan"):
            decoder.push(streams, bad, rest)
        decoder.push(streams, log_probs[:, 5:], rest)
        assert all_facts(decoder.close(streams)) == all_facts(decoder.decode(log_probs, LENGTHS))

    @pytest.mark.parametrize(
        ("shape", "lengths", "message"),
        [
            ((2, 5), [5, 5], r"log_probs has shape \(2, 5\)"),
            ((2, 5, 3), [5, 5], "log_probs has 3 columns"),
            ((2, 5, None), [5], r"lengths has shape \(1,\), expected \(2,\)"),
            ((2, 5, None), [5, 6], r"lengths\[1\] is 6, expected 0 .. 5"),
            ((2, 5, None), [-1, 5], r"lengths\[0\] is -1, expected 0 .. 5"),
        ],
    )
    def test_bad_shapes_are_named(self, decoder, shape, lengths, message):
        zeros = torch.zeros([self.columns if size is None else size for size in shape])
        with pytest.raises(ValueError, match=message):
            decoder.decode(zeros, lengths)

    def test_bad_requests_are_named(self, decoder, log_probs):
        with pytest.raises(ValueError, match="requests has 2 entries, expected 6"):
            decoder.decode(log_probs, LENGTHS, [None, None])
        with pytest.raises(ValueError, match=r"requests\[1\] is a str"):
            decoder.decode(log_probs, LENGTHS, [None, "phrase", None, None, None, None])
        with pytest.raises(ValueError, match=r"requests\[0\].boosting_weight is 0.5, but neither"):
            decoder.decode(log_probs[:1], [3], [Request(boosting_weight=0.5)])

    def test_closed_streams_stay_closed(self, decoder, log_probs):
        streams = decoder.open(1)
        decoder.close(streams)
        for verb in (decoder.close, decoder.partial, lambda s: decoder.push(s, log_probs[:1], [3])):
            with pytest.raises(ValueError, match="streams is closed"):
                verb(streams)

    def test_streams_know_their_number(self, decoder, log_probs):
        with pytest.raises(ValueError, match="log_probs has 6 rows, expected 2"):
            decoder.push(decoder.open(2), log_probs, LENGTHS)
        with pytest.raises(ValueError, match="n is -1"):
            decoder.open(-1)
