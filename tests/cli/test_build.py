"""`build-graph`, `pack-lm`, `build-lm` and `prune-lm`: what is made of text and LMs, and the reports."""

import bz2
import gzip
import json
import lzma
from types import SimpleNamespace

import pytest

from nemo_gpu_decoding.cli.build_graph import step_bar, vocabulary_of
from nemo_gpu_decoding.cli.main import main
from nemo_gpu_decoding.fusion.ngram import load_ngram_lm
from nemo_gpu_decoding.graph.build import BUILD_STEPS, build_graph
from nemo_gpu_decoding.graph.lexicon import Lexicon, OpenVocabulary
from nemo_gpu_decoding.graph.store import load_graph
from nemo_gpu_decoding.lm.arpa import read_arpa
from nemo_gpu_decoding.lm.estimate import estimate_ngram_lm
from nemo_gpu_decoding.lm.pack import pack_arpa_in_memory
from nemo_gpu_decoding.lm.packed import load_packed_lm
from nemo_gpu_decoding.search.transducer.internal_lm import internal_lm
from nemo_gpu_decoding.vocabulary import Vocabulary
from tests.assets import CTC_MODEL, sentencepiece_processor
from tests.graph.toy import LEXICON, PIECES, toy_arpa, toy_lexicon
from tests.oracles.ngram import closed_table, missing_suffixes, write_arpa
from tests.search.transducer.lstm import lstm_networks


@pytest.fixture
def here(tmp_path, monkeypatch):
    """A folder with an LM (one of its words cannot be spelled), a vocabulary and a lexicon."""
    pytest.importorskip("kaldifst")
    monkeypatch.chdir(tmp_path)
    toy_arpa(tmp_path / "lm.arpa", seed=0, words=("a", "ab", "bcd", "zebra"))
    (tmp_path / "pieces.txt").write_text("\n".join(PIECES) + "\n")
    lines = [f"{word} {' '.join(spelling)}" for word, own in LEXICON.items() for spelling in own]
    (tmp_path / "lexicon.txt").write_text("\n".join(lines) + "\n")
    return tmp_path


def build(capsys, *arguments, lm="lm.arpa", tokenizer="pieces.txt"):
    options = [f"lm={lm}", f"tokenizer={tokenizer}", "out=out.graph", "json=true", *arguments]
    assert main(["build-graph", *options]) == 0
    return json.loads(capsys.readouterr().out), load_graph("out.graph")


def test_build_graph_equals_the_library(here, capsys):
    facts, graph = build(capsys)
    assert graph.fingerprint == build_graph("lm.arpa", Vocabulary.from_pieces(PIECES), cache=False).fingerprint
    assert graph.name == str(here / "lm.arpa")
    assert facts["states"] == graph.num_states
    assert facts["arcs"] == graph.num_arcs
    assert facts["n-grams"] == sum(facts["n-grams by order"])
    assert facts["bytes"] == (here / "out.graph").stat().st_size


def test_words_that_cannot_be_spelled_are_counted_listed_and_shown(here, capsys):
    facts, graph = build(capsys, "oov=oov.txt")
    assert facts["LM words without spelling"] == 1
    assert facts["n-grams that end in such a word"] >= 1
    assert (here / "oov.txt").read_text() == "zebra\n"
    assert "zebra" not in graph.words
    assert main(["build-graph", "lm=lm.arpa", "tokenizer=pieces.txt", "out=out.graph"]) == 0
    said = capsys.readouterr()
    for row in ("n-grams", "OOV words, left out", "contexts", "epsilon arcs", "size in MB"):
        assert f"\n{row}" in said.out
    assert "e.g. zebra: oov=FILE lists all" in said.out
    assert "topology is not composed" in said.out
    assert "use it with  transcribe strategy=cuda_wfst lm=out.graph" in said.err


def test_build_graph_uses_the_lexicon(here, capsys):
    toy_arpa(here / "lm.arpa", seed=0)
    facts, graph = build(capsys, "lexicon=lexicon.txt")
    assert graph.fingerprint == build_graph("lm.arpa", toy_lexicon(), cache=False).fingerprint
    assert facts["spellings"] == sum(map(len, LEXICON.values()))


def test_build_graph_with_open_vocabulary_costs(here, capsys):
    facts, graph = build(capsys, "open_vocabulary=true", "unknown_word_cost=1", "unknown_piece_cost=0.5")
    expected = build_graph(
        "lm.arpa", Vocabulary.from_pieces(PIECES), open_vocabulary=OpenVocabulary(1.0, 0.5), cache=False
    )
    assert facts["open vocabulary"]
    assert graph.fingerprint == expected.fingerprint


def test_build_graph_with_added_words(here, capsys):
    (here / "names.txt").write_text("bcd\nabb abba\n")
    facts, graph = build(capsys, "added_words=names.txt")
    assert (facts["added words"], facts["LM words without spelling"]) == (2, 2)  # zebra is one of them
    assert "abb" in graph.words
    assert "abba" not in graph.words
    assert graph.name == str(here / "lm.arpa")


@pytest.mark.nemo
def test_a_model_and_its_tokenizer_make_the_same_graph(assets, tmp_path, monkeypatch, capsys):
    pytest.importorskip("nemo.collections.asr")
    monkeypatch.chdir(tmp_path)
    (tmp_path / "tokenizer.model").write_bytes(sentencepiece_processor().serialized_model_proto())
    lm = assets / "lm" / "word3.arpa"
    facts, graph = build(capsys, lm=lm, tokenizer="tokenizer.model")
    assert main(["build-graph", f"lm={lm}", f"model={CTC_MODEL}", "out=model.graph"]) == 0
    assert load_graph("model.graph").fingerprint == graph.fingerprint
    assert facts["LM words without spelling"] == 0


@pytest.mark.nemo
def test_a_model_with_several_languages_spells_in_one_of_them(monkeypatch):
    pytest.importorskip("nemo.collections.asr")
    from nemo_gpu_decoding.nemo_plugin.model import Model

    several = Vocabulary(("▁a", "▁b"), "bpe", encode_by_language={"de": lambda text: [0], "en": lambda text: [1]})
    head = SimpleNamespace(vocabulary=lambda: several)
    monkeypatch.setattr(Model, "load", lambda *_, **__: SimpleNamespace(head=lambda name: head))
    assert vocabulary_of("m.nemo", None, "en", "ctc").tokenize("b") == [1]
    with pytest.raises(ValueError, match=r"source_lang is None, .* one of de, en"):
        vocabulary_of("m.nemo", None, None, "ctc")


def test_progress_is_reported_once_per_step(here):
    steps = []
    build_graph("lm.arpa", Lexicon.from_pieces([("a", ("▁a",))], PIECES), cache=False, progress=steps.append)
    assert len(steps) == BUILD_STEPS
    with step_bar() as progress:
        for step in steps:
            progress(step)


TOKENS = ["lm=lm.arpa", "tokenizer=pieces.txt", "out=out.graph"]


@pytest.mark.parametrize(
    ("arguments", "problem"),
    [
        (["lm=lm.arpa", "out=x"], "give either model=... or tokenizer=FILE"),
        ([*TOKENS, "model=m.nemo"], "give either model=... or tokenizer=FILE"),
        (["lm=none.arpa", "tokenizer=pieces.txt", "out=x"], "lm=none.arpa is no file here"),
        (["lm=pieces.txt", "tokenizer=pieces.txt", "out=x"], "lmplz -o 3 < text > lm.arpa"),
        (["lm=tokens.arpa", "tokenizer=pieces.txt", "out=x"], "is an LM over tokens ('▁a', '▁b'"),
        (["lm=nemo.arpa", "tokenizer=pieces.txt", "out=x"], "is an LM over tokens ('d', 'e'"),
        (["lm=lm.arpa", "tokenizer=pieces.txt", "out=no/x"], "out=no/x: there is no folder no"),
        (["lm=lm.arpa", "tokenizer=pieces.txt", "out=."], "out=. is a folder"),
        ([*TOKENS, "source_lang=de"], "source_lang is 'de', which needs model=..."),
        ([*TOKENS, "segmentations=0"], "segmentations is 0, expected an integer >= 1"),
        ([*TOKENS, "lexicon=lexicon.txt", "segmentations=2"], "expected 1: the lexicon lists all"),
        ([*TOKENS, "unknown_word_cost=1"], "unknown_word_cost is 1.0, which needs open_vocabulary=true"),
        ([*TOKENS, "open_vocabulary=true", "unknown_word_cost=-1"], "unknown_word_cost is -1.0"),
        (["lm=lm.arpa", "tokenizer=broken.model", "out=x"], "cannot be read as a SentencePiece model"),
        (["lm=lm.arpa", "tokenizer=nemo/vocab.txt", "out=x"], "give tokenizer="),
    ],
)
def test_build_graph_errors_are_named(here, arguments, problem, capsys):
    toy_arpa(here / "tokens.arpa", seed=0, order=1, words=PIECES)
    toy_arpa(here / "nemo.arpa", seed=0, order=1, words=[chr(100 + i) for i in range(len(PIECES))])
    (here / "nemo").mkdir()
    for name in ("broken.model", "broken.model.txt", "nemo/tokenizer.model", "nemo/vocab.txt"):
        (here / name).write_bytes(b"\xff\xfe\xff")
    assert main(["build-graph", *arguments]) == 2
    said = capsys.readouterr().err
    assert problem in said
    assert "Traceback" not in said
    assert not (here / "x").exists()


# ------------------------------------------------------------------------------------------ pack-lm
@pytest.fixture
def with_lm(tmp_path, monkeypatch):
    """A folder with an LM that lacks suffixes."""
    monkeypatch.chdir(tmp_path)
    write_arpa(tmp_path / "lm.arpa", closed_table(seed=2, order=4, keep=0.5))
    return tmp_path


def test_pack_lm_equals_the_library(with_lm, capsys):
    assert main(["pack-lm", "lm=lm.arpa", "out=lm.packed", "json=true"]) == 0
    facts = json.loads(capsys.readouterr().out)
    lm = load_packed_lm(with_lm / "lm.packed")
    assert (lm.arrays.arcs == pack_arpa_in_memory(with_lm / "lm.arpa").arrays.arcs).all()
    assert facts["repaired"] == missing_suffixes(closed_table(seed=2, order=4, keep=0.5)) > 0
    assert facts["ngrams"] == sum(facts["counts"]) == lm.num_arcs
    assert facts["states"] == lm.num_states
    assert facts["num_bytes"] == (with_lm / "lm.packed").stat().st_size
    assert facts["seconds"] > 0


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["lm=none.arpa", "out=lm.packed"], "none.arpa"),
        (["lm=lm.arpa", "out=lm.packed", "layout=exact"], "unknown option 'layout'"),
        (["lm=lm.arpa", "out=lm.packed", "temporary=none"], "temporary=none: there is no such folder"),
        (["lm=bad.arpa", "out=lm.packed"], "line 3: found 'x', expected 'ngram <order>=<count>'"),
    ],
)
def test_pack_lm_errors_take_one_line_and_leave_no_file(with_lm, capsys, arguments, message):
    (with_lm / "bad.arpa").write_text("\\data\\\nngram 1=3\nx\n")
    assert main(["pack-lm", *arguments]) == 2
    error = capsys.readouterr().err
    assert message in error
    assert "Traceback" not in error
    assert not list(with_lm.glob("*packed*"))


# ------------------------------------------------------------------------------- build-lm, prune-lm
TEXT = "the cat sat on the mat\nthe cat sat\n\n  a cat on a mat  \nthe mat\n"


@pytest.fixture
def with_text(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "a.txt").write_text(TEXT)
    (tmp_path / "tokenizer.model").write_bytes(sentencepiece_processor().serialized_model_proto())
    (tmp_path / "b.txt.gz").write_bytes(gzip.compress(b"a cat sat on a cat\n"))
    return tmp_path


@pytest.mark.parametrize("pack", [gzip.compress, lzma.compress, bz2.compress])
def test_build_lm_equals_the_library(with_text, capsys, pack):
    (with_text / "b.txt").write_bytes(pack(b"a cat sat on a cat\n"))
    arguments = ["text=[a.txt,b.txt]", "out=lm.arpa", "order=2", "min_counts=[1,2]"]
    assert main(["build-lm", *arguments]) == 0
    assert "n-grams written to lm.arpa" in capsys.readouterr().err
    lines = [line.split() for line in TEXT.splitlines() if line.split()]
    expected = estimate_ngram_lm([*lines, ["a", "cat", "sat", "on", "a", "cat"]], 2, min_counts=(1, 2))
    found = read_arpa("lm.arpa")
    assert found.symbols == expected.symbols
    for ours, theirs in zip(found.orders, expected.orders, strict=True):
        assert (ours.symbols == theirs.symbols).all()
    assert main(["prune-lm", "lm=lm.arpa", "out=small.arpa.gz", "size=10"]) == 0
    assert sum(len(block.symbols) for block in read_arpa("small.arpa.gz").orders) <= 10
    assert main(["build-graph", "lm=small.arpa.gz", "tokenizer=tokenizer.model", "out=x.graph"]) == 0


def test_build_lm_ignores_byte_order_marks(with_text):
    (with_text / "c.txt").write_bytes(b"\xef\xbb\xbfthe cat\r\n")
    (with_text / "d.txt").write_bytes(b"the cat\n")
    for name in ("c", "d"):
        assert main(["build-lm", f"text=[a.txt,{name}.txt]", f"out={name}.arpa", "order=2"]) == 0
    assert (with_text / "c.arpa").read_text() == (with_text / "d.arpa").read_text()


@pytest.mark.parametrize("name", ["train.json", "train.jsonl.gz"])
def test_build_lm_reads_manifests(with_text, name):
    rows = [json.dumps({"audio_filepath": "a.wav", "text": line}) for line in TEXT.splitlines()] + [""]
    content = "\n".join(rows).encode()
    (with_text / name).write_bytes(gzip.compress(content) if name.endswith(".gz") else content)
    assert main(["build-lm", f"text={name}", "out=manifest.arpa", "order=2"]) == 0
    assert main(["build-lm", "text=a.txt", "out=text.arpa", "order=2"]) == 0
    assert (with_text / "manifest.arpa").read_text() == (with_text / "text.arpa").read_text()


def test_build_lm_writes_the_internal_lm_of_a_transducer(with_text, monkeypatch):
    from nemo_gpu_decoding.nemo_plugin.model import Model

    networks = lstm_networks(9)
    head = SimpleNamespace(networks=lambda: networks, vocabulary=lambda: Vocabulary.from_pieces(("▁a", "b")))
    monkeypatch.setattr(Model, "load", lambda *_, **__: SimpleNamespace(head={"rnnt": head}.__getitem__))
    assert main(["build-lm", "internal=true", "out=internal.arpa", "model=rnnt.nemo"]) == 0
    found, expected = read_arpa("internal.arpa"), internal_lm(networks)
    assert found.symbols == expected.symbols
    assert found.orders[1].log10_probs == pytest.approx(expected.orders[1].log10_probs, abs=1e-5)


def test_build_lm_over_tokens_can_be_fused(with_text):
    arguments = ["text=a.txt", "out=lm.arpa", "order=3", "tokenizer=tokenizer.model"]
    assert main(["build-lm", *arguments]) == 0
    vocabulary = Vocabulary.from_sentencepiece("tokenizer.model")
    lm = load_ngram_lm("lm.arpa", len(vocabulary))
    for more, order in ([*arguments[::3], "order=null"], 6), ([arguments[0]], 3):
        assert main(["build-lm", *more, "out=usual.arpa"]) == 0
        assert len(read_arpa("usual.arpa").orders) == order
    assert lm.score(vocabulary.tokenize("the cat sat")) > lm.score(vocabulary.tokenize("tea cap set"))


@pytest.mark.parametrize(
    ("command", "message"),
    [
        (["build-lm", "text=none.txt", "out=x.arpa"], "none.txt"),
        (["build-lm", "text=bad.txt", "out=x.arpa"], "bad.txt, line 1: 'utf-8' codec"),
        (["build-lm", "text=a.txt", "out=x.arpa", "order=0"], "order is 0, expected an integer 1 .. 10"),
        (["build-lm", "text=a.txt", "out=x.arpa", "model=a", "tokenizer=b"], "not both"),
        (["build-lm", "text=a.txt", "out=x.arpa", "source_lang=de"], "which needs model="),
        (["build-lm", "out=x.arpa"], "expected one of text=FILE and internal=true"),
        (["build-lm", "text=a.txt", "internal=true", "out=x.arpa"], "expected one of text=FILE and internal=true"),
        (["build-lm", "internal=true", "out=x.arpa"], "internal is True, which needs model="),
        (["build-lm", "internal=true", "model=m", "out=x.arpa", "order=3"], "order is 3 and min_counts is 1"),
        (["prune-lm", "lm=a.txt", "out=x.arpa"], "give either size=... or threshold=..."),
        (["prune-lm", "lm=a.txt", "out=x.arpa", "size=5"], "a.txt"),
    ],
)
def test_build_lm_errors_take_one_line(with_text, capsys, command, message):
    (with_text / "bad.txt").write_bytes(b"\xff\xfe\n")
    (with_text / "empty.txt").write_text(" \n\n")
    (with_text / "worse.json").write_text("fine\n")
    assert main(command) == 2
    error = capsys.readouterr().err
    assert message in error
    assert "Traceback" not in error
    assert not (with_text / "x.arpa").exists()


def test_an_lm_over_tokens_belongs_to_its_tokenizer(with_text):
    assert main(["build-lm", "text=a.txt", "out=lm.arpa", "order=2", "tokenizer=tokenizer.model"]) == 0
    assert main(["prune-lm", "lm=lm.arpa", "out=small.arpa", "size=200"]) == 0
    vocabulary = Vocabulary.from_sentencepiece("tokenizer.model")
    other = Vocabulary.from_pieces((*vocabulary.pieces[:-1], "other"))
    for name in ("lm.arpa", "small.arpa"):
        load_ngram_lm(name, len(vocabulary), vocabulary=vocabulary)
        with pytest.raises(ValueError, match=f"{name} was made for the tokenizer .*, expected {other.fingerprint}"):
            load_ngram_lm(name, len(other), vocabulary=other)


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("bad.txt", b"the cat\n\xff\xfe\n", "bad.txt, line 2: 'utf-8' codec"),
        ("marks.txt", b"the cat\n<s> bad </s>\n", "marks.txt, line 2: has '</s>', a symbol of LMs"),
        ("bad.json", b'{"text": "the cat"}\n{"txt": "fine"}\n', "bad.json, line 2: has no text, expected a row of"),
        (
            "pieces.txt",
            "the cat\nthe \u4e2d cat\n".encode(),
            "pieces.txt, line 2: phrase 'the \u4e2d cat' has the char",
        ),
    ],
)
def test_build_lm_warns_of_lines_that_it_leaves_out(with_text, caplog, name, content, message):
    (with_text / name).write_bytes(content)
    (with_text / "good.txt").write_bytes(b"the cat\n")
    tokenizer = ["tokenizer=tokenizer.model"] if name == "pieces.txt" else []
    assert main(["build-lm", f"text={name}", "out=bad.arpa", "order=2", *tokenizer]) == 0
    assert main(["build-lm", "text=good.txt", "out=good.arpa", "order=2", *tokenizer]) == 0
    assert (with_text / "bad.arpa").read_text() == (with_text / "good.arpa").read_text()
    (warning,) = [message for message in caplog.messages if "left out" in message]
    assert warning.startswith("build-lm: 1 of 2 lines left out: text=")
    assert message in warning
