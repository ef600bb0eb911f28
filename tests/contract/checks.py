"""The checks that every decoder passes on every backend; `subjects.py` is the table of decoders.

A test file runs all checks for the rows of its own table:

    from tests.contract.checks import *

    TABLE = [("name", ASubject, ("cpu",))]
"""

import copy
import dataclasses
import itertools
import math
import pickle
import re
import threading
from contextlib import suppress
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

from nemo_gpu_decoding.checks import FieldError
from nemo_gpu_decoding.cuda.launch import use_runtime
from nemo_gpu_decoding.fusion.allowed import AllowedTokens
from nemo_gpu_decoding.fusion.automaton import empty_automaton
from nemo_gpu_decoding.fusion.fusion import Fusion, Request
from nemo_gpu_decoding.fusion.grammar import build_grammar
from nemo_gpu_decoding.fusion.phrases import Aliases
from nemo_gpu_decoding.search.decoder import Decoder
from nemo_gpu_decoding.search.result import NBest
from nemo_gpu_decoding.vocabulary import Vocabulary
from tests.contract.subject import (
    BATCH,
    FRAMES,
    LENGTHS,
    VOCAB,
    LogProbs,
    Subject,
    TokenFusion,
    WordGraph,
    all_facts,
    facts,
)
from tests.contract.subjects import FlexCTC, Transducer
from tests.cuda_emulator.build import why_no_compiler
from tests.cuda_emulator.fixtures import new_runtime
from tests.random_models import random_boosting, random_lm, random_log_probs
from tests.search.transducer.table_networks import TableNetworks, random_frames

# (class, backend, variant) -> what the whole batch gives; kernels take their time in the emulator
_EXPECTED: dict[tuple[type, str, str], list[Any]] = {}


def of(family: type[Subject] | tuple[type[Subject], ...]) -> Any:
    """A check of the subjects of one family, or of several."""

    def marked(test: Any) -> Any:
        test.family = family
        return test

    return marked


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """Each test with all subjects of its module's table, and with their variants if it asks for one."""
    if "subject" not in metafunc.fixturenames:
        return
    cases, ids = [], []
    for name, kind, backends in metafunc.module.TABLE:
        if not issubclass(kind, getattr(metafunc.function, "family", Subject)):
            continue
        if any(metafunc.function.__name__ in names for names in kind.exempt.values()):
            continue
        if kind.only is not None and metafunc.function.__name__ not in kind.only:
            continue
        for backend in backends:
            subject = kind(backend)
            variants = subject.emulated_variants if backend == "cuda" else None
            variants = variants or subject.variants
            for variant in variants if "variant" in metafunc.fixturenames else variants[:1]:
                cases.append((subject, variant))
                ids.append(f"{name}-{backend}-{variant}")
    metafunc.parametrize("case", cases, ids=ids)


@pytest.fixture
def subject(case, request, monkeypatch):
    """The decoder under test; with the emulator in place of a GPU for CUDA kernels."""
    subject, _ = case
    if subject.backend != "cuda" or subject.device != "cpu":
        yield subject
        return
    reason = why_no_compiler()
    if reason:
        pytest.skip(reason)
    for module, sizes in subject.small_sizes().items():
        for name, size in sizes.items():
            monkeypatch.setattr(f"{module}.{name}", size)
    with use_runtime(new_runtime(request)):
        yield subject


@pytest.fixture
def variant(case):
    return case[1]


@pytest.fixture
def decoder(subject, variant):
    return subject.fused(variant)


@pytest.fixture
def inputs(subject):
    return subject.inputs()


@pytest.fixture
def networks(subject, variant):
    return subject.networks_of(variant)


@pytest.fixture
def expected(subject, variant, decoder, inputs):
    """Facts of the whole batch; not always by this very decoder."""
    key = type(subject), subject.backend + subject.device, variant
    if key not in _EXPECTED:
        _EXPECTED[key] = all_facts(decoder.decode(inputs, LENGTHS))
    return _EXPECTED[key]


def test_decoder_has_all_verbs(decoder):
    assert isinstance(decoder, Decoder)
    verbs = [name for name in vars(Decoder) if not name.startswith("_") and callable(vars(Decoder)[name])]
    assert verbs == ["decode", "open", "push", "partial", "close", "reopen", "with_options"]


# ------------------------------------------------------------------ invariances
def test_results_do_not_depend_on_the_batch(subject, decoder, inputs, expected):
    for b, length in enumerate(LENGTHS):
        assert facts(decoder.decode(inputs[b : b + 1, :length], [length])[0]) == expected[b]


def test_padding_is_not_read(subject, decoder, inputs, expected):
    for poison in (float("nan"), float("inf"), 0.0, -1e30):
        assert all_facts(decoder.decode(subject.poisoned(inputs, poison), LENGTHS)) == expected


def test_results_do_not_depend_on_the_order(subject, decoder, inputs, expected):
    order = [4, 2, 0, 5, 3, 1]
    assert all_facts(decoder.decode(inputs[order], [LENGTHS[i] for i in order])) == [expected[i] for i in order]


@pytest.mark.parametrize("seed", range(4))
def test_results_do_not_depend_on_chunks(subject, decoder, inputs, expected, seed):
    rng = np.random.default_rng(seed)
    streams = decoder.open(BATCH)
    for chunk, sizes in subject.random_chunks(inputs, rng):
        decoder.push(streams, chunk, sizes)
        if rng.random() < 0.5:  # who looks changes nothing
            decoder.partial(streams)
    assert all_facts(decoder.close(streams)) == expected


def test_results_do_not_depend_on_threads(subject, variant, inputs, expected, monkeypatch):
    subject.threads_for_little_work(monkeypatch)
    for threads in (1, 2, 5):
        assert all_facts(subject.fused(variant, threads=threads).decode(inputs, LENGTHS)) == expected


def test_callers_can_share_a_decoder(subject, decoder, inputs, expected):
    seen, errors = [], []

    def work():
        try:
            for _ in range(3):
                seen.append(all_facts(decoder.decode(inputs, LENGTHS)))
        except Exception as error:
            errors.append(error)

    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not errors
    assert seen == [expected] * 4 * 3


def test_ties_are_broken_alike_in_every_batch(subject, variant):
    decoder, flat = subject.without_preference(variant)
    alone = decoder.decode(flat[:1], [6])[0]
    assert len(alone.best)
    assert all_facts(decoder.decode(flat, [6, 6, 6])) == [facts(alone)] * 3


# ------------------------------------------------------------------ results
@pytest.mark.parametrize("requested", [False, True])
def test_parts_add_up_to_the_score(subject, decoder, inputs, requested):
    for nbest in decoder.decode(inputs, LENGTHS, [subject.request()] * BATCH if requested else None):
        for path in nbest:
            parts = path.parts
            total = parts.acoustic + parts.lm + parts.boosting + parts.insertion
            assert total == pytest.approx(path.score, abs=subject.tolerance)
            assert parts.acoustic <= 1e-3
            assert parts.insertion == pytest.approx(subject.insertion * len(path))


def test_n_best_is_sorted_and_distinct(subject, decoder, inputs):
    for nbest, length in zip(decoder.decode(inputs, LENGTHS), LENGTHS, strict=True):
        ratings = [subject.rating(path) for path in nbest]
        assert ratings == sorted(ratings, reverse=True)
        assert len({subject.text(path) for path in nbest}) == len(nbest)
        assert len(nbest) >= subject.least_n_best(length)
        assert nbest.num_frames == length


def test_times_and_confidence_are_plausible(subject, decoder, inputs):
    for nbest, length in zip(decoder.decode(inputs, LENGTHS), LENGTHS, strict=True):
        for path in nbest:
            assert ((path.frames >= 0) & (path.frames < length)).all()
            assert (np.diff(path.frames) >= 0).all()
            assert (path.repeats >= 1).all()
            assert ((path.token_confidence > 0) & (path.token_confidence <= 1)).all()
            assert {len(path.tokens), len(path.frames), len(path.repeats), len(path)} == {len(path.token_confidence)}


def test_partial_follows_the_stream(subject, decoder, inputs, expected):
    streams, half = decoder.open(BATCH), np.minimum(LENGTHS, 12).tolist()
    assert [(len(n.best), n.num_frames) for n in decoder.partial(streams)] == [(0, 0)] * BATCH
    decoder.push(streams, inputs[:, :12], half)
    early = decoder.partial(streams, n_best=subject.most_partial)
    assert [nbest.num_frames for nbest in early] == half
    assert all((path.frames < 12).all() for nbest in early for path in nbest)
    assert all(len(nbest.best) for nbest, length in zip(early, half, strict=True) if length > 5)
    decoder.push(streams, inputs[:, 12:], [n - m for n, m in zip(LENGTHS, half, strict=True)])
    assert [nbest.num_frames for nbest in decoder.partial(streams)] == LENGTHS
    assert all_facts(decoder.close(streams)) == expected


def test_committed_tokens_stay(subject, decoder, inputs, expected):
    """A prefix of the tokens of all live hypotheses, now and in all that follows; it never gets shorter."""
    streams, before = decoder.open(BATCH), [[] for _ in range(BATCH)]
    has_lattice = getattr(decoder.config, "keeps_links", False)  # whose alternatives are not alive
    for first in range(0, inputs.shape[1], 3):
        chunk = inputs[:, first : first + 3]
        decoder.push(streams, chunk, [min(max(n - first, 0), chunk.shape[1]) for n in LENGTHS])
        for b, nbest in enumerate(decoder.partial(streams, n_best=subject.most_partial)):
            if nbest.committed is None:
                assert not subject.tells_committed
                return
            known = nbest.best.tokens[: nbest.committed].tolist()
            assert len(known) == nbest.committed
            assert known[: len(before[b])] == before[b]
            alive = [nbest.best] if has_lattice else nbest
            assert all(path.tokens[: len(known)].tolist() == known for path in alive)
            before[b] = known
    for known, nbest in zip(before, decoder.close(streams), strict=True):
        assert nbest.committed is None
        alive = [nbest.best] if has_lattice else nbest
        assert all(path.tokens[: len(known)].tolist() == known for path in alive)


def test_partial_results_do_not_depend_on_commits(subject, variant, monkeypatch):
    frames = 150
    inputs = 2 * subject.random_inputs(2, frames, seed=8).to(subject.device)
    decoder, requests = subject.fused(variant), [subject.request(), None]
    tails, before = [], None
    for fewest in (10**9, 8):
        monkeypatch.setattr("nemo_gpu_decoding.search.committed.MIN_COMMIT", fewest)
        rng, streams, seen, first = np.random.default_rng(1), decoder.open(2, requests), [], 0
        while first < frames:
            size = int(rng.integers(1, 12))
            chunk = inputs[:, first : first + size]
            decoder.push(streams, chunk, [chunk.shape[1], max(0, min(chunk.shape[1], frames - 30 - first))])
            if first > frames // 2:
                most = int(rng.integers(1, subject.most_partial + 1))
                *partials, again = decoder.partial(streams, n_best=most, rows=[0, 1, 0])
                for now in (again, *decoder.partial(streams, n_best=most, rows=[0])):
                    assert (facts(now), now.committed) == (facts(partials[0]), partials[0].committed)
                seen.append(all_facts(partials))
                seen.append([nbest.committed for nbest in partials])
                news = [nbest.best.after(min(len(nbest.best), nbest.committed or 0)) for nbest in partials]
                seen.append(all_facts([NBest((news[0],)), NBest((news[1],))]))
                tails.append(len(getattr(partials[1].best, "_tail", partials[1].best)))
                assert all(len(nbest.best) == len(nbest.best.tokens) for nbest in partials)
                assert all_facts([pickle.loads(pickle.dumps(nbest)) for nbest in partials]) == seen[-3]
            first += size
        seen.append(all_facts(decoder.close(streams)))
        decoder.reopen(streams, [0, 1], requests)
        decoder.push(streams, inputs[:, :20], [20, 7])
        seen.append(all_facts(decoder.close(streams)))
        before = before or seen
    for now, then in zip(seen, before, strict=True):
        assert now == then
    if subject.keeps_heads:
        whole, tail = np.split(np.array(tails), 2)
        assert (tail < whole).any()


def test_partial_of_some_streams_equals_that_of_all(subject, decoder, inputs):
    streams = decoder.open(BATCH)
    decoder.push(streams, inputs[:, :12], np.minimum(LENGTHS, 12).tolist())
    every, rows = all_facts(decoder.partial(streams)), [4, 0, 2]
    assert all_facts(decoder.partial(streams, rows=rows)) == [every[row] for row in rows]
    assert decoder.partial(streams, rows=[]) == []
    for wrong in ([BATCH], [-1], ["first"]):
        with pytest.raises(ValueError, match=rf"rows holds {wrong[0]!r}, expected .* 0 \.\. 5"):
            decoder.partial(streams, rows=wrong)


@pytest.mark.parametrize("over", [True, False])
def test_partial_refuses_a_wrong_n_best(subject, decoder, over):
    most = subject.most_partial
    wrong, valid = most + 1 if over else 0, "1" if most == 1 else rf"1 \.\. {most}"
    with pytest.raises(ValueError, match=rf"n_best is {wrong}, expected {valid}"):
        decoder.partial(decoder.open(1), n_best=wrong)


# ------------------------------------------------------------------ streams that come and go
@pytest.mark.parametrize("seed", range(2))
def test_results_do_not_depend_on_other_streams(subject, decoder, seed):
    """Utterances begin and end at any time, in any stream, with or without requests of their own."""
    rng, waiting, results = np.random.default_rng(seed), list(range(8)), {}
    inputs = subject.random_inputs(8, FRAMES, seed=5).to(subject.device)
    lengths = [*LENGTHS, 11, 3]
    requests = [subject.request() if b % 3 == 0 else None for b in range(8)]
    streams = decoder.open(3)
    decoder.close(streams)
    in_stream: dict[int, list[int]] = {}  # stream -> utterance, frames read
    while waiting or in_stream:
        begun = [row for row in (2, 0, 1) if row not in in_stream][: len(waiting)]
        in_stream |= {row: [waiting.pop(0), 0] for row in begun}
        if begun:
            decoder.reopen(streams, begun, [requests[in_stream[row][0]] for row in begun])
        rows = [row for row in in_stream if rng.random() < 0.7]
        chunk = torch.full((len(rows), 8, subject.width), float("nan"), device=subject.device)
        sizes = []
        for i, row in enumerate(rows):
            b, done = in_stream[row]
            sizes.append(int(min(rng.integers(1, 9), lengths[b] - done)))
            chunk[i, : sizes[-1]] = inputs[b, done : done + sizes[-1]]
            in_stream[row][1] += sizes[-1]
        assert decoder.push(streams, chunk, sizes, rows=rows) == {}
        over = [row for row, (b, done) in in_stream.items() if done == lengths[b]][::-1]
        for row, nbest in zip(over, decoder.close(streams, rows=over), strict=True):
            results[in_stream.pop(row)[0]] = facts(nbest)
    assert [results[b] for b in range(8)] == all_facts(decoder.decode(inputs, lengths, requests))


def test_reopened_streams_take_no_more_memory(subject, decoder, inputs):
    sizes = []
    streams = decoder.open(3)
    for turn in range(6):
        decoder.push(streams, inputs[:3], LENGTHS[:3])
        decoder.close(streams)
        sizes.append(bytes_of(streams))
        decoder.reopen(streams, [])
        decoder.reopen(streams, range(3), [subject.request(), None, None] if turn % 2 else None)
    assert sizes[2:4] == sizes[4:]


def bytes_of(thing: Any, seen: set[int] | None = None) -> int:
    """Of all arrays and tensors that something refers to, but for what a decoder shares."""
    seen = set() if seen is None else seen
    if id(thing) in seen or callable(thing):
        return 0
    seen.add(id(thing))
    if isinstance(thing, (np.ndarray, torch.Tensor)):
        return thing.nbytes
    if isinstance(thing, (list, tuple, set)):
        return sum(bytes_of(part, seen) for part in thing)
    if isinstance(thing, dict):
        return sum(bytes_of(part, seen) for part in thing.values())
    return bytes_of(vars(thing), seen) if hasattr(thing, "__dict__") else 0


def test_bad_frame_does_not_change_other_streams(subject, decoder, inputs, expected):
    streams = decoder.open(BATCH)
    decoder.push(streams, inputs[:, :5], np.minimum(LENGTHS, 5).tolist())
    bad, rest = inputs[:, 5:].clone(), [max(0, length - 5) for length in LENGTHS]
    bad[1, 2, 3] = bad[4, 9, 0] = float("nan")
    errors = decoder.push(streams, bad, rest, isolate=True)
    assert sorted(errors) == [1, 4]
    assert str(errors[4]).startswith(f"{subject.argument}[4, 9, 0] is nan")
    assert [nbest.num_frames for nbest in decoder.partial(streams)] == [24, 5, 0, 1, 5, 8]
    again = decoder.push(streams, inputs[[4, 1], 5:], [rest[4], rest[1]], rows=[4, 1])
    assert (again, all_facts(decoder.close(streams))) == ({}, expected)


def test_wrong_rows_are_named(subject, decoder, inputs):
    streams = decoder.open(3)
    decoder.close(streams, rows=[1])
    chunk = inputs[:1, :4]
    for message, call in {
        "rows holds 3, expected numbers of streams": lambda: decoder.close(streams, rows=[3]),
        "rows holds 0 twice": lambda: decoder.close(streams, rows=[0, 0]),
        "rows holds 1, a stream that is closed: reopen it": lambda: decoder.push(streams, chunk, [4], rows=[1]),
        "rows holds 0, a stream that is open: close it": lambda: decoder.reopen(streams, [0]),
        r"lengths\[1\] is 4, expected 0: stream 1 is closed": lambda: decoder.push(streams, inputs[:3], [0, 4, 0]),
        f"{subject.argument} has 1 rows, expected 2": lambda: decoder.push(streams, chunk, [4], rows=[0, 2]),
        "requests has 2 entries, expected 1": lambda: decoder.reopen(streams, [1], [None, None]),
    }.items():
        with pytest.raises(ValueError, match=message):
            call()
    assert len(decoder.partial(streams)) == len(decoder.close(streams)) == 2


# ------------------------------------------------------------------ per-utterance requests
def test_request_changes_only_its_utterance(subject, decoder, inputs, expected):
    request = subject.request()
    mixed = all_facts(decoder.decode(inputs, LENGTHS, [request, None, request, None, None, request]))
    own = all_facts(decoder.decode(inputs, LENGTHS, [request] * BATCH))
    assert mixed == [(own if b in (0, 2, 5) else expected)[b] for b in range(BATCH)]
    assert own[0] != expected[0]


def test_aliases_change_only_texts_of_their_utterance(subject, decoder, inputs):
    request = subject.request()
    plain = decoder.decode(inputs, LENGTHS, [request] * BATCH)

    def text_of(path):
        return " ".join(map(str, subject.text(path)))

    (heard,) = plain[0].texts(text_of)[:1]
    aliases = Aliases({heard: "it"})
    wanted = replace(request, boosting=replace(request.boosting, aliases=aliases))
    requests = [wanted if b == 0 else request for b in range(BATCH)]
    found = decoder.decode(inputs, LENGTHS, requests)
    assert all_facts(found) == all_facts(plain)
    assert [nbest.aliases for nbest in found] == [aliases, *[None] * (BATCH - 1)]
    assert found[0].texts(text_of)[0] == "it" != plain[0].texts(text_of)[0]
    assert len(set(found[0].distinct(text_of, BATCH).texts(text_of))) == len(found[0].distinct(text_of, BATCH))
    streams = decoder.open(BATCH, requests)
    decoder.push(streams, inputs, LENGTHS)
    assert decoder.partial(streams)[0].aliases == aliases
    assert decoder.close(streams)[0].texts(text_of)[0] == "it"
    assert decoder.decode(inputs, LENGTHS, [replace(wanted, boosting_weight=0.0)] * BATCH)[0].aliases is None


# ------------------------------------------------------------------ edges
@pytest.mark.parametrize("frames", [0, 5])
def test_utterance_without_frames_is_empty(subject, variant, frames):
    for nbest in subject.bare(variant).decode(subject.random_inputs(2, frames, seed=0).to(subject.device), [0, 0]):
        assert (len(nbest), len(nbest.best), nbest.num_frames) == (1, 0, 0)
        assert subject.score_of_nothing in (None, nbest.best.score)


def test_batch_without_utterances_is_empty(subject, decoder):
    assert decoder.decode(torch.zeros(0, 5, subject.width, device=subject.device), []) == []


def test_chunks_without_frames_change_nothing(subject, decoder, inputs, expected):
    streams, nothing = decoder.open(BATCH), [0] * BATCH
    decoder.push(streams, inputs[:, :0], nothing)
    decoder.push(streams, inputs, LENGTHS)
    decoder.push(streams, inputs, nothing)
    assert all_facts(decoder.close(streams)) == expected


def test_blanks_alone_give_no_token(subject, variant):
    decoder, blanks = subject.blank_only(variant)
    best = decoder.decode(blanks, [20])[0].best
    assert (len(best), subject.text(best)) == (0, ())


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float64])
def test_results_do_not_depend_on_the_float_type(subject, decoder, inputs, dtype):
    rounded = inputs.to(dtype)
    expected = decoder.decode(rounded.float(), LENGTHS)
    assert all_facts(decoder.decode(rounded, LENGTHS)) == all_facts(expected)


@pytest.mark.parametrize("dims", [(0, 1), (1, 2)])
def test_results_do_not_depend_on_strides(subject, decoder, inputs, expected, dims):
    assert all_facts(decoder.decode(inputs.transpose(*dims).contiguous().transpose(*dims), LENGTHS)) == expected


class ElsewhereArray:
    """An array of another library, as DLPack shows it."""

    def __init__(self, tensor):
        self._tensor = tensor

    def __dlpack__(self, **options):
        return self._tensor.__dlpack__(**options)

    def __dlpack_device__(self):
        return self._tensor.__dlpack_device__()


@pytest.mark.parametrize("form", [torch.Tensor.numpy, ElsewhereArray])
def test_arrays_of_other_libraries_give_the_same_results(subject, decoder, inputs, expected, form):
    whole = inputs.cpu()
    assert all_facts(decoder.decode(form(whole), np.array(LENGTHS))) == expected
    alone = decoder.decode(form(whole[4, : LENGTHS[4]]))  # [T, ...]
    assert all_facts(alone) == [expected[4]]
    parts = [form(row[:length]) for row, length in zip(whole, LENGTHS, strict=True)]
    assert all_facts(decoder.decode(parts)) == expected
    padded = [form(row[: length + 1]) for row, length in zip(whole, LENGTHS, strict=True)]
    assert all_facts(decoder.decode(tuple(padded), LENGTHS)) == expected


def test_missing_lengths_mean_all_frames(subject, decoder, inputs):
    assert all_facts(decoder.decode(inputs)) == all_facts(decoder.decode(inputs, [FRAMES] * BATCH))


def test_push_takes_one_array_or_a_list(subject, decoder, inputs, expected):
    whole = inputs.cpu().numpy()
    streams = decoder.open(1)
    for first in range(0, LENGTHS[1], 4):
        decoder.push(streams, whole[1, first : min(first + 4, LENGTHS[1])])
    assert all_facts(decoder.close(streams)) == [expected[1]]
    streams = decoder.open(3)
    decoder.push(streams, [whole[4, :9], whole[1, :15]], rows=[2, 0])
    decoder.push(streams, [whole[5, :8], whole[4, 9:20]], rows=[1, 2])
    assert all_facts(decoder.close(streams, rows=[2, 0, 1])) == [expected[4], expected[1], expected[5]]


def test_results_do_not_depend_on_the_layout_of_arrays(subject, decoder, inputs, expected):
    whole = inputs.cpu().numpy()
    fixed = whole.copy()
    fixed.flags.writeable = False
    for array in (fixed, whole.astype(whole.dtype.newbyteorder()), whole[:, ::-1].copy()[:, ::-1]):
        assert all_facts(decoder.decode(array, LENGTHS)) == expected


def test_contiguous_arrays_are_not_copied(subject, decoder, inputs, monkeypatch):
    seen = []
    monkeypatch.setattr(decoder, "_check_inputs", lambda inputs, batch: seen.append(inputs.data_ptr()))
    array = inputs.cpu().numpy()
    with suppress(ValueError):
        decoder.decode(array, LENGTHS)
        decoder.decode(array[0])
    assert seen == [array.ctypes.data] * 2


@pytest.mark.parametrize("used", [False, True])
@pytest.mark.parametrize("copied", [copy.deepcopy, lambda decoder: pickle.loads(pickle.dumps(decoder))])
def test_copies_of_a_decoder_give_the_same_results(subject, decoder, inputs, expected, used, copied):
    if used:
        decoder.decode(inputs, LENGTHS)
    assert all_facts(copied(decoder).decode(inputs, LENGTHS)) == expected


# ------------------------------------------------------------------ bad input
@pytest.mark.parametrize("where", ["first", "middle", "last"])
def test_forbidden_values_are_named(subject, decoder, inputs, where):
    column = {"first": 0, "middle": subject.width // 2, "last": subject.width - 1}[where]
    for value in subject.forbidden:
        inputs[4, 17, column] = value
        with pytest.raises(ValueError, match=rf"{subject.at(4, 17, column)} is {value}"):
            decoder.decode(inputs, LENGTHS)


def test_refused_chunk_does_not_change_the_streams(subject, decoder, inputs, expected):
    streams = decoder.open(BATCH)
    decoder.push(streams, inputs[:, :5], np.minimum(LENGTHS, 5).tolist())
    bad, rest = inputs[:, 5:].clone(), [max(0, length - 5) for length in LENGTHS]
    bad[0, 9, 2] = float("nan")
    with pytest.raises(ValueError, match=rf"{subject.argument}\[0, 9, 2\] is nan"):
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
        ([1.0, 0.0], r"lengths holds \[1\.0, 0\.0\], expected integers: frames, no fractions"),
        (torch.tensor([1.0, 0.5]).bfloat16(), r"lengths holds \[1\.0, 0\.5\], expected integers: frames, no fra"),
    ],
)
def test_bad_lengths_are_named(subject, decoder, lengths, message):
    with pytest.raises(ValueError, match=message.format(argument=subject.argument)):
        decoder.decode(torch.zeros(2, 5, subject.width, device=subject.device), lengths)


def test_lengths_of_lists_are_those_of_each_array(subject, decoder, inputs):
    with pytest.raises(ValueError, match=re.escape(f"lengths[1] is 5, expected 0 .. 4 (T of {subject.argument}[1])")):
        decoder.decode([inputs[0, :5], inputs[1, :4]], [5, 5])


def test_bad_shapes_are_named(subject, decoder):
    own = subject.axes[len("[B, ") : -1]
    for shape in ((5,), (1, 2, 5, subject.width)):
        expected = f"{subject.argument} has shape {shape}, expected [B, {own}], [{own}] or a list of [{own}]"
        with pytest.raises(ValueError, match=re.escape(expected)):
            decoder.decode(torch.zeros(shape, device=subject.device), [5, 5])
    for width in (subject.width - 1, subject.width + 1):
        with pytest.raises(ValueError, match=subject.wrong_width(width)):
            decoder.decode(torch.zeros(2, 5, width, device=subject.device), [5, 5])


def test_bad_types_are_named(subject, decoder):
    with pytest.raises(ValueError, match=rf"{subject.argument} has dtype torch\.int64"):
        decoder.decode(torch.zeros(1, 5, subject.width, dtype=torch.int64, device=subject.device), [5])
    frames = torch.zeros(5, subject.width, device=subject.device)
    for wrong, message in (
        (np.zeros((1, 5, subject.width), int), " has dtype torch.int64"),
        (np.zeros((1, 5, subject.width), object), " has dtype object"),
        ("text", " is a str, expected a torch.Tensor, a NumPy array or one with __dlpack__"),
        (frames[None].to_sparse(), " is a torch.sparse_coo tensor, expected a dense one"),
        (frames[None].to("meta"), " is a meta tensor"),
        ([], " is an empty list"),
        ([frames, [[0.0]]], "[1] is a list"),
        ([frames, frames[:, 1:]], f"[1] has shape (5, {subject.width - 1}), expected"),
        ([frames, frames.double()], "[1] is torch.float64 on"),
        ([frames[None]], f"[0] has shape (1, 5, {subject.width}), expected"),
    ):
        with pytest.raises(ValueError, match=re.escape(subject.argument + message)):
            decoder.decode(wrong)


def test_bad_requests_are_named(subject, decoder, inputs):
    with pytest.raises(ValueError, match="requests has 2 entries, expected 6"):
        decoder.decode(inputs, LENGTHS, [None, None])
    with pytest.raises(ValueError, match=r"requests\[1\] is a str"):
        decoder.decode(inputs, LENGTHS, [None, "phrase", None, None, None, None])
    for request, message in (
        (Request(), "requests is Request(.*), expected a Sequence with a Request or None for each utterance"),
        (
            [Request(boosting=["phrase"])] * BATCH,
            r"requests\[0\].boosting is \['phrase'\], expected a BackoffAutomaton",
        ),
    ):
        with pytest.raises(ValueError, match=message):
            decoder.decode(inputs, LENGTHS, request)


def test_wrong_types_of_options_are_named(subject, variant):
    decoder = subject.fused(variant)
    for arguments, message in (
        (({"beam_size": 4}, decoder.fusion), "config is {'beam_size': 4}, expected a "),
        ((decoder.config, {"lm": None}), "fusion is {'lm': None}, expected a Fusion"),
        ((decoder.config, Fusion(boosting=["phrase"])), r"fusion.boosting is \['phrase'\], expected a BackoffAutom"),
    ):
        with pytest.raises(ValueError, match=message):
            decoder.with_options(*arguments)


@of(TokenFusion)
@pytest.mark.parametrize("field", ["lm", "allowed", "grammar"])
def test_wrong_types_of_models_are_named(subject, variant, field):
    decoder = subject.fused(variant)
    with pytest.raises(ValueError, match=rf"fusion.{field} is 'a\.file', expected a"):
        decoder.with_options(decoder.config, Fusion(**{field: "a.file"}))


def test_boosting_weights_need_phrases(subject, variant, inputs):
    with pytest.raises(ValueError, match=r"requests\[0\].boosting_weight is 0.5, but neither"):
        subject.bare(variant).decode(inputs[:1], [3], [Request(boosting_weight=0.5)])


def test_closed_streams_are_refused(subject, decoder, inputs):
    streams = decoder.open(1)
    decoder.close(streams)
    for verb in (decoder.close, decoder.partial, lambda s: decoder.push(s, inputs[:1], [3])):
        with pytest.raises(ValueError, match="streams is closed"):
            verb(streams)


def test_wrong_number_of_streams_is_named(subject, decoder, inputs):
    with pytest.raises(ValueError, match=f"{subject.argument} has 6 rows, expected 2"):
        decoder.push(decoder.open(2), inputs, LENGTHS)
    for n in (-1, "3", 2.0, True, 10**12):
        with pytest.raises(FieldError, match=re.escape(f"n is {n!r}, expected an integer 0 .. 1048576")):
            decoder.open(n)
    for capacity in (-1, 10**12):
        with pytest.raises(FieldError, match=f"capacity is {capacity}, expected an integer 0"):
            decoder.open(1, capacity=capacity)


def _wrong_values(config):
    """Values of wrong types and sizes for each option of a config."""
    for field in dataclasses.fields(config):
        wrong = {"bool": ["x", float("nan"), None, 1], "int": ["x", None, True, 10**12, 2.5], "str": [["max"], 3, {}]}
        for value in wrong.get(field.type, ["x", None, [], True, float("nan")]):
            yield field.name, value
    for name in ("beam_beta", "softmax_temperature", "beam", "acoustic_scale", "lattice_beam", "large_lm_weight"):
        if hasattr(config, name):
            yield name, 1e39


def test_options_of_a_wrong_type_or_size_are_named(subject, decoder):
    for name, value in _wrong_values(decoder.config):
        with pytest.raises(FieldError, match=re.escape(f"{name} is {value!r}, expected ")):
            replace(decoder.config, **{name: value})


def test_misspelt_options_are_named(subject, decoder):
    kind = type(decoder.config)
    expected = f"{kind.__name__}() has no option 'n_bst' (did you mean 'n_best'?); valid options: n_best, backend"
    with pytest.raises(TypeError, match=re.escape(expected)):
        kind(n_bst=3)


@pytest.mark.parametrize("weight", [1e38, 3.5e38, float("inf"), -1.0, "x", True])
def test_weights_are_numbers_that_sums_can_hold(subject, weight):
    for kind in (Fusion, Request):
        for name in ("lm_weight", "boosting_weight"):
            with pytest.raises(FieldError, match=re.escape(f"{name} is {weight!r}, expected a ")):
                kind(**{name: weight})


# ------------------------------ LogProbs
@of(LogProbs)
def test_impossible_labels_are_not_found(subject, decoder, inputs):
    inputs[:, :, 2] = -float("inf")
    assert all(2 not in path.tokens for nbest in decoder.decode(inputs, LENGTHS) for path in nbest)


@of(LogProbs)
def test_frame_without_any_label_is_named(subject, decoder, inputs):
    inputs[1, 6] = -float("inf")
    with pytest.raises(ValueError, match=f"{subject.at(1, 6)} leaves no label possible"):
        decoder.decode(inputs, LENGTHS)


@of(LogProbs)
def test_values_above_zero_are_named(subject, decoder, inputs):
    """Rounding, as in bfloat16, is none of these."""
    inputs[4, 17, 0] = inputs[0, 3, subject.width - 1] = 0.009
    decoder.decode(inputs, LENGTHS)
    for column in (0, subject.width // 2, subject.width - 1):
        for value in (0.01171875, 0.5, 30.0, 32768.0):  # numbers of float16 and bfloat16, too
            bad = inputs.clone()
            bad[4, 17, column] = value
            shown = re.escape(f"{np.float32(value)}")
            message = rf"log_probs\[4, 17, {column}\] is {shown}, expected a log-probability, at most 0: .*log_softmax"
            with pytest.raises(ValueError, match=message):
                decoder.decode(bad, LENGTHS)


@of(LogProbs)
def test_logits_and_probabilities_are_named_with_the_way_out(subject, decoder, inputs):
    with pytest.raises(ValueError, match=r"these are probabilities, give log_probs\.log\(\)"):
        decoder.decode(inputs.exp(), LENGTHS)
    with pytest.raises(ValueError, match=r"if these are logits, give log_probs\.log_softmax\(-1\)"):
        decoder.decode(inputs + 20, LENGTHS)


@of(LogProbs)
def test_rows_that_are_not_normalised_are_warned_of_once(subject, variant, inputs, caplog):
    decoder = subject.fused(variant)
    for _ in range(2):
        decoder.decode(inputs - 4, LENGTHS)
    warnings = [message for message in caplog.messages if "holds no log-probabilities" in message]
    assert len(warnings) == 1
    assert "log_probs[0, 0] holds" in warnings[0]
    found = re.search(r"sum to (\S+), expected 1: if these are logits, give log_probs.log_softmax\(-1\)", warnings[0])
    assert found is not None
    assert float(found[1]) == pytest.approx(0.01832, rel=0.02)  # the inputs may have been rounded to bfloat16


@of(LogProbs)
@pytest.mark.parametrize("row", [0, 1, 2])
@pytest.mark.parametrize(("padding", "begin"), [(0.0, 6), (-100.0, 6), (0.0, 0)])
def test_padding_without_lengths_is_warned_of(subject, variant, row, padding, begin, caplog):
    decoder = subject.fused(variant)
    rows = torch.log_softmax(torch.randn(3, 9, subject.width), -1).to(subject.device)
    decoder.decode(rows)  # a later call is checked, too
    rows[row, begin : begin + 3] = padding
    for _ in range(2):
        decoder.decode(rows)
    expected = f"log_probs[{row}, {8 if begin else 0}] holds no log-probabilities"
    is_checked = rows.device.type == "cpu"
    assert [expected in message for message in caplog.messages if "give lengths" in message] == (
        [True] if is_checked else []
    )


@of(LogProbs)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_rounded_log_probs_are_not_warned_of(subject, variant, dtype, caplog):
    torch.manual_seed(0)
    for sharpness in (0.0, 1.0, 30.0):
        rows = torch.log_softmax((sharpness * torch.randn(2, 9, subject.width)).to(dtype), -1)
        subject.fused(variant).decode(rows.to(subject.device))
    assert "log-probabilities" not in caplog.text


# ------------------------------ phrases, tokens and word graphs
def with_threshold(request: Request, results: list[NBest]) -> tuple[Request, float]:
    """The request with the median evidence of the phrases found as their least one."""
    evidence = sorted(phrase.evidence for nbest in results for phrase in nbest.phrases)
    limit = evidence[len(evidence) // 2]
    assert evidence[0] < limit
    return replace(request, boosting=replace(request.boosting, ac_threshold=limit)), limit


@of((TokenFusion, WordGraph))
def test_phrases_below_the_threshold_of_a_request_are_withdrawn(subject, decoder, inputs):
    request = subject.phrases()
    all_paid = decoder.decode(inputs, LENGTHS, [request] * BATCH)
    limited, limit = with_threshold(request, all_paid)
    table = request.boosting.table
    bonuses = dict.fromkeys(table.texts, 0.0)  # a phrase may have sequences that refund costs, too
    for text, sequence in zip(table.texts, table.sequences, strict=True):
        bonuses[text] += sequence.scores.sum()
    results = decoder.decode(inputs, LENGTHS, [limited] * BATCH)
    for nbest, paid in zip(results, all_paid, strict=True):
        for phrase in nbest.phrases:
            assert phrase.evidence == nbest.best.token_confidence[phrase.first_token : phrase.end_token].min()
        heard = sum(bonuses[phrase.text] for phrase in nbest.phrases if phrase.evidence >= limit)
        assert nbest.best.parts.boosting <= request.boosting_weight * heard + 1e-3
        if all(phrase.evidence >= limit for phrase in paid.phrases):
            assert facts(nbest) == facts(paid)
    alone = [decoder.decode(inputs[b, :length], requests=[limited])[0] for b, length in enumerate(LENGTHS)]
    assert all_facts(alone) == all_facts(results)


@of((TokenFusion, WordGraph))
def test_phrases_of_streams_are_withdrawn_until_committed(subject, decoder, inputs):
    request = subject.phrases()
    limited, _ = with_threshold(request, decoder.decode(inputs, LENGTHS, [request] * BATCH))
    expected = decoder.decode(inputs, LENGTHS, [limited] * BATCH)
    streams, committed = decoder.open(BATCH, [limited] * BATCH), [[] for _ in range(BATCH)]
    for chunk, sizes in subject.random_chunks(inputs, np.random.default_rng(0)):
        decoder.push(streams, chunk, sizes)
    silent = decoder.open(BATCH, [limited] * BATCH)
    for chunk, sizes in subject.random_chunks(inputs, np.random.default_rng(1)):
        decoder.push(silent, chunk, sizes)
        for b, nbest in enumerate(decoder.partial(silent)):
            sure = nbest.best.tokens[: nbest.committed or 0].tolist()
            assert sure[: len(committed[b])] == committed[b]
            committed[b] = sure
    assert all_facts(decoder.close(streams)) == all_facts(expected)
    for nbest, sure in zip(decoder.close(silent), committed, strict=True):
        assert nbest.best.tokens[: len(sure)].tolist() == sure
    decoder.reopen(silent, [0], [request])
    assert not silent.heard.keys() & {0}


# ------------------------------ TokenFusion
@of(TokenFusion)
@pytest.mark.parametrize("requested", [False, True])
def test_parts_of_scores_are_those_of_the_automata(subject, decoder, inputs, requested):
    says, request = subject.requested_fusion() if requested else subject.fusion(), subject.request()
    for nbest in decoder.decode(inputs, LENGTHS, [request] * BATCH if requested else None):
        for path in nbest:
            lm = says.lm_weight * says.lm.score(path.tokens, final=subject.lm_scores_the_end)
            if says.source_lm:
                lm -= says.source_lm_weight * says.source_lm.score(path.tokens, final=subject.lm_scores_the_end)
            assert path.parts.lm == pytest.approx(lm, abs=1e-3)
            boosting = says.boosting_weight * says.boosting.score(path.tokens)
            if says.allowed:
                outside = sum(not says.allowed.is_allowed[token] for token in path.tokens)
                assert path.outside_share * len(path) == pytest.approx(outside)
                boosting -= says.allowed.price * outside if outside else 0.0
            assert path.parts.boosting == pytest.approx(boosting, abs=1e-3)


@of(TokenFusion)
def test_ties_go_to_the_smaller_label(subject, variant):
    decoder, flat = subject.without_preference(variant)
    assert set(decoder.decode(flat[:1], [6])[0].best.tokens.tolist()) <= {0, 1}


@of(TokenFusion)
def test_request_equals_a_decoder_with_its_fusion(subject, variant, decoder, inputs):
    other = subject.with_fusion(variant, subject.requested_fusion())
    requested = decoder.decode(inputs, LENGTHS, [subject.request()] * BATCH)
    assert all_facts(requested) == all_facts(other.decode(inputs, LENGTHS))


@of(TokenFusion)
def test_25_lms_in_a_batch_give_the_results_of_each_alone(subject, variant):
    names, base = [f"lm{i}" for i in range(25)], subject.fusion()
    lms = [random_lm(VOCAB, seed=i, order=2 + i % 3) for i in range(25)]
    weights = {name: 0.1 * (i + 1) for i, name in enumerate(names) if i % 2}
    pooled = replace(base, lm_pool=dict(zip(names, lms, strict=True)), lm_pool_weights=weights)
    inputs = subject.random_inputs(1, 7, seed=5).to(subject.device).expand(25, -1, -1)
    lengths = [7 - i % 3 for i in range(25)]
    decoder, requests = subject.with_fusion(variant, pooled), [Request(lm=name) for name in names]
    found = all_facts(decoder.decode(inputs, lengths, requests))
    for i, name in enumerate(names):
        own = replace(base, lm=lms[i], lm_weight=weights.get(name, base.lm_weight), lm_pool={}, lm_pool_weights={})
        assert found[i] == facts(subject.with_fusion(variant, own).decode(inputs[:1], [lengths[i]])[0])
    assert found == all_facts(decoder.decode(inputs, lengths, requests))
    assert len({repr(each) for each in found}) > 20


@of(TokenFusion)
def test_lm_and_weight_of_a_request_replace_those_of_the_decoder(subject, variant, inputs):
    base = subject.fusion()
    pooled = replace(base, lm_pool={"a": random_lm(VOCAB, seed=20)}, lm_pool_weights={"a": 0.9})
    requests = [Request(lm="none"), None, Request(lm="a", lm_weight=0.3), Request(lm_weight=0.0), None, None]
    found = subject.with_fusion(variant, pooled).decode(inputs, LENGTHS, requests)
    expected = subject.with_fusion(variant, base).decode(inputs, LENGTHS, [Request(lm_weight=0.0), *[None] * 5])
    without = subject.with_fusion(variant, base).decode(inputs, LENGTHS, [Request(lm_weight=0.0)] * BATCH)
    own = replace(base, lm=pooled.lm_pool["a"], lm_weight=0.9)
    third = subject.with_fusion(variant, own).decode(inputs, LENGTHS, [Request(lm_weight=0.3)] * BATCH)
    expected[2], expected[3] = third[2], without[3]
    assert all_facts(found) == all_facts(expected)


@of(TokenFusion)
def test_unknown_lms_are_named(subject, variant, inputs):
    pool = {name: random_lm(VOCAB, seed=seed) for seed, name in enumerate(("news", "law"))}
    pooled = replace(subject.fusion(), lm_pool=pool, lm_pool_weights={})
    for fusion, expected in ((pooled, "one of news, law, none (did you mean 'news'?)"), (Fusion(), "none: the dec")):
        decoder = subject.with_fusion(variant, fusion)
        with pytest.raises(ValueError, match=re.escape(f"requests[1].lm is 'newz', expected {expected}")):
            decoder.open(2, [None, Request(lm="newz")])


@of(TokenFusion)
def test_grammar_of_a_request_equals_that_of_a_decoder(subject, variant, inputs):
    own = replace(subject.fusion(), boosting=None)
    decoder, letters = subject.with_fusion(variant, own), Vocabulary(tuple(map(chr, range(97, 97 + VOCAB))), "char")
    units = ("a", "b", "cd", "ef", "h", "gh", "i", "j", "k")
    sentences = ["".join(row) for count in (1, 2, 3) for row in itertools.product(units, repeat=count)]
    hard, soft = (Request(grammar=build_grammar(sentences, letters, price)) for price in (math.inf, 3.0))
    if decoder.why_unlocked:
        for request, name in ((hard, "grammar"), (Request(allowed=AllowedTokens((True,) * VOCAB)), "allowed")):
            with pytest.raises(ValueError, match=rf"requests\[1\]\.{name} is given, expected None: pruning_mode"):
                decoder.open(2, [None, request])
        return
    requests = [hard, soft, None, soft, None, hard]
    found = decoder.decode(inputs, LENGTHS, requests)
    for b, request in enumerate(requests):
        grammar = request and request.grammar
        alone = subject.with_fusion(variant, replace(own, grammar=grammar))
        (expected,) = alone.decode(inputs[b : b + 1], [LENGTHS[b]])
        assert (facts(found[b]), found[b].in_grammar) == (facts(expected), expected.in_grammar)
        assert (found[b].in_grammar is None) == (grammar is None)
        for path in found[b] if grammar else ():
            assert grammar.accepts(path.tokens, VOCAB) if found[b].in_grammar else len(path) == 0
    streams = decoder.open(BATCH, requests)
    decoder.push(streams, inputs, LENGTHS)
    assert all(not nbest.committed for b, nbest in enumerate(decoder.partial(streams)) if requests[b])
    assert all_facts(decoder.close(streams)) == all_facts(found)
    assert True in {found[b].in_grammar for b in (0, 5)}


@of(TokenFusion)
def test_weight_zero_means_absent(subject, variant, decoder, inputs):
    own, bare = subject.fusion(), all_facts(subject.bare(variant).decode(inputs, LENGTHS))
    off = subject.with_fusion(
        variant, replace(own, lm_weight=0.0, boosting_weight=0.0, source_lm=None, source_lm_weight=None)
    )
    assert all_facts(off.decode(inputs, LENGTHS)) == bare
    assert all_facts(decoder.decode(inputs, LENGTHS, [Request(lm_weight=0.0, boosting_weight=0.0)] * BATCH)) == bare


@of(TokenFusion)
def test_phrases_over_another_vocabulary_are_named(subject, decoder, inputs):
    wrong = Request(boosting=random_boosting(VOCAB + 1, seed=0))
    with pytest.raises(ValueError, match=r"requests\[0\].boosting .* made for 13 tokens, expected 12"):
        decoder.decode(inputs, LENGTHS, [wrong, None, None, None, None, None])


@of(TokenFusion)
def test_lm_weights_need_an_lm(subject, variant, inputs):
    with pytest.raises(ValueError, match=r"requests\[0\].lm_weight is 0.5, but the decoder has no LM"):
        subject.bare(variant).decode(inputs[:1], [3], [Request(lm_weight=0.5)])


@of(TokenFusion)
def test_wrong_lm_is_named(subject, variant):
    with pytest.raises(ValueError, match=r"fusion.lm \(random LM 0\) was made for 5 tokens, expected 12"):
        subject.with_fusion(variant, Fusion(lm=random_lm(5, seed=0)))


# ------------------------------ FlexCTC
@of(FlexCTC)
def test_tokens_last_as_long_as_their_frames(subject, decoder, inputs):
    probabilities = inputs.exp().cpu().numpy()
    for b, nbest in enumerate(decoder.decode(inputs, LENGTHS)):
        for path in nbest:
            assert (path.frames + path.repeats <= LENGTHS[b]).all()
            assert (np.diff(path.frames) >= path.repeats[:-1]).all()
            for token, frame, repeats, confidence in zip(
                path.tokens, path.frames, path.repeats, path.token_confidence, strict=True
            ):
                assert confidence == pytest.approx(probabilities[b, frame : frame + repeats, token].mean(), rel=1e-4)


@of(FlexCTC)
def test_close_finds_no_new_text(subject, decoder, inputs):
    """It changes scores by final weights, and so the order."""
    streams = decoder.open(BATCH)
    decoder.push(streams, inputs, LENGTHS)
    partial = decoder.partial(streams, n_best=subject.most_partial)
    for early, nbest in zip(partial, decoder.close(streams), strict=True):
        assert {subject.text(path) for path in nbest} <= {subject.text(path) for path in early}


@of(FlexCTC)
def test_beam_of_one_is_greedy(subject, inputs):
    """merge=max and a beam of one follow the best label of each frame: greedy's objective."""
    for b, nbest in enumerate(subject.make(VOCAB, VOCAB, beam_size=1, merge="max").decode(inputs, LENGTHS)):
        labels = inputs[b, : LENGTHS[b]].argmax(-1).tolist()
        starts = [t for t, v in enumerate(labels) if v != VOCAB and (t == 0 or labels[t - 1] != v)]
        assert nbest.best.frames.tolist() == starts
        assert nbest.best.tokens.tolist() == [labels[t] for t in starts]


@of(FlexCTC)
def test_beam_wider_than_all_texts_finds_all(subject, variant):
    log_probs = random_log_probs(1, 2, 3, seed=5).to(subject.device)
    options = {"beam_size": 64, "n_best": 64, "beam_threshold": float("inf")}
    nbest = subject.make(2, 2, merge=variant, **options).decode(log_probs, [2])[0]
    assert {subject.text(path) for path in nbest} == {(), (0,), (1,), (0, 1), (1, 0)}


@of(FlexCTC)
@pytest.mark.parametrize("blank_id", [0, 4, VOCAB])
def test_blank_may_be_any_column(subject, variant, decoder, inputs, blank_id):
    columns = [c for c in range(VOCAB + 1) if c != blank_id]
    moved = torch.empty_like(inputs)
    moved[:, :, columns] = inputs[:, :, :VOCAB]
    moved[:, :, blank_id] = inputs[:, :, VOCAB]
    usual = decoder.decode(inputs, LENGTHS)
    other = subject.with_fusion(variant, subject.fusion(), blank_id=blank_id).decode(moved, LENGTHS)
    for a, b in zip(usual, other, strict=True):
        assert [columns[token] for token in a.best.tokens] == b.best.tokens.tolist()
        assert a.best.score == b.best.score


@of(FlexCTC)
@pytest.mark.parametrize("blank_id", [-1, VOCAB + 1])
def test_wrong_blank_is_named(subject, blank_id):
    with pytest.raises(ValueError, match=f"blank_id is {blank_id}, expected an integer 0 .. {VOCAB}"):
        subject.make(VOCAB, blank_id)


# ------------------------------ Transducer
@of(Transducer)
def test_without_score_norm_the_score_itself_sorts(subject, variant, inputs):
    for nbest, length in zip(subject.fused(variant, score_norm=False).decode(inputs, LENGTHS), LENGTHS, strict=True):
        scores = [path.score for path in nbest]
        assert scores == sorted(scores, reverse=True)
        assert len({subject.text(path) for path in nbest}) == len(nbest) >= subject.least_n_best(length)


@of(Transducer)
def test_durations_are_the_times_between_tokens(subject, decoder, inputs):
    for nbest in decoder.decode(inputs, LENGTHS):
        for path in nbest:
            if path.durations is not None:
                assert (np.diff(path.frames) >= path.durations[:-1]).all()
                assert (path.repeats == np.maximum(path.durations, 1)).all()


@of(Transducer)
def test_alignments_hold_the_tokens_and_all_blanks(subject, decoder, networks, inputs):
    for nbest, length in zip(decoder.decode(inputs, LENGTHS), LENGTHS, strict=True):
        for path in nbest:
            emits = path.alignment < VOCAB
            assert path.alignment[emits].tolist() == path.tokens.tolist()
            assert path.alignment_frames[emits].tolist() == path.frames.tolist()
            assert np.allclose(np.exp(path.alignment_log_probs[emits]), path.token_confidence)
            if not networks.durations:  # a blank ends every frame
                assert path.alignment_frames[~emits].tolist() == list(range(length))


@of(Transducer)
def test_blanks_of_duration_zero_move_on(subject, inputs):
    networks = TableNetworks(VOCAB, (0, 1, 2), seed=4)
    networks.bias[VOCAB], networks.bias[VOCAB + 1] = 100.0, 100.0
    best = subject.make(networks, beam_size=4, alignments=True).decode(inputs[:1], [10])[0].best
    assert best.alignment.tolist() == [VOCAB] * 10
    assert best.alignment_frames.tolist() == list(range(10))


@of(Transducer)
def test_beam_wider_than_all_transducer_texts_finds_them(subject):
    networks = TableNetworks(2, max_length=2, seed=5)
    nbest = subject.make(networks, beam_size=64, n_best=64).decode(random_frames(1, 2, seed=1), [2])[0]
    texts = {subject.text(path) for path in nbest}
    assert texts <= {(), (0,), (1,), (0, 0), (0, 1), (1, 0), (1, 1)}
    assert len(texts) >= 3


@of(Transducer)
def test_temperature_divides_the_logits(subject, variant, networks, inputs):
    warm = subject.make(networks, beam_size=4, softmax_temperature=2.0).decode(inputs, LENGTHS)
    plain = subject.make(networks, beam_size=4).decode(inputs, LENGTHS)
    halved = subject.make(subject.networks_of(variant, scale=0.5), beam_size=4).decode(inputs, LENGTHS)
    for a, b in zip(warm, halved, strict=True):
        assert a.best.tokens.tolist() == b.best.tokens.tolist()
        assert a.best.score == pytest.approx(b.best.score, abs=1e-4)
    assert warm[0].best.score != pytest.approx(plain[0].best.score, abs=1e-2)


@of(Transducer)
@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf")])
def test_networks_that_fail_are_named(subject, variant, inputs, value):
    decoder = subject.make(subject.networks_of(variant, bias=value), beam_size=4)
    streams = decoder.open(BATCH)
    with pytest.raises(ValueError, match=r"networks give NaN or \+inf for utterance 0"):
        decoder.push(streams, inputs, LENGTHS)
    with pytest.raises(ValueError, match="streams is closed"):
        decoder.close(streams)


@of(Transducer)
def test_nemos_order_of_axes_is_recognised(subject, decoder):
    with pytest.raises(ValueError, match=r"NeMo's encoders give \[B, D, T\]"):
        decoder.decode(torch.zeros(2, subject.width, 9), [5, 5])


@of(Transducer)
def test_networks_that_do_not_fit_are_named(subject, networks):
    networks.durations = (0, 1, 2)
    with pytest.raises(ValueError, match=r"networks give \d+ columns, expected 16"):
        subject.make(networks)


# ------------------------------ WordGraph
@of(WordGraph)
def test_words_hold_all_tokens_in_their_order(subject, decoder, inputs):
    for nbest, length in zip(decoder.decode(inputs, LENGTHS), LENGTHS, strict=True):
        for path in nbest:
            spans = [(word.first_token, word.end_token) for word in path.words]
            assert [i for span in spans for i in range(*span)] == list(range(len(path.tokens)))
            times = [t for word in path.words for t in (word.start_frame, word.end_frame)]
            assert times == sorted(times)
            assert all(0 <= t <= length for t in times)


@of(WordGraph)
def test_boosting_part_is_that_of_the_automaton(subject, decoder, inputs):
    request = subject.request()
    for nbest in decoder.decode(inputs, LENGTHS, [request] * BATCH):
        for path in nbest:
            bonus = request.boosting.score(subject.emitted(path, decoder))
            assert path.parts.boosting == pytest.approx(request.boosting_weight * bonus, abs=1e-3)


@of(WordGraph)
def test_locks_and_grammars_are_refused(decoder):
    words = Vocabulary(("a", "b"), "char")
    for request in (Request(allowed=AllowedTokens((True, False))), Request(grammar=build_grammar(["a"], words))):
        with pytest.raises(ValueError, match=r"requests\[0\]\.\w+ is given, expected None: a word graph writes"):
            decoder.open(1, [request])


@of(WordGraph)
def test_boosting_weight_zero_means_no_boosting(subject, decoder, inputs, expected):
    requests = [Request(boosting=subject.request().boosting, boosting_weight=0.0)] * BATCH
    assert all_facts(decoder.decode(inputs, LENGTHS, requests)) == expected


@of(WordGraph)
@pytest.mark.parametrize("name", ["news", "none"])
def test_lms_of_requests_are_refused(decoder, name):
    with pytest.raises(ValueError, match=rf"requests\[0\].lm is '{name}', expected None: .* is in the graph"):
        decoder.open(1, [Request(lm=name)])
    pool = Fusion(lm_pool={"news": random_lm(VOCAB, seed=0)})
    with pytest.raises(ValueError, match=r"fusion\.lm_pool has news, expected no LMs: .* is in the graph"):
        decoder.with_options(decoder.config, pool)


@of(WordGraph)
def test_phrases_over_another_graph_are_named(subject, decoder, inputs):
    wrong = Request(boosting=empty_automaton(3))
    with pytest.raises(ValueError, match=r"requests\[0\].boosting .* made for 3 words, expected"):
        decoder.decode(inputs, LENGTHS, [wrong, None, None, None, None, None])
