"""Graphs of a config: built with any tokenizer, or ready-made and checked against the model."""

import logging

import numpy as np
import pytest
import torch
from nemo.collections.asr.parts.submodules.ctc_decoding import CTCBPEDecoding, CTCDecoding
from nemo.collections.common.tokenizers.aggregate_tokenizer import AggregateTokenizer

from nemo_gpu_decoding import build_graph, register
from nemo_gpu_decoding.graph import build
from nemo_gpu_decoding.graph.lexicon import Lexicon
from nemo_gpu_decoding.graph.openfst import read_input_symbols
from nemo_gpu_decoding.graph.store import load_graph, save_graph
from nemo_gpu_decoding.vocabulary import Vocabulary
from tests.graph.toy import write_tlg
from tests.nemo_plugin.usage import LETTERS, spoken, write_arpa
from tests.search.word_graph.models import fst_of

pytest.importorskip("kaldifst")

BLANK = len(LETTERS)
WORDS = ("an", "other", "another", "page", "ann")


@pytest.fixture(autouse=True)
def registered(tmp_path, monkeypatch):
    register()
    monkeypatch.setattr(build, "graph_cache_folder", lambda: tmp_path / "cache")


@pytest.fixture
def arpa(tmp_path):
    return write_arpa(tmp_path / "words.arpa", WORDS)


@pytest.fixture
def graph():
    """The LM's graph for a character model, as the command line builds it."""

    def make(arpa, **options):
        return build_graph(arpa, Vocabulary(tuple(LETTERS), "char"), cache=False, **options)

    return make


def decoding_of(top=None, labels=LETTERS, **wfst):
    wfst = {"beam_width": 30.0, **wfst}
    return CTCDecoding({"strategy": "cuda_wfst", "wfst": wfst, **(top or {})}, labels)


def heard(decoding, text, likely=0.8):
    log_probs = spoken([LETTERS.index(c) for c in text], BLANK + 1, BLANK, likely)
    lengths = torch.tensor([log_probs.shape[1]])
    (found,) = decoding.ctc_decoder_predictions_tensor(log_probs, lengths, return_hypotheses=True)
    return found


def test_character_models_have_a_space_between_words(arpa):
    decoding = decoding_of({"compute_timestamps": True}, arpa_lm_path=arpa)
    found = heard(decoding, "another page")
    assert found.text == "another page"
    # a blank follows each letter; the word begins after its space
    assert [(e["start_offset"], e["end_offset"]) for e in found.timestamp["word"]] == [(0, 13), (16, 23)]
    assert [(w.first_token, w.end_token) for w in found.words] == [(0, 7), (8, 12)]
    assert heard(decoding, "an other page").text == "an other page"
    assert heard(decoding, "paqe an").text == "page an"


def test_words_are_joined_by_nemos_word_separator(arpa, tmp_path):
    decoding = decoding_of({"word_seperator": "|"}, arpa_lm_path=arpa)
    assert heard(decoding, "an other page").text == "an|other|page"
    arpa = write_arpa(tmp_path / "words.arpa", ["ab", "c"])
    decoding = decoding_of({"word_seperator": ""}, labels=["a", "b", "c"], arpa_lm_path=arpa)
    assert decoding.ctc_decoder_predictions_tensor(spoken([0, 1, 2, 0, 1], 4, 3))[0].text == "abcab"


def test_open_vocabulary_of_characters_spells_words(arpa):
    costs = {"unknown_word_cost": 0.0, "unknown_piece_cost": 0.5}
    decoding = decoding_of(arpa_lm_path=arpa, open_vocabulary_decoding=True, **costs)
    assert heard(decoding, "an xyz page", likely=0.99).text == "an xyz page"


class WordPieces:
    """What NeMo's decoding asks of a tokenizer of WordPiece models."""

    pieces = ("[UNK]", "pa", "##ge", "two", "##s")
    vocab = pieces
    tokenizer = type("", (), {"vocab_size": 5, "get_vocab": lambda: dict.fromkeys(WordPieces.pieces)})
    supported_punctuation = ()

    def ids_to_tokens(self, ids):
        return [self.pieces[i] for i in ids]

    def tokens_to_text(self, tokens):
        return " ".join(tokens).replace(" ##", "")

    def ids_to_text(self, ids):
        return self.tokens_to_text(self.ids_to_tokens(ids))

    def text_to_ids(self, text):
        return {"page": [1, 2], "pages": [1, 2, 4], "two": [3], "page two": [1, 2, 3]}.get(text, [0])


def test_word_pieces_are_joined_and_timed(tmp_path):
    arpa = write_arpa(tmp_path / "words.arpa", ["two", "page", "pages", "unspelled"])
    cfg = {"strategy": "cuda_wfst", "wfst": {"arpa_lm_path": arpa, "beam_width": 30.0}}
    decoding = CTCBPEDecoding({**cfg, "compute_timestamps": True}, WordPieces())
    found = decoding.ctc_decoder_predictions_tensor(spoken([3, 1, 2, 4, 1, 2], 6, 5), return_hypotheses=True)[0]
    assert found.text == "two pages page"
    assert [(e["start_offset"], e["end_offset"]) for e in found.timestamp["word"]] == [(0, 1), (2, 7), (8, 11)]


def test_aggregate_tokenizers_take_the_language_of_the_lm(ctc_model, assets):
    tokenizer = AggregateTokenizer({"en": ctc_model.tokenizer, "es": ctc_model.tokenizer})
    wfst = {"arpa_lm_path": str(assets / "lm" / "word3.arpa"), "beam_width": 30.0}

    def tokens_with(**more):
        decoding = CTCBPEDecoding({"strategy": "cuda_wfst", "wfst": {**wfst, **more}}, tokenizer)
        ids = [128 + i for i in ctc_model.tokenizer.text_to_ids("page two")]
        (found,) = decoding.ctc_decoder_predictions_tensor(spoken(ids, 257, 256), return_hypotheses=True)
        return found.text, found.y_sequence.tolist() == ids

    assert tokens_with(source_lang="es") == ("page two", True)
    with pytest.raises(ValueError, match=r"wfst\.source_lang is None.* one of en, es"):
        tokens_with()
    with pytest.raises(ValueError, match=r"wfst\.source_lang is 'fr'.* one of en, es"):
        tokens_with(source_lang="fr")


def test_words_that_the_model_cannot_spell_are_an_error_of_the_change(arpa, ctc_model, assets):
    with pytest.raises(ValueError, match=r"wfst\.source_lang is 'en', which is for models with one"):
        heard(decoding_of(arpa_lm_path=arpa, source_lang="en"), "an")
    with pytest.raises(ValueError, match=r"phrase 'Acme' has the character 'A'"):
        heard(decoding_of(arpa_lm_path=arpa, added_words=["Acme"]), "an")
    cfg = {"strategy": "cuda_wfst", "wfst": {"arpa_lm_path": str(assets / "lm" / "tok3.arpa")}}
    with pytest.raises(ValueError, match=r"tok3\.arpa is an LM over tokens"):
        ctc_model.change_decoding_strategy(cfg, verbose=False)


def test_added_words_are_found(arpa, tmp_path):
    assert heard(decoding_of(arpa_lm_path=arpa), "an acme page").text != "an acme page"
    assert heard(decoding_of(arpa_lm_path=arpa, added_words=["acme"]), "an acme page").text == "an acme page"
    names = tmp_path / "names.txt"
    names.write_text("acme gadget\t2.0\n\nbox\n")
    from_file = decoding_of(arpa_lm_path=arpa, added_words=str(names))
    assert heard(from_file, "acme gadget box page").text == "acme gadget box page"


@pytest.mark.parametrize(("phrase", "ignore_case", "text"), [("Page", True, "page"), ("Acme", True, "acme")])
def test_boosted_words_are_added_in_a_case_that_the_model_can_spell(arpa, phrase, ignore_case, text):
    decoding = decoding_of(arpa_lm_path=arpa, boosting_tree={"key_phrases_list": [phrase], "ignore_case": ignore_case})
    assert heard(decoding, text).text == text
    assert phrase not in decoding.decoding.decoder().graph.words


def test_graph_file_and_its_folder_give_the_same_result(arpa, graph, tmp_path):
    expected = heard(decoding_of(arpa_lm_path=arpa), "an othar page")
    folder = tmp_path / "built"
    save_graph(graph(arpa), folder / "words.graph")
    for path in (folder, folder / "words.graph"):
        found = heard(decoding_of(wfst_lm_path=str(path)), "an othar page")
        assert (found.text, found.score) == (expected.text, expected.score)
    save_graph(graph(arpa), folder / "other.graph")
    with pytest.raises(ValueError, match=r"wfst\.wfst_lm_path is the folder .* 2 files \*\.graph"):
        heard(decoding_of(wfst_lm_path=str(folder)), "an")


def test_built_graph_is_kept_at_the_given_path(arpa, tmp_path):
    kept = tmp_path / "kept.graph"
    first = heard(decoding_of(arpa_lm_path=arpa, wfst_lm_path=str(kept)), "an othar page")
    assert load_graph(kept).name == arpa
    second = heard(decoding_of(wfst_lm_path=str(kept)), "an othar page")
    assert (second.text, second.score) == (first.text, first.score)


@pytest.mark.parametrize("topology", ["compact", "normal", "minimal"])
def test_openfst_files_equal_built_graphs(arpa, graph, tmp_path, topology):
    """T o L o G is told from L o G by its blanks; a file without symbols needs its words.txt."""
    lg = graph(arpa)
    words = tmp_path / "words.txt"
    words.write_text("".join(f"{word} {label}\n" for label, word in enumerate(lg.words)))
    tlg = tmp_path / "TLG.fst"
    write_tlg(fst_of(lg), topology, BLANK, BLANK, tlg)
    found = heard(decoding_of(wfst_lm_path=str(tlg), words_path=str(words)), "an other page")
    expected = heard(decoding_of(arpa_lm_path=arpa, topology=topology), "an other page")
    assert found.text == expected.text == "an other page"
    assert found.score == pytest.approx(expected.score, abs=1e-3)
    with pytest.raises(ValueError, match=r"wfst\.words_path is not set, expected the words\.txt of"):
        heard(decoding_of(wfst_lm_path=str(tlg)), "an")
    wrong = decoding_of(wfst_lm_path=str(tlg), words_path=str(words), topology="compact")
    with pytest.raises(ValueError, match=r"wfst\.topology is 'compact', but .* reads the blank"):
        heard(wrong, "an")


def symbols_file(lg, path, inputs, outputs):
    """L o G with symbol tables, as NeMo's `mkgraph_ctc_ov` writes its files."""
    import kaldifst

    from nemo_gpu_decoding.graph.openfst import write_fst

    write_fst(fst_of(lg), path)
    fst = kaldifst.StdVectorFst.read(str(path))
    for name, symbols in (("input_symbols", inputs), ("output_symbols", outputs)):
        table = kaldifst.SymbolTable()
        for label, symbol in enumerate(symbols):
            table.add_symbol(symbol=symbol, key=label)
        setattr(fst, name, table)
    fst.write(str(path))
    return str(path)


def test_symbols_of_another_model_are_refused(arpa, graph, tmp_path):
    lg = graph(arpa)
    ours = ["<eps>", *("<space>" if c == " " else c for c in LETTERS), "<blk>", "#0"]
    path = symbols_file(lg, tmp_path / "LG.fst", ours, lg.words)
    assert read_input_symbols(path)
    assert heard(decoding_of(wfst_lm_path=path), "an other page").text == "an other page"
    shuffled = symbols_file(lg, tmp_path / "o.fst", [ours[0], *ours[2:-2], "a", *ours[-2:]], lg.words)
    with pytest.raises(ValueError, match=r"another tokenizer.*column 0 is 'b' there and 'a'"):
        heard(decoding_of(wfst_lm_path=shuffled), "an")
    shorter = symbols_file(lg, tmp_path / "s.fst", [*ours[:-3], "<blk>", "#0"], lg.words)
    with pytest.raises(ValueError, match=rf"has its blank in column {BLANK - 1}, expected {BLANK}"):
        heard(decoding_of(wfst_lm_path=shorter), "an")


def test_nemos_open_vocabulary_graphs_are_refused(arpa, graph, tmp_path):
    lg = graph(arpa)
    outputs = ["#1" if word == "other" else word for word in lg.words]
    path = symbols_file(lg, tmp_path / "LG.fst", ["<eps>", *LETTERS], outputs)
    with pytest.raises(ValueError, match=r"between marks '#1' as NeMo's open vocabulary"):
        heard(decoding_of(wfst_lm_path=path), "an")


def test_graph_of_another_model_is_refused(arpa, tmp_path):
    save_graph(build_graph(arpa, Vocabulary(("b", "a", *LETTERS[2:]), "char"), cache=False), tmp_path / "other.graph")
    with pytest.raises(ValueError, match=r"another tokenizer than the model's: 'an' is spelled 'bn'"):
        heard(decoding_of(wfst_lm_path=str(tmp_path / "other.graph")), "an")
    larger = Lexicon({word: ((n, BLANK + 1),) for n, word in enumerate(WORDS)}, BLANK + 2)
    save_graph(build_graph(arpa, larger, cache=False), tmp_path / "larger.graph")
    with pytest.raises(ValueError, match=rf"reads column {BLANK + 1}, expected 0 \.\. {BLANK}"):
        heard(decoding_of(wfst_lm_path=str(tmp_path / "larger.graph")), "an")


def test_closed_graph_and_other_files_are_refused(arpa, graph, tmp_path):
    save_graph(graph(arpa), tmp_path / "words.graph")
    options = {"wfst_lm_path": str(tmp_path / "words.graph"), "open_vocabulary_decoding": True}
    with pytest.raises(ValueError, match=r"wfst\.open_vocabulary_decoding is true, but"):
        heard(decoding_of(**options), "an")
    (tmp_path / "TLG.fst").write_bytes(np.random.default_rng(0).bytes(100))
    with pytest.raises(ValueError, match=r"TLG\.fst is not a binary OpenFst file"):
        heard(decoding_of(wfst_lm_path=str(tmp_path / "TLG.fst")), "an")


def test_phrases_that_a_ready_made_graph_lacks_are_left_out_with_a_warning(arpa, graph, tmp_path, caplog):
    caplog.set_level(logging.WARNING, "nemo_gpu_decoding")
    save_graph(graph(arpa), tmp_path / "words.graph")
    tree = {"key_phrases_list": ["acme", "other"]}
    decoding = decoding_of(wfst_lm_path=str(tmp_path / "words.graph"), boosting_tree=tree)
    assert heard(decoding, "an other").text == "an other"
    assert "1 of 2 phrases left out: the graph has not all words of 'acme'" in caplog.text
