"""What every decoder keeps, whatever its family and its backend. Families inherit it, test classes them:

class TestFlexCTCBeamOnCPU(CTCDecoderContract):
    def make(self, vocab_size, blank_id, fusion=None, **options): ...
"""

from __future__ import annotations

import re
import threading
from typing import Any

import numpy as np
import pytest
import torch

from nemo_gpu_decoding.fusion.fusion import Request
from nemo_gpu_decoding.search.protocol import Decoder
from tests.contract.subject import BATCH, FRAMES, LENGTHS, Subject, all_facts, facts

# class, variant -> what the whole batch gives; kernels take their time in the emulator
_EXPECTED: dict[tuple[type, str], list[Any]] = {}


class DecoderContract(Subject):
    """The checks that all families share."""

    def pytest_generate_tests(self, metafunc: pytest.Metafunc) -> None:
        for name, values in {"variant": self.variants, "forbidden_value": self.forbidden}.items():
            if name in metafunc.fixturenames:
                metafunc.parametrize(name, values)

    @pytest.fixture
    def decoder(self, variant):
        return self.fused(variant)

    @pytest.fixture
    def inputs(self):
        return self.random_inputs(BATCH, FRAMES, seed=3).to(self.device)

    @pytest.fixture
    def expected(self, variant, decoder, inputs):
        """Facts of the whole batch; not always by this very decoder."""
        key = type(self), variant
        if key not in _EXPECTED:
            _EXPECTED[key] = all_facts(decoder.decode(inputs, LENGTHS))
        return _EXPECTED[key]

    def test_has_the_verbs_of_the_protocol(self, decoder):
        verbs = [name for name in vars(Decoder) if not name.startswith("_")]
        assert verbs == ["decode", "open", "push", "partial", "close"]
        assert all(callable(getattr(decoder, verb)) for verb in verbs)

    # ------------------------------------------------------------------ invariances

    def test_batch_does_not_matter(self, decoder, inputs, expected):
        for b, length in enumerate(LENGTHS):
            alone = decoder.decode(inputs[b : b + 1, :length], [length])
            assert facts(alone[0]) == expected[b]

    def test_padding_is_never_read(self, decoder, inputs, expected):
        for poison in (float("nan"), float("inf"), 0.0, -1e30):
            found = decoder.decode(self.poisoned(inputs, poison), LENGTHS)
            assert all_facts(found) == expected

    def test_order_does_not_matter(self, decoder, inputs, expected):
        order = [4, 2, 0, 5, 3, 1]
        shuffled = decoder.decode(inputs[order], [LENGTHS[i] for i in order])
        assert all_facts(shuffled) == [expected[i] for i in order]

    @pytest.mark.parametrize("seed", range(4))
    def test_chunks_do_not_matter(self, decoder, inputs, expected, seed):
        rng = np.random.default_rng(seed)
        streams = decoder.open(BATCH)
        for chunk, sizes in self.random_chunks(inputs, rng):
            decoder.push(streams, chunk, sizes)
            if rng.random() < 0.5:  # who looks changes nothing
                decoder.partial(streams)
        assert all_facts(decoder.close(streams)) == expected

    def test_threads_do_not_matter(self, variant, inputs, expected, monkeypatch):
        self.let_threads_work(monkeypatch)
        for threads in (1, 2, 5):
            found = self.fused(variant, threads=threads).decode(inputs, LENGTHS)
            assert all_facts(found) == expected

    def test_callers_may_share_a_decoder(self, decoder, inputs, expected):
        seen, errors = [], []

        def work():
            try:
                for _ in range(self.calls_per_thread):
                    seen.append(all_facts(decoder.decode(inputs, LENGTHS)))
            except Exception as error:
                errors.append(error)

        threads = [threading.Thread(target=work) for _ in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert not errors
        assert seen == [expected] * 4 * self.calls_per_thread

    def test_two_runs_agree(self, decoder, inputs, expected):
        assert [all_facts(decoder.decode(inputs, LENGTHS)) for _ in range(2)] == [expected] * 2

    def test_ties_are_broken_alike(self, variant):
        decoder, flat = self.without_preference(variant)
        alone = decoder.decode(flat[:1], [6])[0]
        assert len(alone.best)
        assert all_facts(decoder.decode(flat, [6, 6, 6])) == [facts(alone)] * 3

    # ------------------------------------------------------------------ results

    @pytest.mark.parametrize("requested", [False, True])
    def test_parts_add_up_to_the_score(self, decoder, inputs, requested):
        requests = [self.wish()] * BATCH if requested else None
        for nbest in decoder.decode(inputs, LENGTHS, requests):
            for path in nbest:
                parts = path.parts
                total = parts.acoustic + parts.lm + parts.boosting + parts.insertion
                assert total == pytest.approx(path.score, abs=self.tolerance)
                assert parts.acoustic <= 1e-3
                assert parts.insertion == pytest.approx(self.insertion * len(path))

    def test_n_best_is_sorted_and_distinct(self, decoder, inputs):
        for nbest, length in zip(decoder.decode(inputs, LENGTHS), LENGTHS, strict=True):
            ratings = [self.rating(path) for path in nbest]
            assert ratings == sorted(ratings, reverse=True)
            assert len({self.text(path) for path in nbest}) == len(nbest)
            assert len(nbest) >= self.least_n_best(length)
            assert nbest.num_frames == length

    def test_times_and_confidence_are_plausible(self, decoder, inputs):
        for nbest, length in zip(decoder.decode(inputs, LENGTHS), LENGTHS, strict=True):
            for path in nbest:
                assert ((path.frames >= 0) & (path.frames < length)).all()
                assert (np.diff(path.frames) >= 0).all()
                assert (path.repeats >= 1).all()
                assert ((path.token_confidence > 0) & (path.token_confidence <= 1)).all()
                sizes = {len(path.tokens), len(path.frames), len(path.repeats), len(path)}
                assert sizes == {len(path.token_confidence)}

    def test_partial_follows_the_stream(self, decoder, inputs, expected):
        streams, half = decoder.open(BATCH), np.minimum(LENGTHS, 12).tolist()
        assert [(len(n.best), n.num_frames) for n in decoder.partial(streams)] == [(0, 0)] * BATCH
        decoder.push(streams, inputs[:, :12], half)
        early = decoder.partial(streams, n_best=self.most_partial)
        assert [nbest.num_frames for nbest in early] == half
        assert all((path.frames < 12).all() for nbest in early for path in nbest)
        assert all(len(nbest.best) for nbest, length in zip(early, half, strict=True) if length > 5)
        decoder.push(streams, inputs[:, 12:], [n - m for n, m in zip(LENGTHS, half, strict=True)])
        late = decoder.partial(streams)
        assert [nbest.num_frames for nbest in late] == LENGTHS
        assert all_facts(decoder.close(streams)) == expected

    @pytest.mark.parametrize("over", [True, False])
    def test_partial_knows_its_limits(self, decoder, over):
        most = self.most_partial
        wrong, valid = most + 1 if over else 0, "1" if most == 1 else rf"1 \.\. {most}"
        with pytest.raises(ValueError, match=rf"n_best is {wrong}, expected {valid}"):
            decoder.partial(decoder.open(1), n_best=wrong)

    # ------------------------------------------------------------------ per-utterance requests

    def test_requests_change_only_their_utterance(self, decoder, inputs, expected):
        wish = self.wish()
        mixed = all_facts(decoder.decode(inputs, LENGTHS, [wish, None, wish, None, None, wish]))
        own = all_facts(decoder.decode(inputs, LENGTHS, [wish] * BATCH))
        assert mixed == [(own if b in (0, 2, 5) else expected)[b] for b in range(BATCH)]
        assert own[0] != expected[0]

    def test_requests_are_kept_by_streams(self, decoder, inputs):
        wishes = [self.wish(), None, Request(), None, self.wish(), None]
        streams = decoder.open(BATCH, wishes)
        for chunk, sizes in self.random_chunks(inputs, np.random.default_rng(7)):
            decoder.push(streams, chunk, sizes)
        whole = decoder.decode(inputs, LENGTHS, wishes)
        assert all_facts(decoder.close(streams)) == all_facts(whole)

    # ------------------------------------------------------------------ edges

    @pytest.mark.parametrize("frames", [0, 5])
    def test_empty_utterances(self, variant, frames):
        empty = self.random_inputs(2, frames, seed=0).to(self.device)
        for nbest in self.bare(variant).decode(empty, [0, 0]):
            assert (len(nbest), len(nbest.best), nbest.num_frames) == (1, 0, 0)
            assert self.score_of_nothing in (None, nbest.best.score)

    def test_empty_batch(self, decoder):
        assert decoder.decode(torch.zeros(0, 5, self.width, device=self.device), []) == []

    def test_chunks_without_frames_change_nothing(self, decoder, inputs, expected):
        streams, nothing = decoder.open(BATCH), [0] * BATCH
        decoder.push(streams, inputs[:, :0], nothing)
        decoder.push(streams, inputs, LENGTHS)
        decoder.push(streams, inputs, nothing)
        assert all_facts(decoder.close(streams)) == expected

    def test_all_blank(self, variant):
        decoder, blanks = self.blank_only(variant)
        best = decoder.decode(blanks, [20])[0].best
        assert (len(best), self.text(best)) == (0, ())

    @pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float64])
    def test_other_float_types(self, decoder, inputs, dtype):
        rounded = inputs.to(dtype)
        expected = decoder.decode(rounded.float(), LENGTHS)
        assert all_facts(decoder.decode(rounded, LENGTHS)) == all_facts(expected)

    @pytest.mark.parametrize("dims", [(0, 1), (1, 2)])
    def test_strided_input(self, decoder, inputs, expected, dims):
        strided = inputs.transpose(*dims).contiguous().transpose(*dims)
        assert all_facts(decoder.decode(strided, LENGTHS)) == expected

    # ------------------------------------------------------------------ bad input

    @pytest.mark.parametrize("where", ["first", "middle", "last"])
    def test_forbidden_values_are_named(self, decoder, inputs, forbidden_value, where):
        column = {"first": 0, "middle": self.width // 2, "last": self.width - 1}[where]
        inputs[4, 17, column] = forbidden_value
        with pytest.raises(
            ValueError, match=rf"{self.argument}\[4, 17, {column}\] is {forbidden_value}"
        ):
            decoder.decode(inputs, LENGTHS)

    def test_a_refused_chunk_leaves_the_streams_alone(self, decoder, inputs, expected):
        streams = decoder.open(BATCH)
        decoder.push(streams, inputs[:, :5], np.minimum(LENGTHS, 5).tolist())
        bad, rest = inputs[:, 5:].clone(), [max(0, length - 5) for length in LENGTHS]
        bad[0, 9, 2] = float("nan")
        with pytest.raises(ValueError, match=rf"{self.argument}\[0, 9, 2\] is nan"):
            decoder.push(streams, bad, rest)
        decoder.push(streams, inputs[:, 5:], rest)
        assert all_facts(decoder.close(streams)) == expected

    @pytest.mark.parametrize(
        ("lengths", "message"),
        [
            ([5], r"lengths has shape \(1,\), expected \(2,\): one per row of {argument}"),
            ([5, 6], r"lengths\[1\] is 6, expected 0 \.\. 5"),
            ([-1, 5], r"lengths\[0\] is -1, expected 0 \.\. 5"),
            ([2.5, 5], r"lengths holds \[2\.5, 5\.0\], expected integers"),
        ],
    )
    def test_bad_lengths_are_named(self, decoder, lengths, message):
        with pytest.raises(ValueError, match=message.format(argument=self.argument)):
            decoder.decode(torch.zeros(2, 5, self.width, device=self.device), lengths)

    def test_bad_shapes_are_named(self, decoder):
        expected = re.escape(f"{self.argument} has shape (2, 5), expected {self.axes}")
        with pytest.raises(ValueError, match=expected):
            decoder.decode(torch.zeros(2, 5, device=self.device), [5, 5])
        for width in (self.width - 1, self.width + 1):
            with pytest.raises(ValueError, match=self.wrong_width(width)):
                decoder.decode(torch.zeros(2, 5, width, device=self.device), [5, 5])

    def test_bad_types_are_named(self, decoder):
        with pytest.raises(ValueError, match=rf"{self.argument} has dtype torch\.int64"):
            decoder.decode(torch.zeros(1, 5, self.width, dtype=torch.int64, device=self.device), [5])
        with pytest.raises(ValueError, match=rf"{self.argument} is a ndarray, expected a torch\.Tensor"):
            decoder.decode(np.zeros((1, 5, self.width)), [5])

    def test_bad_requests_are_named(self, decoder, inputs):
        with pytest.raises(ValueError, match="requests has 2 entries, expected 6"):
            decoder.decode(inputs, LENGTHS, [None, None])
        with pytest.raises(ValueError, match=r"requests\[1\] is a str"):
            decoder.decode(inputs, LENGTHS, [None, "phrase", None, None, None, None])

    def test_boosting_weights_need_phrases(self, variant, inputs):
        with pytest.raises(ValueError, match=r"requests\[0\].boosting_weight is 0.5, but neither"):
            self.bare(variant).decode(inputs[:1], [3], [Request(boosting_weight=0.5)])

    def test_closed_streams_stay_closed(self, decoder, inputs):
        streams = decoder.open(1)
        decoder.close(streams)
        for verb in (decoder.close, decoder.partial, lambda s: decoder.push(s, inputs[:1], [3])):
            with pytest.raises(ValueError, match="streams is closed"):
                verb(streams)

    def test_streams_know_their_number(self, decoder, inputs):
        with pytest.raises(ValueError, match=f"{self.argument} has 6 rows, expected 2"):
            decoder.push(decoder.open(2), inputs, LENGTHS)
        with pytest.raises(ValueError, match="n is -1"):
            decoder.open(-1)
