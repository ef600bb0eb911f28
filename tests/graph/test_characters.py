"""Spellings for character models, in which a space is a token of its own."""

from nemo_gpu_decoding.graph.build import build_graph, tokens_that_begin_words
from nemo_gpu_decoding.graph.lexicon import Lexicon
from nemo_gpu_decoding.vocabulary import Vocabulary

WITH_SPACE = Vocabulary(("a", " ", "b"), "char")
WITHOUT = Vocabulary(("a", "b"), "char")


def test_words_are_spelled_with_and_without_the_space_before_them():
    lexicon = Lexicon.from_vocabulary(["ab", "b"], WITH_SPACE)
    assert lexicon.spellings == {"ab": ((0, 2), (1, 0, 2)), "b": ((2,), (1, 2))}
    assert Lexicon.from_vocabulary(["ab"], WITHOUT).spellings == {"ab": ((0, 1),)}


def test_tokens_that_begin_words():
    assert tokens_that_begin_words(WITH_SPACE) == [1]
    assert tokens_that_begin_words(WITHOUT) == [0, 1]


def test_the_graph_reads_the_space(tmp_path):
    arpa = tmp_path / "lm.arpa"
    arpa.write_text("\\data\\\nngram 1=3\n\n\\1-grams:\n-99 <s>\n-1 </s>\n-1 ab\n\n\\end\\\n")
    read = build_graph(arpa, WITH_SPACE, cache=False).arrays.arcs["label"]
    assert set(read.tolist()) == {0, 1, 2}
