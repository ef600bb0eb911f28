"""The ARPA reader: what it accepts, what it says about files it cannot read."""

import bz2
import gzip
import lzma
import re

import numpy as np
import pytest

from nemo_gpu_decoding.checks import FieldError
from nemo_gpu_decoding.lm import arpa as arpa_module
from nemo_gpu_decoding.lm.arpa import ArpaReader, read_arpa
from nemo_gpu_decoding.lm.arpa_scan import SymbolTable, find_symbol, hashed
from tests.lm.test_estimate import table_of
from tests.oracles.ngram import arpa_text, random_table

BIGRAM = r"""some text of the writer

\data\
ngram 1=4
ngram 2=2

\1-grams:
-99 <s> -0.5
-1.5 </s>
-0.5 a -0.25
-inf b

\2-grams:
-0.125 <s> a
-0.25 a </s>

\end\
"""


@pytest.mark.parametrize("separator", ["\t", " "])
def test_arpa_file_of_srilm_is_read(write, separator):
    lm = read_arpa(write(BIGRAM.replace(" <s> -0.5", f"{separator}<s>{separator}-0.5")))
    assert lm.symbols == ("<s>", "</s>", "a", "b")
    assert lm.orders[0].log10_probs.tolist() == [-99, -1.5, -0.5, -np.inf]
    assert lm.orders[0].log10_backoffs.tolist() == [-0.5, 0, -0.25, 0]
    assert lm.orders[1].symbols.tolist() == [[0, 2], [2, 1]]
    assert lm.orders[1].log10_probs.tolist() == [-0.125, -0.25]


@pytest.mark.parametrize("block_bytes", [1, 20, 300, 1 << 22])
@pytest.mark.parametrize("separator", ["\t", "  "])
def test_any_block_size_and_separator_gives_the_same_ngrams(write, monkeypatch, block_bytes, separator):
    table = random_table(["x", "y", "z"], order=3, keep=0.5, seed=1)
    monkeypatch.setattr(arpa_module, "_BLOCK_BYTES", block_bytes)
    assert table_of(read_arpa(write(arpa_text(table, separator)))) == table


def test_gzip_blank_lines_and_unicode_white_space(write):
    plain, zipped = read_arpa(write(BIGRAM)), read_arpa(write(gzip.compress(BIGRAM.encode()), "lm.txt"))
    assert zipped.symbols == plain.symbols
    assert (zipped.orders[1].symbols == plain.orders[1].symbols).all()
    text = BIGRAM.replace("-0.125 <s> a\n", "-0.125 <s> a\n\n \n").replace("\n", "\r\n")
    assert len(read_arpa(write(text)).orders[1].symbols) == 2
    assert read_arpa(write("\ufeff" + BIGRAM)).symbols == plain.symbols
    # NeMo writes token 33 as chr(133) and token 60 as chr(160)
    lm = read_arpa(write(BIGRAM.replace(" a", " \x85").replace("-inf b", "-inf \xa0")))
    assert lm.symbols == ("<s>", "</s>", "\x85", "\xa0")


def test_start_symbol_may_lack_its_probability(write):
    lm = read_arpa(write(BIGRAM.replace("-99 <s> -0.5", "<s>\t-0.5")))
    assert lm.orders[0].log10_probs[0] == -99
    assert lm.orders[0].log10_backoffs[0] == -0.5
    lm = read_arpa(write(BIGRAM.replace("-99 <s> -0.5", "<s>")))
    assert lm.orders[0].log10_backoffs[0] == 0


@pytest.mark.parametrize(
    "number",
    [
        "-0", "0", "-.5", "-5.", "+1e-3", "-1E2", "-1.25e+1", "-9.1e-05", "-5.593445", "-1.1860373",
        "-0.30102999566398120", "-123456789012345678901234567890e-30", "-9007199254740993",
        "-1e-22", "-1e-23", "-3e-320", "-1e400", "-inf", "-Infinity", "-0.1e1", "-1_0", "-1e-0005",
    ],
)  # fmt: skip
def test_numbers_are_read_as_float_reads_them(write, number):
    lm = read_arpa(write(BIGRAM.replace("-0.5 a -0.25", f"{number} a {number}")))
    for value in (lm.orders[0].log10_probs[2], lm.orders[0].log10_backoffs[2]):
        assert np.float64(value).tobytes() == np.float64(number).tobytes()


def test_random_numbers_are_read_to_the_bit(write):
    draw = np.random.default_rng(0)
    values = [-draw.exponential() * 10.0 ** draw.integers(-12, 3) for _ in range(600)]
    texts = [f"{value:.{1 + n % 17}g}" for n, value in enumerate(values)]
    lines = "".join(f"{text}\tw{n}\t{text}\n" for n, text in enumerate(texts))
    lm = read_arpa(write(f"\\data\\\nngram 1=600\n\n\\1-grams:\n{lines}\n\\end\\\n"))
    expected = [float(text) for text in texts]
    assert lm.orders[0].log10_probs.tolist() == expected
    assert lm.orders[0].log10_backoffs.tolist() == expected


@pytest.mark.parametrize("number", ["-", "+", ".", "-e5", "1e", "1e+", "1.2.3", "--1", "1-", "0x1", "1e5x"])
def test_text_that_is_no_number_is_named(write, number):
    with pytest.raises(ValueError, match=re.escape(f"line 10: '{number}' is not a number in '{number} a")):
        read_arpa(write(BIGRAM.replace("-0.5 a -0.25", f"{number} a -0.25")))


def test_probabilities_above_1_are_said_once(write, caplog):
    caplog.set_level("WARNING", "nemo_gpu_decoding")
    lm = read_arpa(write(BIGRAM.replace("-0.25 a </s>", "0.25 a </s>").replace("-0.125 <s> a", "0.125 <s> a")))
    assert lm.orders[1].log10_probs.tolist() == [0.125, 0.25]
    (record,) = caplog.records
    assert "line 14: a probability above 1 in '0.125 <s> a'" in record.message


def test_blocks_their_rows_and_their_symbols(write):
    text = BIGRAM.replace("-0.5 a -0.25", "\n-0.5 a -0.25").replace("-0.25 a </s>", " \n-0.25 a </s>")
    with ArpaReader(write(text)) as arpa:
        for block in arpa.blocks():
            row, line = (2, 11) if block.order == 1 else (1, 17)
            assert f"line {line}: wrong in '-0." in str(arpa.fault(row, "wrong"))
    with ArpaReader(write(BIGRAM)) as arpa:
        assert arpa.counts == {1: 4, 2: 2}
        for block in arpa.blocks():
            if block.order == 2:
                assert arpa.symbols == ["<s>", "</s>", "a", "b"]


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ("\\end\\\n", "", r"truncated: '\\end\\' is missing"),
        ("\\end\\", "\\3-grams:", r"found '\\3-grams:', expected '\\end\\'"),
        ("-0.25 a </s>\n\n\\end\\\n", "", r"line 14: truncated: the file ends after 1 of 2 2-grams"),
        ("\\2-grams:\n-0.125 <s> a\n-0.25 a </s>\n\n\\end\\\n", "", "truncated: the file ends before"),
        ("ngram 2=2", "ngram 2=3", "2 2-grams, but the header says 3"),
        ("ngram 1=4", "ngram 1=3", "line 11: more 1-grams than the 3 of the header, in .-inf b."),
        ("ngram 2=2", "ngram 3=2", r"orders \[1, 3\], expected 1, 2"),
        ("ngram 2=2", "gram 2=2", "line 5: found 'gram 2=2', expected 'ngram <order>=<count>'"),
        ("\\1-grams:", "\\2-grams:", r"line 7: found '\\2-grams:', expected '\\1-grams:'"),
        ("-0.25 a </s>", "-0.25 a", "line 15: 2 fields, expected 3 or 4 in '-0.25 a'"),
        ("-0.25 a </s>", "-0.25 a </s> -1 -1", "line 15: 5 fields, expected 3 or 4"),
        ("-0.25 a </s>", "x a </s>", "line 15: 'x' is not a number"),
        ("-0.25 a </s>", "nan a </s>", "line 15: 'nan' is not a log-probability"),
        ("-0.5 a -0.25", "-0.5 a inf", "line 10: 'inf' is not a log-probability"),
        ("-0.5 a -0.25", "-0.5 a 1.5e38", "line 10: '1.5e38' is not a log-probability"),  # inf in float32
        ("-0.25 a </s>", "3e300 a </s>", "line 15: '3e300' is not a log-probability"),
        ("-0.25 a </s>", "-0.25 c </s>", "line 15: 'c' is not among the 1-grams"),
        (BIGRAM, "no header\n", r"is not an ARPA file: it has no line '\\data\\'"),
        (BIGRAM, "\\data\\\nngram 1=1\n", "truncated: the file ends in the header"),
    ],
)
def test_arpa_errors_name_fault_and_line(write, old, new, message):
    assert old in BIGRAM
    path = write(BIGRAM.replace(old, new))
    with pytest.raises(ValueError, match=message) as error:
        read_arpa(path)
    assert str(path) in str(error.value)


def test_errors_in_later_blocks_and_where_words_are_added_name_their_line(write, monkeypatch):
    path = write(BIGRAM.replace("-0.25 a </s>", "x a </s>"))
    with pytest.raises(ValueError, match="line 15: 'x' is not a number"):
        read_arpa(path, ["x"])
    monkeypatch.setattr(arpa_module, "_BLOCK_BYTES", 10)
    with pytest.raises(ValueError, match="line 15: 'x' is not a number"):
        read_arpa(path)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (gzip.compress(BIGRAM.encode())[:-20], "truncated or damaged gzip"),
        (
            b"mmap lm http://kheafield.com/code format version 5\n\0 \0\0",
            "KenLM binary of another version than 5, or incomplete",
        ),
    ],
    ids=["gzip", "KenLM"],
)
def test_file_that_is_no_text_is_named(write, content, message):
    with pytest.raises(ValueError, match=message):
        read_arpa(write(content))


def test_words_in_latin_1_are_read_with_a_warning(write, monkeypatch, messages):
    monkeypatch.setattr(arpa_module, "_BLOCK_BYTES", 10)
    named = BIGRAM.replace(" a", " é").replace(" b", " ü")
    read = [read_arpa(write(named.encode(encoding))) for encoding in ("latin-1", "utf-8")]
    assert read[0].symbols == read[1].symbols
    assert all((x.symbols == y.symbols).all() for x, y in zip(read[0].orders, read[1].orders, strict=True))
    assert len(messages) == 1
    assert "is not UTF-8: its other bytes are read as Latin-1" in messages[0]


# -- added words: as likely as an unknown one, everything else as it was --------------------------------
def write_table(path, specials=("<s>", "</s>", "<unk>")):
    path.write_text(arpa_text(random_table(("a", "b", "c"), 3, 0.5, seed=1, specials=specials)))
    return path


def one_grams(arpa):
    return dict(zip(arpa.symbols, arpa.orders[0].log10_probs.tolist(), strict=True))


@pytest.mark.parametrize("compressed", [False, True])
def test_all_ngrams_stay_and_added_words_come_first_with_unks_probability(tmp_path, compressed):
    source = write_table(tmp_path / "lm.arpa")
    before = read_arpa(source)
    if compressed:
        source.write_bytes(gzip.compress(source.read_bytes()))
    after = read_arpa(source, ["x", "b", "y", "x"])
    assert after.added == after.symbols[:2] == ("x", "y")
    unknown = one_grams(before)["<unk>"]
    assert one_grams(after) == {**one_grams(before), "x": unknown, "y": unknown}
    assert after.orders[0].symbols[:, 0].tolist() == list(range(len(after.symbols)))
    for old, new in zip(before.orders[1:], after.orders[1:], strict=True):
        assert (new.symbols == old.symbols + 2).all()
        assert new.log10_probs.tolist() == old.log10_probs.tolist()
        assert new.log10_backoffs.tolist() == old.log10_backoffs.tolist()


def test_where_added_words_have_no_unk_or_are_listed(tmp_path):
    source = write_table(tmp_path / "lm.arpa", specials=("<s>", "</s>"))
    assert one_grams(read_arpa(source, ["x"]))["x"] == min(one_grams(read_arpa(source)).values())
    source = write_table(tmp_path / "lm.arpa")
    after = read_arpa(source, ["a", "c"])
    assert after.added == ()
    assert one_grams(after) == one_grams(read_arpa(source))


@pytest.mark.parametrize("word", ["", "new york", " a"])
def test_added_words_have_no_white_space(tmp_path, word):
    with pytest.raises(FieldError, match=r"the word to be added is .*, expected one without white"):
        ArpaReader(tmp_path / "none.arpa", [word])


# -- The table of symbols: indices, doubles ---------------------------------------------------
def index_of(table, symbol):
    text = np.frombuffer(b"<" + symbol + b">", np.uint8)  # within other text
    end = len(text) - 1
    return find_symbol(table.arrays, text, 1, end, np.uint64(hashed(text, 1, end)))


def test_symbols_have_the_index_of_their_position():
    names = [f"w{i}" for i in range(5000)]
    table = SymbolTable(names)
    assert table.double == -1
    assert [index_of(table, name.encode()) for name in names[::97]] == list(range(0, 5000, 97))
    assert index_of(table, b"w") == index_of(table, b"w50001") == -1
    assert SymbolTable([*names, "w7", "w3"]).double == 5000


def test_equal_hashes_do_not_make_symbols_equal():
    table = SymbolTable(["ab"])
    text = np.frombuffer(b"ba", np.uint8)
    assert find_symbol(table.arrays, text, 0, 2, np.uint64(hashed(np.frombuffer(b"ab", np.uint8), 0, 2))) == -1


EMPTY = BIGRAM.replace("ngram 2=2\n", "ngram 2=2\nngram 3=0\n")
TWICE = BIGRAM.replace("ngram 1=4", "ngram 1=6").replace("-inf b\n", "-0.75 b -1\n-inf b\n-1 </s>\n")


@pytest.mark.parametrize(
    ("content", "counts", "ends"),
    [
        (EMPTY, [4, 2, 0], -1.5),
        (EMPTY.replace("\\end", "\\3-grams:\n\n\\end"), [4, 2, 0], -1.5),
        (TWICE, [4, 2], -1.0),
        (lzma.compress(BIGRAM.encode()), [4, 2], -1.5),
        (bz2.compress(BIGRAM.encode()), [4, 2], -1.5),
    ],
    ids=["empty order", "empty section", "repeated symbols", "xz", "bzip2"],
)
def test_files_of_other_writers_are_read(write, caplog, content, counts, ends):
    lm = read_arpa(write(content))
    assert [len(block.symbols) for block in lm.orders] == counts
    assert (lm.symbols, lm.orders[0].log10_probs[1]) == (("<s>", "</s>", "a", "b"), ends)
    assert lm.orders[0].symbols[:, 0].tolist() == [0, 1, 2, 3]
    assert lm.orders[1].symbols.tolist() == [[0, 2], [2, 1]]
    assert ("more than once: the likelier entry counts" in caplog.text) == (content is TWICE)


@pytest.mark.parametrize("character", ["\v", "\f", "\x1c", "\u0085"])
def test_only_spaces_tabs_and_line_ends_separate_fields(write, character):
    assert read_arpa(write(BIGRAM.replace(" a", f" a{character}c"))).symbols == ("<s>", "</s>", f"a{character}c", "b")


@pytest.mark.parametrize(
    ("content", "what"),
    [
        (BIGRAM.encode("utf-16"), "text in UTF-16"),
        (gzip.compress(BIGRAM.encode("utf-16")), "text in UTF-16"),
        (bz2.compress(b"PK\x03\x04" + BIGRAM.encode()), "a zip archive"),
        (BIGRAM[BIGRAM.index("\\") :].encode("utf-16-be"), "text in UTF-16"),
        (b"(\xb5/\xfd", "compressed by zstd"),
        (b"\xf8\x0f" + bytes(6) + b'{"__metadata__":{"kind":"packed LM"', "a file of pack-lm or build-graph"),
        (gzip.compress(gzip.compress(BIGRAM.encode())), "compressed twice"),
        (b"version https://git-lfs.github.com/spec/v1", "a pointer of Git LFS"),
        (b"<!DOCTYPE html>", "an HTML or XML page"),
        (b"PK\x03\x04", "a zip archive"),
    ],
)
def test_other_encodings_are_named(write, content, what):
    with pytest.raises(ValueError, match=f"is {what}, expected a file in UTF-8, plain or compressed by gzip"):
        read_arpa(write(content))
