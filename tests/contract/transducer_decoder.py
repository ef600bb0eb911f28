"""What every transducer decoder keeps, on every backend. A test class inherits these and says how to
make one.

class TestALSDPlusPlusOnCPU(TransducerDecoderContract):
    def make(self, networks, fusion=None, **options): ...

The networks are tables whose output for a row is exact, so that results are compared to the bit.
"""

from __future__ import annotations

import threading
from typing import Any

import numpy as np
import pytest
import torch

from nemo_gpu_decoding.fusion.fusion import Fusion, Request
from tests.random_models import random_boosting, random_lm
from tests.search.transducer.table_networks import WIDTH, TableNetworks, random_frames

VOCAB, FRAMES, BATCH = 12, 24, 6
LENGTHS = [24, 15, 0, 1, 20, 8]
KINDS = {"rnnt": (), "tdt": (0, 1, 2, 4)}


def facts(nbest) -> list[tuple[Any, ...]]:
    """All of a result that can be compared exactly."""

    def plain(values):
        return None if values is None else values.tolist()

    return [
        (
            plain(path.tokens), plain(path.frames), plain(path.repeats), plain(path.durations),
            plain(path.token_confidence), path.score, path.parts, plain(path.alignment),
            plain(path.alignment_log_probs), plain(path.alignment_frames),
        )
        for path in nbest
    ]  # fmt: skip


def all_facts(results):
    return [facts(nbest) for nbest in results]


class TransducerDecoderContract:
    """B utterances of up to T frames, RNN-T and TDT."""

    def make(self, networks, fusion: Fusion | None = None, **options: Any):
        raise NotImplementedError

    @pytest.fixture(params=list(KINDS))
    def networks(self, request):
        return TableNetworks(VOCAB, KINDS[request.param], seed=4)

    @pytest.fixture
    def fusion(self):
        return Fusion(random_lm(VOCAB, seed=1), 0.4, random_boosting(VOCAB, seed=2), 0.5)

    @pytest.fixture
    def decoder(self, networks, fusion):
        return self.make(networks, fusion, beam_size=6, n_best=4, alignments=True)

    @pytest.fixture
    def frames(self):
        return random_frames(BATCH, FRAMES, seed=3)

    # ------------------------------------------------------------------ invariances

    def test_batch_does_not_matter(self, decoder, frames):
        together = decoder.decode(frames, LENGTHS)
        for b, length in enumerate(LENGTHS):
            alone = decoder.decode(frames[b : b + 1, :length], [length])
            assert facts(alone[0]) == facts(together[b])

    def test_padding_is_never_read(self, decoder, frames):
        expected = all_facts(decoder.decode(frames, LENGTHS))
        for poison in (float("nan"), float("inf"), 0.0, -1e30):
            padded = torch.cat([frames, frames], dim=1)
            for b, length in enumerate(LENGTHS):
                padded[b, length:] = poison
            assert all_facts(decoder.decode(padded, LENGTHS)) == expected

    def test_order_does_not_matter(self, decoder, frames):
        order = [4, 2, 0, 5, 3, 1]
        expected = decoder.decode(frames, LENGTHS)
        shuffled = decoder.decode(frames[order], [LENGTHS[i] for i in order])
        assert all_facts(shuffled) == [facts(expected[i]) for i in order]

    @pytest.mark.parametrize("seed", range(4))
    def test_chunks_do_not_matter(self, decoder, frames, seed):
        rng = np.random.default_rng(seed)
        streams = decoder.open(BATCH)
        done = np.zeros(BATCH, int)
        while (done < LENGTHS).any():
            sizes = np.minimum(rng.integers(0, 6, BATCH), np.array(LENGTHS) - done)
            chunk = torch.full((BATCH, 6, WIDTH), float("nan"))
            for b, size in enumerate(sizes):
                chunk[b, :size] = frames[b, done[b] : done[b] + size]
            decoder.push(streams, chunk, sizes.tolist())
            done += sizes
        expected = decoder.decode(frames, LENGTHS)
        assert all_facts(decoder.close(streams)) == all_facts(expected)

    def test_threads_do_not_matter(self, networks, fusion, frames, monkeypatch):
        from nemo_gpu_decoding.search.transducer import loop

        monkeypatch.setattr(loop, "WORK_PER_THREAD", 0)
        results = [
            self.make(networks, fusion, beam_size=6, n_best=4, threads=threads).decode(frames, LENGTHS)
            for threads in (1, 2, 5)
        ]
        assert [all_facts(r) for r in results[1:]] == [all_facts(results[0])] * 2

    def test_callers_may_share_a_decoder(self, decoder, frames):
        expected = all_facts(decoder.decode(frames, LENGTHS))
        seen, errors = [], []

        def work():
            try:
                for _ in range(3):
                    seen.append(all_facts(decoder.decode(frames, LENGTHS)))
            except Exception as error:
                errors.append(error)

        threads = [threading.Thread(target=work) for _ in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert not errors
        assert seen == [expected] * 12

    def test_two_runs_agree(self, decoder, frames):
        first, second = (decoder.decode(frames, LENGTHS) for _ in range(2))
        assert all_facts(first) == all_facts(second)

    # ------------------------------------------------------------------ results

    def test_parts_add_up_to_the_score(self, decoder, frames):
        for nbest in decoder.decode(frames, LENGTHS):
            for path in nbest:
                parts = path.parts
                assert parts.acoustic + parts.lm + parts.boosting == pytest.approx(path.score, abs=1e-3)
                assert parts.acoustic <= 1e-3
                assert parts.insertion == 0

    def test_parts_are_what_the_automata_say(self, decoder, fusion, frames):
        for nbest in decoder.decode(frames, LENGTHS):
            for path in nbest:
                lm = fusion.lm.score(path.tokens, final=False)
                assert path.parts.lm == pytest.approx(0.4 * lm, abs=1e-3)
                boosting = fusion.boosting.score(path.tokens)
                assert path.parts.boosting == pytest.approx(0.5 * boosting, abs=1e-3)

    @pytest.mark.parametrize("score_norm", [True, False])
    def test_n_best_is_sorted_and_distinct(self, networks, fusion, frames, score_norm):
        decoder = self.make(networks, fusion, beam_size=6, n_best=4, score_norm=score_norm)
        for nbest, length in zip(decoder.decode(frames, LENGTHS), LENGTHS, strict=True):
            ratings = [path.score / (len(path) + 1 if score_norm else 1) for path in nbest]
            assert ratings == sorted(ratings, reverse=True)
            texts = {tuple(path.tokens.tolist()) for path in nbest}
            assert len(texts) == len(nbest) >= (1 if length == 0 else 2)
            assert nbest.num_frames == length

    def test_times_and_confidence_are_plausible(self, decoder, frames):
        for nbest, length in zip(decoder.decode(frames, LENGTHS), LENGTHS, strict=True):
            for path in nbest:
                assert ((path.frames >= 0) & (path.frames < length)).all()
                assert (np.diff(path.frames) >= 0).all()
                assert ((path.token_confidence > 0) & (path.token_confidence <= 1)).all()
                if path.durations is not None:
                    assert (np.diff(path.frames) >= path.durations[:-1]).all()
                    assert (path.repeats == np.maximum(path.durations, 1)).all()

    def test_alignments_hold_the_tokens_and_all_blanks(self, decoder, networks, frames):
        for nbest, length in zip(decoder.decode(frames, LENGTHS), LENGTHS, strict=True):
            for path in nbest:
                emits = path.alignment < VOCAB
                assert path.alignment[emits].tolist() == path.tokens.tolist()
                assert path.alignment_frames[emits].tolist() == path.frames.tolist()
                assert np.allclose(np.exp(path.alignment_log_probs[emits]), path.token_confidence)
                if not networks.durations:  # a blank ends every frame
                    assert path.alignment_frames[~emits].tolist() == list(range(length))

    def test_partial_follows_the_stream(self, decoder, frames):
        streams = decoder.open(BATCH)
        assert [len(nbest.best) for nbest in decoder.partial(streams)] == [0] * BATCH
        decoder.push(streams, frames[:, :12], np.minimum(LENGTHS, 12).tolist())
        partial = decoder.partial(streams, n_best=6)
        assert len(partial[0].best) > 0
        assert [nbest.num_frames for nbest in partial] == np.minimum(LENGTHS, 12).tolist()
        assert all((path.frames < 12).all() for nbest in partial for path in nbest)

    def test_partial_knows_its_limits(self, decoder):
        with pytest.raises(ValueError, match=r"n_best is 7, expected 1 \.\. 6"):
            decoder.partial(decoder.open(1), n_best=7)

    # ------------------------------------------------------------------ per-utterance requests

    def test_requests_change_only_their_utterance(self, networks, fusion, frames):
        decoder = self.make(networks, fusion, beam_size=6)
        tree = random_boosting(VOCAB, seed=9, bonus=4.0)
        wish = Request(boosting=tree, boosting_weight=2.0, lm_weight=0.1)
        mixed = decoder.decode(frames, LENGTHS, [wish, None, wish, None, None, wish])
        plain = decoder.decode(frames, LENGTHS)
        own = self.make(networks, Fusion(fusion.lm, 0.1, tree, 2.0), beam_size=6).decode(frames, LENGTHS)
        assert all_facts(mixed) == [facts((own if b in (0, 2, 5) else plain)[b]) for b in range(BATCH)]
        assert facts(own[0]) != facts(plain[0])

    def test_weight_zero_means_absent(self, networks, fusion, frames):
        off = Fusion(fusion.lm, 0.0, fusion.boosting, 0.0)
        results = [self.make(networks, f, beam_size=6).decode(frames, LENGTHS) for f in (off, Fusion())]
        assert all_facts(results[0]) == all_facts(results[1])

    # ------------------------------------------------------------------ edges

    @pytest.mark.parametrize("frames", [0, 5])
    def test_empty_utterances_emit_nothing(self, networks, frames):
        decoder = self.make(networks, beam_size=4, n_best=2)
        results = decoder.decode(random_frames(2, frames, seed=0), [0, 0])
        assert [(len(n), len(n.best), n.best.score) for n in results] == [(1, 0, 0.0)] * 2

    def test_empty_batch(self, decoder):
        assert decoder.decode(torch.zeros(0, 5, WIDTH), []) == []

    def test_all_blank(self, networks, frames):
        networks.bias[VOCAB] = 100.0
        best = self.make(networks, beam_size=4).decode(frames[:1], [20])[0].best
        assert len(best) == 0

    def test_blanks_of_duration_zero_move_on(self, frames):
        networks = TableNetworks(VOCAB, (0, 1, 2), seed=4)
        networks.bias[VOCAB], networks.bias[VOCAB + 1] = 100.0, 100.0
        best = self.make(networks, beam_size=4, alignments=True).decode(frames[:1], [10])[0].best
        assert best.alignment.tolist() == [VOCAB] * 10
        assert best.alignment_frames.tolist() == list(range(10))

    def test_beam_wider_than_everything(self):
        networks = TableNetworks(2, max_length=2, seed=5)
        nbest = self.make(networks, beam_size=64, n_best=64).decode(random_frames(1, 2, seed=1), [2])[0]
        texts = {tuple(path.tokens.tolist()) for path in nbest}
        assert texts <= {(), (0,), (1,), (0, 0), (0, 1), (1, 0), (1, 1)}
        assert len(texts) >= 3

    @pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float64])
    def test_other_float_types(self, decoder, frames, dtype):
        rounded = frames.to(dtype)
        expected = decoder.decode(rounded.float(), LENGTHS)
        assert all_facts(decoder.decode(rounded, LENGTHS)) == all_facts(expected)

    def test_strided_input(self, decoder, frames):
        expected = decoder.decode(frames, LENGTHS)
        strided = frames.transpose(1, 2).contiguous().transpose(1, 2)
        assert all_facts(decoder.decode(strided, LENGTHS)) == all_facts(expected)

    def test_temperature_divides_the_logits(self, networks, frames):
        warm = self.make(networks, beam_size=4, softmax_temperature=2.0).decode(frames, LENGTHS)
        plain = self.make(networks, beam_size=4).decode(frames, LENGTHS)
        networks.output, networks.bias = networks.output / 2, networks.bias / 2
        halved = self.make(networks, beam_size=4).decode(frames, LENGTHS)
        for a, b in zip(warm, halved, strict=True):
            assert a.best.tokens.tolist() == b.best.tokens.tolist()
            assert a.best.score == pytest.approx(b.best.score, abs=1e-4)
        assert warm[0].best.score != pytest.approx(plain[0].best.score, abs=1e-2)

    # ------------------------------------------------------------------ bad input

    @pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf")])
    def test_bad_values_are_named(self, decoder, frames, value):
        frames[4, 17, 2] = value
        with pytest.raises(ValueError, match=r"encoder_output\[4, 17, 2\] is -?(nan|inf)"):
            decoder.decode(frames, LENGTHS)

    def test_a_refused_chunk_leaves_the_streams_alone(self, decoder, frames):
        streams = decoder.open(BATCH)
        decoder.push(streams, frames[:, :5], np.minimum(LENGTHS, 5).tolist())
        bad = frames[:, 5:].clone()
        bad[0, 3, 2] = float("nan")
        rest = [max(0, length - 5) for length in LENGTHS]
        with pytest.raises(ValueError, match=r"encoder_output\[0, 3, 2\] is nan"):
            decoder.push(streams, bad, rest)
        decoder.push(streams, frames[:, 5:], rest)
        expected = decoder.decode(frames, LENGTHS)
        assert all_facts(decoder.close(streams)) == all_facts(expected)

    @pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf")])
    def test_networks_that_fail_are_named(self, networks, frames, value):
        decoder = self.make(networks, beam_size=4)
        networks.bias[:] = value
        streams = decoder.open(BATCH)
        with pytest.raises(ValueError, match=r"networks give NaN or \+inf for utterance 0"):
            decoder.push(streams, frames, LENGTHS)
        with pytest.raises(ValueError, match="streams is closed"):
            decoder.close(streams)

    @pytest.mark.parametrize(
        ("shape", "lengths", "message"),
        [
            ((2, 5), [5, 5], r"encoder_output has shape \(2, 5\), expected \[B, T, D\]"),
            ((2, 5, 9), [5, 5], rf"encoder_output has shape \(2, 5, 9\), expected \[B, T, {WIDTH}\]"),
            ((2, WIDTH, 9), [5, 5], r"NeMo's encoders give \[B, D, T\]"),
            (
                (2, 5, WIDTH),
                [5],
                r"lengths has shape \(1,\), expected \(2,\): one per row of encoder_out",
            ),
            ((2, 5, WIDTH), [5, 6], r"lengths\[1\] is 6, expected 0 .. 5"),
            ((2, 5, WIDTH), [-1, 5], r"lengths\[0\] is -1, expected 0 .. 5"),
            ((2, 5, WIDTH), [2.5, 5], r"lengths holds \[2.5, 5.0\], expected integers"),
        ],
    )
    def test_bad_shapes_are_named(self, decoder, shape, lengths, message):
        with pytest.raises(ValueError, match=message):
            decoder.decode(torch.zeros(shape), lengths)

    def test_bad_types_are_named(self, decoder):
        with pytest.raises(ValueError, match=r"encoder_output has dtype torch\.int64"):
            decoder.decode(torch.zeros(1, 5, WIDTH, dtype=torch.int64), [5])
        with pytest.raises(ValueError, match=r"encoder_output is a ndarray, expected a torch\.Tensor"):
            decoder.decode(np.zeros((1, 5, WIDTH)), [5])

    def test_bad_requests_are_named(self, networks, decoder, frames):
        with pytest.raises(ValueError, match="requests has 2 entries, expected 6"):
            decoder.decode(frames, LENGTHS, [None, None])
        with pytest.raises(ValueError, match=r"requests\[1\] is a str"):
            decoder.decode(frames, LENGTHS, [None, "phrase", None, None, None, None])
        wrong = Request(boosting=random_boosting(VOCAB + 1, seed=0))
        with pytest.raises(
            ValueError, match=r"requests\[0\].boosting .* made for 13 tokens, expected 12"
        ):
            decoder.decode(frames, LENGTHS, [wrong, None, None, None, None, None])
        plain = self.make(networks, beam_size=2)
        with pytest.raises(ValueError, match=r"lm_weight is 0.5, but the decoder has no LM"):
            plain.decode(frames[:1], [3], [Request(lm_weight=0.5)])
        with pytest.raises(ValueError, match=r"boosting_weight is 0.5, but neither"):
            plain.decode(frames[:1], [3], [Request(boosting_weight=0.5)])

    def test_wrong_lm_is_named(self, networks):
        with pytest.raises(
            ValueError, match=r"fusion.lm \(random LM 0\) was made for 5 tokens, expected 12"
        ):
            self.make(networks, Fusion(lm=random_lm(5, seed=0)))

    def test_networks_that_do_not_fit_are_named(self, networks):
        networks.durations = (0, 1, 2)
        with pytest.raises(ValueError, match=r"networks give \d+ columns, expected 16"):
            self.make(networks)

    def test_closed_streams_stay_closed(self, decoder, frames):
        streams = decoder.open(1)
        decoder.close(streams)
        for verb in (decoder.close, decoder.partial, lambda s: decoder.push(s, frames[:1], [3])):
            with pytest.raises(ValueError, match="streams is closed"):
                verb(streams)

    def test_streams_know_their_number(self, decoder, frames):
        with pytest.raises(ValueError, match="encoder_output has 6 rows, expected 2"):
            decoder.push(decoder.open(2), frames, LENGTHS)
        with pytest.raises(ValueError, match="n is -1"):
            decoder.open(-1)
