"""What every CTC decoder keeps, on every backend. A test class inherits these and says how to make one.

class TestFlexCTCBeamOnCPU(CTCDecoderContract):
    def make(self, vocab_size, blank_id, fusion=None, **options): ...
"""

from __future__ import annotations

import threading
from typing import Any

import numpy as np
import pytest
import torch

from nemo_gpu_decoding.fusion.fusion import Fusion, Request
from tests.random_models import random_boosting, random_lm, random_log_probs

VOCAB, FRAMES, BATCH = 12, 30, 6
LENGTHS = [30, 17, 0, 1, 25, 9]


def facts(nbest) -> list[tuple[Any, ...]]:
    """All of a result that can be compared exactly."""
    return [
        (
            path.tokens.tolist(), path.frames.tolist(), path.repeats.tolist(),
            path.token_confidence.tolist(), path.score, path.parts,
        )
        for path in nbest
    ]  # fmt: skip


class CTCDecoderContract:
    """B utterances of up to T frames; `merge` modes and fusion are run through where they matter."""

    device = "cpu"
    merges = ("max", "sum", "prefix")

    def make(self, vocab_size: int, blank_id: int, fusion: Fusion | None = None, **options: Any):
        raise NotImplementedError

    @pytest.fixture(params=["max", "sum", "prefix"])
    def merge(self, request):
        if request.param not in self.merges:
            pytest.skip(f"no merge={request.param} here")
        return request.param

    @pytest.fixture
    def fusion(self):
        return Fusion(random_lm(VOCAB, seed=1), 0.4, random_boosting(VOCAB, seed=2), 0.5)

    @pytest.fixture
    def decoder(self, merge, fusion):
        return self.make(VOCAB, VOCAB, fusion, beam_size=8, n_best=4, beam_beta=0.3, merge=merge)

    @pytest.fixture
    def log_probs(self):
        return random_log_probs(BATCH, FRAMES, VOCAB + 1, seed=3).to(self.device)

    # ------------------------------------------------------------------ invariances

    def test_batch_does_not_matter(self, decoder, log_probs):
        together = decoder.decode(log_probs, LENGTHS)
        for b, length in enumerate(LENGTHS):
            alone = decoder.decode(log_probs[b : b + 1, :length], [length])
            assert facts(alone[0]) == facts(together[b])

    def test_padding_is_never_read(self, decoder, log_probs):
        expected = decoder.decode(log_probs, LENGTHS)
        for poison in (float("nan"), float("inf"), 0.0, -1e30):
            padded = torch.cat([log_probs, log_probs], dim=1)
            for b, length in enumerate(LENGTHS):
                padded[b, length:] = poison
            assert [facts(n) for n in decoder.decode(padded, LENGTHS)] == [facts(n) for n in expected]

    def test_order_does_not_matter(self, decoder, log_probs):
        order = [4, 2, 0, 5, 3, 1]
        expected = decoder.decode(log_probs, LENGTHS)
        shuffled = decoder.decode(log_probs[order], [LENGTHS[i] for i in order])
        assert [facts(n) for n in shuffled] == [facts(expected[i]) for i in order]

    @pytest.mark.parametrize("seed", range(4))
    def test_chunks_do_not_matter(self, decoder, log_probs, seed):
        rng = np.random.default_rng(seed)
        streams = decoder.open(BATCH)
        done = np.zeros(BATCH, int)
        while (done < LENGTHS).any():
            sizes = np.minimum(rng.integers(0, 8, BATCH), np.array(LENGTHS) - done)
            chunk = torch.full((BATCH, 8, VOCAB + 1), float("nan"), device=self.device)
            for b, size in enumerate(sizes):
                chunk[b, :size] = log_probs[b, done[b] : done[b] + size]
            decoder.push(streams, chunk, sizes.tolist())
            done += sizes
        expected = decoder.decode(log_probs, LENGTHS)
        assert [facts(n) for n in decoder.close(streams)] == [facts(n) for n in expected]

    def test_threads_do_not_matter(self, merge, fusion, log_probs):
        results = [
            self.make(VOCAB, VOCAB, fusion, beam_size=8, n_best=4, merge=merge, threads=threads).decode(
                log_probs, LENGTHS
            )
            for threads in (1, 2, 5)
        ]
        assert [[facts(n) for n in r] for r in results[1:]] == [[facts(n) for n in results[0]]] * 2

    def test_callers_may_share_a_decoder(self, decoder, log_probs):
        expected = [facts(n) for n in decoder.decode(log_probs, LENGTHS)]
        seen, errors = [], []

        def work():
            try:
                for _ in range(5):
                    seen.append([facts(n) for n in decoder.decode(log_probs, LENGTHS)])
            except Exception as error:
                errors.append(error)

        threads = [threading.Thread(target=work) for _ in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert not errors
        assert seen == [expected] * 20

    def test_two_runs_agree(self, decoder, log_probs):
        first, second = (decoder.decode(log_probs, LENGTHS) for _ in range(2))
        assert [facts(n) for n in first] == [facts(n) for n in second]

    def test_ties_break_by_label(self, merge):
        flat = torch.full((1, 3, VOCAB + 1), -float(np.log(VOCAB + 1)), device=self.device)
        decoder = self.make(VOCAB, VOCAB, beam_size=2, merge=merge)
        first, second = decoder.decode(flat, [3])[0].best, decoder.decode(flat.clone(), [3])[0].best
        assert first.tokens.tolist() == second.tokens.tolist()

    # ------------------------------------------------------------------ results

    def test_parts_add_up_to_the_score(self, decoder, log_probs):
        for nbest in decoder.decode(log_probs, LENGTHS):
            for path in nbest:
                parts = path.parts
                total = parts.acoustic + parts.lm + parts.boosting + parts.insertion
                assert total == pytest.approx(path.score, abs=1e-3)
                assert parts.acoustic <= 1e-3
                assert parts.insertion == pytest.approx(0.3 * len(path))

    def test_parts_are_what_the_automata_say(self, decoder, fusion, log_probs):
        for nbest in decoder.decode(log_probs, LENGTHS):
            for path in nbest:
                assert path.parts.lm == pytest.approx(0.4 * fusion.lm.score(path.tokens), abs=1e-3)
                assert path.parts.boosting == pytest.approx(
                    0.5 * fusion.boosting.score(path.tokens), abs=1e-3
                )

    def test_n_best_is_sorted_and_distinct(self, decoder, log_probs):
        for nbest, length in zip(decoder.decode(log_probs, LENGTHS), LENGTHS, strict=True):
            scores = [path.score for path in nbest]
            assert scores == sorted(scores, reverse=True)
            texts = {tuple(path.tokens.tolist()) for path in nbest}
            assert len(texts) == len(nbest) >= (1 if length < 2 else 2)
            assert nbest.num_frames == length

    def test_times_and_confidence_are_plausible(self, decoder, log_probs):
        for b, nbest in enumerate(decoder.decode(log_probs, LENGTHS)):
            for path in nbest:
                assert (np.diff(path.frames) > 0).all()
                assert (path.repeats >= 1).all()
                assert (path.frames + path.repeats <= LENGTHS[b]).all()
                assert (np.diff(path.frames) >= path.repeats[:-1]).all()
                assert ((path.token_confidence > 0) & (path.token_confidence <= 1)).all()
                probabilities = log_probs[b].exp().cpu().numpy()
                for token, frame, repeats, confidence in zip(
                    path.tokens, path.frames, path.repeats, path.token_confidence, strict=True
                ):
                    mean = probabilities[frame : frame + repeats, token].mean()
                    assert confidence == pytest.approx(mean, rel=1e-4)

    def test_beam_of_one_is_greedy(self, log_probs):
        # merge=max and a beam of one follow the best label of each frame: the same objective as greedy
        decoder = self.make(VOCAB, VOCAB, beam_size=1, merge="max")
        for b, nbest in enumerate(decoder.decode(log_probs, LENGTHS)):
            labels = log_probs[b, : LENGTHS[b]].argmax(-1).tolist()
            starts = [t for t, v in enumerate(labels) if v != VOCAB and (t == 0 or labels[t - 1] != v)]
            assert nbest.best.frames.tolist() == starts
            assert nbest.best.tokens.tolist() == [labels[t] for t in starts]

    def test_partial_follows_the_stream(self, decoder, log_probs):
        streams = decoder.open(BATCH)
        assert [len(nbest.best) for nbest in decoder.partial(streams)] == [0] * BATCH
        decoder.push(streams, log_probs, LENGTHS)
        partial = decoder.partial(streams, n_best=8)
        for early, nbest in zip(partial, decoder.close(streams), strict=True):
            assert early.num_frames == nbest.num_frames
            # the end changes scores by final weights, and so the order, but finds no new text
            assert {tuple(path.tokens) for path in nbest} <= {tuple(path.tokens) for path in early}

    def test_partial_knows_its_limits(self, decoder):
        with pytest.raises(ValueError, match=r"n_best is 9, expected 1 \.\. 8"):
            decoder.partial(decoder.open(1), n_best=9)

    # ------------------------------------------------------------------ per-utterance requests

    def test_requests_change_only_their_utterance(self, merge, fusion, log_probs):
        decoder = self.make(VOCAB, VOCAB, fusion, beam_size=8, merge=merge)
        wish = Request(
            boosting=random_boosting(VOCAB, seed=9, bonus=4.0), boosting_weight=2.0, lm_weight=0.1
        )
        mixed = decoder.decode(log_probs, LENGTHS, [wish, None, wish, None, None, wish])
        plain = decoder.decode(log_probs, LENGTHS)
        own = self.make(
            VOCAB, VOCAB, Fusion(fusion.lm, 0.1, wish.boosting, 2.0), beam_size=8, merge=merge
        ).decode(log_probs, LENGTHS)
        assert [facts(n) for n in mixed] == [
            facts((own if b in (0, 2, 5) else plain)[b]) for b in range(BATCH)
        ]
        assert facts(own[0]) != facts(plain[0])

    def test_weight_zero_means_absent(self, merge, fusion, log_probs):
        off = Fusion(fusion.lm, 0.0, fusion.boosting, 0.0)
        results = [
            self.make(VOCAB, VOCAB, f, beam_size=8, merge=merge).decode(log_probs, LENGTHS)
            for f in (off, Fusion())
        ]
        assert [facts(n) for n in results[0]] == [facts(n) for n in results[1]]

    # ------------------------------------------------------------------ edges

    @pytest.mark.parametrize("frames", [0, 5])
    def test_empty_utterances(self, merge, frames):
        decoder = self.make(VOCAB, VOCAB, beam_size=4, n_best=2, merge=merge)
        results = decoder.decode(random_log_probs(2, frames, VOCAB + 1, seed=0).to(self.device), [0, 0])
        assert [(len(n), len(n.best), n.best.score) for n in results] == [(1, 0, 0.0)] * 2

    def test_empty_batch(self, decoder):
        assert decoder.decode(torch.zeros(0, 5, VOCAB + 1, device=self.device), []) == []

    def test_all_blank(self, merge):
        log_probs = torch.full((1, 20, VOCAB + 1), -30.0, device=self.device)
        log_probs[:, :, VOCAB] = 0.0
        best = self.make(VOCAB, VOCAB, beam_size=4, merge=merge).decode(log_probs, [20])[0].best
        assert len(best) == 0

    def test_beam_wider_than_everything(self, merge):
        log_probs = random_log_probs(1, 2, 3, seed=5).to(self.device)
        nbest = self.make(
            2, 2, beam_size=64, n_best=64, merge=merge, beam_threshold=float("inf")
        ).decode(log_probs, [2])[0]
        texts = {tuple(path.tokens.tolist()) for path in nbest}
        assert texts == {(), (0,), (1,), (0, 1), (1, 0)}

    @pytest.mark.parametrize("blank_id", [0, 4, VOCAB])
    def test_blank_may_be_any_column(self, merge, fusion, log_probs, blank_id):
        columns = [c for c in range(VOCAB + 1) if c != blank_id]
        moved = torch.empty_like(log_probs)
        moved[:, :, columns] = log_probs[:, :, :VOCAB]
        moved[:, :, blank_id] = log_probs[:, :, VOCAB]
        usual = self.make(VOCAB, VOCAB, fusion, beam_size=8, merge=merge).decode(log_probs, LENGTHS)
        other = self.make(VOCAB, blank_id, fusion, beam_size=8, merge=merge).decode(moved, LENGTHS)
        for a, b in zip(usual, other, strict=True):
            assert [columns[token] for token in a.best.tokens] == b.best.tokens.tolist()
            assert a.best.score == b.best.score

    def test_impossible_labels_are_fine(self, merge, log_probs):
        log_probs[:, :, 3] = -float("inf")
        decoder = self.make(VOCAB, VOCAB, beam_size=8, merge=merge)
        assert all(3 not in nbest.best.tokens for nbest in decoder.decode(log_probs, LENGTHS))

    @pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float64])
    def test_other_float_types(self, decoder, log_probs, dtype):
        rounded = log_probs.to(dtype)
        expected = decoder.decode(rounded.float(), LENGTHS)
        assert [facts(n) for n in decoder.decode(rounded, LENGTHS)] == [facts(n) for n in expected]

    def test_strided_input(self, decoder, log_probs):
        expected = decoder.decode(log_probs, LENGTHS)
        strided = log_probs.transpose(0, 1).contiguous().transpose(0, 1)
        assert [facts(n) for n in decoder.decode(strided, LENGTHS)] == [facts(n) for n in expected]

    # ------------------------------------------------------------------ bad input

    @pytest.mark.parametrize("value", [float("nan"), float("inf")])
    @pytest.mark.parametrize("column", [0, 7, VOCAB])
    def test_bad_values_are_named(self, decoder, log_probs, value, column):
        log_probs[4, 20, column] = value
        with pytest.raises(ValueError, match=rf"log_probs\[4, 20, {column}\] is (nan|inf)"):
            decoder.decode(log_probs, LENGTHS)

    def test_frame_without_any_label_is_named(self, decoder, log_probs):
        log_probs[1, 6] = -float("inf")
        with pytest.raises(ValueError, match=r"log_probs\[1, 6\] leaves no label possible"):
            decoder.decode(log_probs, LENGTHS)

    def test_a_refused_chunk_leaves_the_streams_alone(self, decoder, log_probs):
        streams = decoder.open(BATCH)
        decoder.push(streams, log_probs[:, :5], np.minimum(LENGTHS, 5).tolist())
        bad = log_probs[:, 5:].clone()
        bad[0, 3, 2] = float("nan")
        rest = [max(0, length - 5) for length in LENGTHS]
        with pytest.raises(ValueError, match=r"log_probs\[0, 3, 2\] is nan"):
            decoder.push(streams, bad, rest)
        decoder.push(streams, log_probs[:, 5:], rest)
        expected = decoder.decode(log_probs, LENGTHS)
        assert [facts(n) for n in decoder.close(streams)] == [facts(n) for n in expected]

    @pytest.mark.parametrize(
        ("log_probs_shape", "lengths", "message"),
        [
            ((2, 5), [5, 5], r"log_probs has shape \(2, 5\), expected \[B, T, V \+ 1\]"),
            ((2, 5, VOCAB), [5, 5], f"log_probs has {VOCAB} columns, expected {VOCAB + 1}"),
            ((2, 5, VOCAB + 1), [5], r"lengths has shape \(1,\), expected \(2,\)"),
            ((2, 5, VOCAB + 1), [5, 6], r"lengths\[1\] is 6, expected 0 .. 5"),
            ((2, 5, VOCAB + 1), [-1, 5], r"lengths\[0\] is -1, expected 0 .. 5"),
            ((2, 5, VOCAB + 1), [2.5, 5], r"lengths holds \[2.5, 5.0\], expected integers"),
        ],
    )
    def test_bad_shapes_are_named(self, decoder, log_probs_shape, lengths, message):
        with pytest.raises(ValueError, match=message):
            decoder.decode(torch.zeros(log_probs_shape, device=self.device), lengths)

    def test_bad_types_are_named(self, decoder):
        with pytest.raises(ValueError, match=r"log_probs has dtype torch\.int64"):
            decoder.decode(torch.zeros(1, 5, VOCAB + 1, dtype=torch.int64, device=self.device), [5])
        with pytest.raises(ValueError, match=r"log_probs is a ndarray, expected a torch\.Tensor"):
            decoder.decode(np.zeros((1, 5, VOCAB + 1)), [5])

    def test_bad_requests_are_named(self, decoder, log_probs):
        with pytest.raises(ValueError, match="requests has 2 entries, expected 6"):
            decoder.decode(log_probs, LENGTHS, [None, None])
        with pytest.raises(ValueError, match=r"requests\[1\] is a str"):
            decoder.decode(log_probs, LENGTHS, [None, "phrase", None, None, None, None])
        wrong = Request(boosting=random_boosting(VOCAB + 1, seed=0))
        with pytest.raises(
            ValueError, match=r"requests\[0\].boosting .* made for 13 tokens, expected 12"
        ):
            decoder.decode(log_probs, LENGTHS, [wrong, None, None, None, None, None])

    def test_requests_need_something_to_weigh(self, merge, log_probs):
        decoder = self.make(VOCAB, VOCAB, beam_size=2, merge=merge)
        with pytest.raises(
            ValueError, match=r"requests\[0\].lm_weight is 0.5, but the decoder has no LM"
        ):
            decoder.decode(log_probs[:1], [3], [Request(lm_weight=0.5)])
        with pytest.raises(ValueError, match=r"requests\[0\].boosting_weight is 0.5, but neither"):
            decoder.decode(log_probs[:1], [3], [Request(boosting_weight=0.5)])

    def test_wrong_lm_is_named(self):
        with pytest.raises(
            ValueError, match=r"fusion.lm \(random LM 0\) was made for 5 tokens, expected 12"
        ):
            self.make(VOCAB, VOCAB, Fusion(lm=random_lm(5, seed=0)))

    @pytest.mark.parametrize("blank_id", [-1, VOCAB + 1])
    def test_wrong_blank_is_named(self, blank_id):
        with pytest.raises(ValueError, match=f"blank_id is {blank_id}, expected 0 .. {VOCAB}"):
            self.make(VOCAB, blank_id)

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
