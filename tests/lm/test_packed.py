"""Packed LMs score as the ARPA files they were made from."""

import itertools
import math
import random
import re
from dataclasses import replace

import numpy as np
import pytest

from nemo_gpu_decoding.lm.pack import pack_arpa_in_memory
from nemo_gpu_decoding.lm.packed import MAX_BITS, NO_LABEL, bits_for, load_packed_lm, num_words, read_bits, write_bits
from tests.oracles.ngram import (
    arpa_text,
    closed_table,
    facts_of,
    log10_prob,
    missing_suffixes,
    save_packed_lm,
    write_arpa,
)

LN10 = math.log(10)
EXAMPLE = {
    ("<s>",): (-99.0, -0.5), ("</s>",): (-1.5, 0.0), ("a",): (-0.5, -0.25), ("b",): (-0.75, 0.0),
    ("<s>", "a"): (-0.125, 0.0), ("a", "b"): (-0.375, 0.0), ("a", "</s>"): (-0.25, 0.0),
}  # fmt: skip


@pytest.fixture
def pack(tmp_path):
    def pack_table(table, **options):
        return pack_arpa_in_memory(write_arpa(tmp_path / "lm.arpa", table), **options)

    return pack_table


def packed(values, bits):
    words = np.zeros(num_words(len(values), bits), np.uint64)
    write_bits(words, bits, 0, values)
    return words


def unpacked(words, bits, length):
    return np.array([read_bits(words, bits, index) for index in range(length)], np.uint64)


def sentences(lm, count, seed, longest=6):
    draw = random.Random(seed)
    words = [word for word in lm.words if word not in ("<s>", "</s>")]
    return [draw.choices(words, k=draw.randint(0, longest)) for _ in range(count)]


def test_worked_example_of_the_docstring(pack):
    lm = pack(EXAMPLE)
    arrays = lm.arrays
    assert lm.words == ("<s>", "</s>", "a", "b")
    assert arrays.states["arc_begin"].tolist() == [0, 4, 5, 7]
    assert arrays.states["backoff_to"].tolist()[:3] == [0, 0, 0]
    assert arrays.states["backoff_cost"][1:3] == pytest.approx([0.5 * LN10, 0.25 * LN10])
    assert (arrays.label_bits, arrays.target_bits) == (2, 2)
    assert unpacked(arrays.labels, 2, 7).tolist() == [0, 1, 2, 3, 2, 1, 3]
    arcs = unpacked(arrays.arcs, 34, 7)
    assert (arcs & 3).tolist() == [1, 0, 2, 0, 2, 0, 0]
    costs = (arcs >> 2).astype(np.uint32).view(np.float32)
    assert costs == pytest.approx(np.array([99, 1.5, 0.5, 0.75, 0.125, 0.25, 0.375]) * LN10)
    assert lm.advance(1, 3) == (pytest.approx((0.5 + 0.75) * LN10), 0)
    assert (lm.start_state, lm.sentence_end, lm.unknown) == (1, 1, NO_LABEL)
    assert lm.counts == (4, 3)


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize(("order", "keep"), [(1, 1.0), (2, 0.5), (3, 0.3), (4, 0.5), (5, 0.4)])
def test_every_word_after_every_history_has_its_backed_off_probability(pack, seed, order, keep):
    table = closed_table(seed=seed, order=order, keep=keep, words=("x", "y"))
    order = max(map(len, table))  # by chance there may be no longer n-grams
    lm = pack(table)
    state_after = {(): lm.start_state}
    for length in range(4):
        for words in itertools.product(("x", "y", "<unk>"), repeat=length):
            for word in ("x", "y", "<unk>", "</s>"):
                expected = -log10_prob(table, ("<s>", *words), word, order) * LN10
                cost, state = lm.advance(state_after[words], lm.label(word))
                assert cost == pytest.approx(expected, abs=1e-5)
                state_after[(*words, word)] = state


@pytest.mark.parametrize("order", [2, 3, 5])
def test_packed_scores_equal_those_of_kenlm(tmp_path, order):
    kenlm = pytest.importorskip("kenlm")
    # KenLM has room for few missing suffixes only
    table = closed_table(seed=order, order=order, keep=0.9, words=[f"w{i}" for i in range(4)])
    assert missing_suffixes(table) > 0 or order == 2
    path = write_arpa(tmp_path / "lm.arpa", table)
    lm, judge = pack_arpa_in_memory(path), kenlm.Model(str(path))
    for words in [*sentences(lm, 200, seed=order), ["w1", "never-seen", "w2"]]:
        text = " ".join(words)
        assert lm.score(words) == pytest.approx(-judge.score(text) * LN10, abs=1e-4)
        assert lm.score(words, final=False) == pytest.approx(-judge.score(text, eos=False) * LN10, abs=1e-4)


def test_states_and_lms_without_start_or_unknown(pack):
    # Extended n-grams, <s>, and n-grams with a back-off weight, which an unpruned look would pay.
    table = dict(EXAMPLE)
    table["b",] = (-0.75, -0.125)
    lm = pack(table)
    assert lm.num_states == 4  # root, <s>, a, b
    cost, _ = lm.advance(lm.advance(0, lm.label("b"))[1], lm.label("a"))
    assert cost == pytest.approx((0.125 + 0.5) * LN10)
    lm = pack({("a",): (-0.5, 0.0), ("b",): (-0.5, 0.0)})
    assert (lm.start_state, lm.sentence_end, lm.unknown) == (0, NO_LABEL, NO_LABEL)
    assert lm.score(["a", "b"], final=False) == pytest.approx(LN10)


def test_order_without_ngrams_is_packed(tmp_path):
    text = arpa_text(EXAMPLE).replace("ngram 2=3", "ngram 2=3\nngram 3=0")
    path = tmp_path / "lm.arpa"
    path.write_text(text.replace("\\end\\", "\\3-grams:\n\n\\end\\"))
    lm = pack_arpa_in_memory(path)
    assert lm.counts == (4, 3, 0)
    assert lm.score(["a", "b"]) == pytest.approx((0.125 + 0.375 + 1.5) * LN10)


@pytest.mark.parametrize(("state", "label"), [(-1, 0), (3, 0), (0, -1), (0, 4)])
def test_state_or_label_out_of_range_is_refused(pack, state, label):
    with pytest.raises(ValueError, match=r"(state|label) is -?\d, expected 0 .. \d"):
        pack(EXAMPLE).advance(state, label)


def _signed(path, lm, **arrays):
    """Writes an LM with other contents, and a right checksum."""
    save_packed_lm(replace(lm, arrays=lm.arrays._replace(**arrays)), path)


def _changed(array, place, value):
    array = np.array(array)
    array[place] = value
    return array


def test_targets_and_backoffs_out_of_range_are_refused(pack, tmp_path):
    lm, path = pack(closed_table(seed=1, order=3, keep=0.6)), tmp_path / "lm.packed"
    states, arcs, bits = lm.arrays.states, lm.arrays.arcs, lm.arrays.target_bits
    begins, last = states["arc_begin"], lm.num_states
    wrong = {
        "arc_begin beyond the end": {"states": _changed(states, 2, (begins[-1] + 5, 0, 0.0))},
        "arc_begin of the root": {"states": _changed(states, 0, (1, 0, 0.0))},
        "fewer words in the root": {"states": _changed(states, 1, (begins[1] - 1, 0, 0.0))},
        "backoff_to beyond the end": {"states": _changed(states, 2, (begins[2], 1 << 31, 0.0))},
        "backoff_to itself": {"states": _changed(states, 2, (begins[2], 2, 0.0))},
        "arcs without end": {"states": _changed(states, last, (1 << 31, 0, 0.0))},
        "too few arcs": {"arcs": arcs[:-1]},
        "too few labels": {"labels": lm.arrays.labels[:-1]},
        "target beyond the end": {"arcs": _changed(arcs, 0, arcs[0] | np.uint64((1 << bits) - 1))},
        "label beyond the end": {"labels": np.full_like(lm.arrays.labels, 2**64 - 1)},
        "label_bits": {"label_bits": 70},
        "target_bits": {"target_bits": 0},
    }
    if (1 << bits) == lm.num_states:
        del wrong["target beyond the end"]
    seen = {}
    for what, arrays in wrong.items():
        _signed(path, lm, **arrays)
        try:
            seen[what] = f"accepted {load_packed_lm(path)}"
        except ValueError as error:
            seen[what] = str(error)
    assert all(message.startswith(f"{path} is damaged: ") for message in seen.values()), seen
    _signed(path, lm)
    assert load_packed_lm(path).num_states == lm.num_states


@pytest.mark.parametrize("fact", ["label_bits", "start_state", "counts"])
def test_a_fact_that_is_missing_is_named_with_the_file(pack, tmp_path, fact):
    lm, path = pack(EXAMPLE), tmp_path / "lm.packed"
    save_packed_lm(lm, path, {name: value for name, value in facts_of(lm).items() if name != fact})
    with pytest.raises(ValueError, match=re.escape(f"{path} is damaged: '{fact}' is missing; pack it anew")):
        load_packed_lm(path)


def test_byte_counts_of_parts_equal_those_of_the_arrays(pack):
    assert pack(EXAMPLE).nbytes == {"states": 4 * 12, "labels": 2 * 8, "arcs": 5 * 8}


# -- Arrays of small integers -------------------------------------------------------------------------
def test_bits_of_the_docstring_example_are_packed():
    assert packed(np.array([5, 1, 6], np.uint64), bits=3).tolist() == [0b110_001_101, 0]
    values = np.random.default_rng(0).integers(0, 1 << 37, 100, np.uint64)
    words = np.zeros(num_words(100, 37), np.uint64)
    for begin, end in ((0, 1), (1, 40), (40, 100)):
        write_bits(words, 37, begin, values[begin:end])
    assert (words == packed(values, 37)).all()


@pytest.mark.parametrize(("largest", "bits"), [(0, 1), (1, 1), (2, 2), (255, 8), (256, 9)])
def test_bits_for_is_enough_for_the_largest_value(largest, bits):
    assert bits_for(largest) == bits


@pytest.mark.parametrize("bits", [1, 3, 18, 32, 33, 50, MAX_BITS])
@pytest.mark.parametrize("length", [0, 1, 64, 131])
def test_packed_bits_are_read_back(bits, length):
    values = np.random.default_rng(bits).integers(0, 1 << bits, length, np.uint64)
    words = packed(values, bits)
    assert len(words) == num_words(length, bits)
    assert (unpacked(words, bits, length) == values).all()
