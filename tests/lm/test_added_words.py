"""Words added to an LM: as likely as an unknown one, everything else as it was."""

import gzip

import numpy as np
import pytest

from nemo_gpu_decoding.lm.added_words import write_with_words
from nemo_gpu_decoding.lm.arpa import read_arpa
from tests.oracles.ngram import arpa_text, random_table

WORDS = ("a", "b", "c")


def write(path, specials=("<s>", "</s>", "<unk>")):
    path.write_text(arpa_text(random_table(WORDS, 3, 0.5, seed=1, specials=specials)))
    return path


def one_grams(arpa):
    block = arpa.orders[0]
    return dict(zip(arpa.symbols, block.log10_probs.tolist(), strict=True))


@pytest.mark.parametrize("packed", [False, True])
def test_all_ngrams_stay_and_the_words_come_with_unks_probability(tmp_path, packed):
    source = write(tmp_path / "lm.arpa")
    before = read_arpa(source)
    if packed:
        (tmp_path / "lm.arpa.gz").write_bytes(gzip.compress(source.read_bytes()))
        source = tmp_path / "lm.arpa.gz"
    target = tmp_path / "more.arpa"
    assert write_with_words(source, ["x", "b", "y", "x"], target) == ["x", "y"]
    after = read_arpa(target)
    unknown = one_grams(before)["<unk>"]
    assert one_grams(after) == pytest.approx({**one_grams(before), "x": unknown, "y": unknown})
    for old, new in zip(before.orders[1:], after.orders[1:], strict=True):
        names = [
            np.array(arpa.symbols)[block.symbols].tolist()
            for arpa, block in ((before, old), (after, new))
        ]
        assert names[0] == names[1]
        assert new.log10_probs.tolist() == old.log10_probs.tolist()
        assert new.log10_backoffs.tolist() == old.log10_backoffs.tolist()


def test_without_unk_they_are_the_least_likely_words(tmp_path):
    source, target = write(tmp_path / "lm.arpa", specials=("<s>", "</s>")), tmp_path / "more.arpa"
    write_with_words(source, ["x"], target)
    before = one_grams(read_arpa(source))
    assert one_grams(read_arpa(target))["x"] == pytest.approx(min(before.values()))


def test_nothing_is_written_if_the_lm_lists_all_of_them(tmp_path):
    source, target = write(tmp_path / "lm.arpa"), tmp_path / "more.arpa"
    assert write_with_words(source, ["a", "c"], target) == []
    assert not target.exists()


@pytest.mark.parametrize("word", ["", "new york", " a"])
def test_words_have_no_white_space(tmp_path, word):
    with pytest.raises(ValueError, match=r"the word to be added is .*, expected one without white"):
        write_with_words(write(tmp_path / "lm.arpa"), [word], tmp_path / "more.arpa")
