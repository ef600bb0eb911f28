"""n-gram LMs: scores against the definition of back-off and against KenLM; files that do not fit."""

import io
import logging
import math
import random
import tarfile

import numpy as np
import pytest
import torch
import yaml

from nemo_gpu_decoding import cache
from nemo_gpu_decoding.fusion.ngram import load_ngram_lm
from nemo_gpu_decoding.vocabulary import Vocabulary
from tests.assets import ASSETS
from tests.oracles.ngram import arpa_text, log10_prob, random_table

V = 6  # of the made-up LMs
VOCAB_SIZE = 128  # of the shipped ones
LOG_10 = math.log(10)


@pytest.fixture
def load(tmp_path):
    def load_text(text, **options):
        cache._entries.clear()
        path = tmp_path / "lm.arpa"
        path.write_text(text, encoding="utf-8")
        return load_ngram_lm(path, options.pop("vocab_size", V), **options)

    return load_text


def assert_scores_as_defined(lm, table, order, unlisted=(), share=1):
    """Step by step over random token sequences, and at the end of each."""
    draw = random.Random(0)
    for _ in range(40):
        state, history = lm.start_state, ["<s>"] if ("<s>",) in table else []
        for label in (draw.randrange(V) for _ in range(12)):
            symbol = "<unk>" if label in unlisted else str(label)
            weight, state = lm.advance(state, label)
            expected = log10_prob(table, history, symbol, order) * LOG_10
            expected -= math.log(share) if label in unlisted else 0.0
            assert weight == pytest.approx(expected, abs=1e-5)
            history.append(symbol)
            end = log10_prob(table, history, "</s>", order) * LOG_10
            assert lm.arrays.states["final_weight"][state] == pytest.approx(end, abs=1e-5)


@pytest.mark.parametrize("order", [1, 2, 3, 4])
@pytest.mark.parametrize("keep", [0.05, 0.3, 0.9])
def test_scores_are_those_of_the_definition_with_missing_contexts_and_suffixes(load, order, keep):
    """NeMo raises a bare KeyError where the suffix or the context of an n-gram is pruned."""
    table = random_table([str(i) for i in range(V)], order, keep, seed=order)
    assert_scores_as_defined(load(arpa_text(table)), table, order)


def test_implied_contexts_are_added_and_unreachable_ngrams_dropped(load):
    table = {(s,): (-1.0, -0.5) for s in ("<s>", "</s>", *map(str, range(V)))}
    table[("0", "1", "2")] = (-0.25, 0.0)  # neither "0 1" nor "1 2" is listed
    assert_scores_as_defined(load(arpa_text(table)), table, 3)
    table = random_table([str(i) for i in range(V)], 2, 0.4, seed=4)
    odd = {("0", "<s>"): (-99.0, 0.0), ("</s>", "1"): (-0.1, 0.0), ("<s>", "<s>"): (-99.0, 0.0)}
    assert_scores_as_defined(load(arpa_text(table | odd)), table, 2)


@pytest.mark.parametrize("normalize_unk", [True, False])
def test_unk_scores_all_tokens_that_are_not_listed(load, normalize_unk):
    table = random_table(["0", "2", "5"], 3, 0.5, seed=1)
    table[("<unk>",)] = (-2.0, 0.0)
    lm = load(arpa_text(table), normalize_unk=normalize_unk)
    # as in NeMo the context is forgotten after such a token
    for label in (1, 3, 4):
        weight, state = lm.advance(lm.start_state, label)
        backoff = table.get(("<s>",), (0, 0))[1]
        share = math.log(3) if normalize_unk else 0.0
        assert weight == pytest.approx((backoff - 2.0) * LOG_10 - share, abs=1e-5)
        assert state == 0


@pytest.mark.parametrize("normalize_unk", [True, False])
def test_ngrams_with_unk_inside_are_scored(load, normalize_unk):
    """NeMo cannot read these; every unlisted token is an <unk> then."""
    table = random_table(["0", "2", "5", "<unk>"], 3, 0.5, seed=2)
    lm = load(arpa_text(table), normalize_unk=normalize_unk)
    assert_scores_as_defined(lm, table, 3, unlisted=(1, 3, 4), share=3 if normalize_unk else 1)


def test_tokens_not_listed_are_impossible_without_unknown(load):
    lm = load(arpa_text(random_table(["0", "2", "5"], 2, 0.5, seed=1)))
    assert lm.advance(lm.start_state, 1)[0] == -np.inf
    assert np.isfinite(lm.advance(lm.start_state, 2)[0])


@pytest.mark.parametrize(("lacks", "has"), [("<s>", "</s>"), ("</s>", "<s>")])
def test_without_start_symbol_utterances_begin_in_the_root_without_end_symbol_ending_is_free(load, caplog, lacks, has):
    table = random_table([str(i) for i in range(V)], 3, 0.4, seed=3, specials=[has])
    with caplog.at_level(logging.WARNING, "nemo_gpu_decoding"):
        lm = load(arpa_text(table))
    assert f"has no {lacks}" in caplog.text
    if lacks == "<s>":
        assert lm.start_state == 0
        assert_scores_as_defined(lm, table, 3)
    else:
        assert (lm.arrays.states["final_weight"] == 0).all()


# -- how tokens are written --------------------------------------------------------------------------
def test_all_encodings_of_tokens_give_the_same_lm(load):
    ids = [str(i) for i in range(V)]
    table = random_table(ids, 3, 0.4, seed=6)
    pieces = ["▁a", "b", "▁c", "1", "</s", "é"]
    expected = load(arpa_text(table)).fingerprint

    def renamed(names):
        new_name = dict(zip(ids, names, strict=True))
        return arpa_text({tuple(new_name.get(s, s) for s in gram): w for gram, w in table.items()})

    nemo = renamed([chr(i + 100) for i in range(V)])
    assert load(nemo).fingerprint == expected
    assert load(nemo, encoding="nemo").fingerprint == expected
    vocabulary = Vocabulary(tuple(pieces), "bpe")
    assert load(renamed(pieces), vocabulary=vocabulary).fingerprint == expected
    assert load(renamed(pieces), vocabulary=vocabulary, encoding="pieces").fingerprint == expected


def test_ambiguous_encoding_is_an_error(load):
    text = arpa_text(random_table([str(i) for i in range(V)], 2, 0.4, seed=6))
    digits = Vocabulary(tuple("543210"), "char")
    with pytest.raises(ValueError, match="fit the encodings ids and pieces, expected one; set encoding"):
        load(text, vocabulary=digits)
    assert load(text, vocabulary=digits, encoding="ids").num_arcs


def test_error_for_a_word_lm_names_cuda_wfst():
    with pytest.raises(ValueError, match=r"340 of 343 symbols .*'about'.*cuda_wfst") as error:
        load_ngram_lm(ASSETS / "lm" / "word3.arpa", VOCAB_SIZE)
    assert "word3.arpa" in str(error.value)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"encoding": "ids"}, "tried as ids"),
        ({"encoding": "utf-8"}, "encoding is 'utf-8', expected one of auto, nemo, ids, pieces"),
        ({"encoding": "pieces"}, "vocabulary is None"),
        ({"vocabulary": Vocabulary(("a", "b"), "char")}, "vocabulary has 2 pieces, expected vocab_size 128"),
        ({"vocab_size": 0}, "vocab_size is 0"),
        *(
            ({"vocab_size": 100, "encoding": encoding}, r"ids up to 12\d .*expected 0 \.\. 99.*another tokenizer")
            for encoding in ("auto", "nemo")
        ),
    ],
)
def test_bad_arguments_are_named(options, message):
    with pytest.raises(ValueError, match=message):
        load_ngram_lm(ASSETS / "lm" / "tok3.arpa", options.pop("vocab_size", VOCAB_SIZE), **options)


def test_missing_file_and_repeated_ngram_are_named(tmp_path, load, caplog):
    with pytest.raises(FileNotFoundError):
        load_ngram_lm(tmp_path / "none.arpa", V)
    text = arpa_text({(s,): (-1.0, 0.0) for s in ("<s>", "</s>", "0")} | {("0", "0"): (-1.0, 0.0)})
    text = text.replace("ngram 2=1", "ngram 2=2").replace("-1.0\t0 0\n", "-1.0\t0 0\n-2.0\t0 0\n")
    once = text.replace("ngram 2=2", "ngram 2=1").replace("-2.0\t0 0\n", "")
    assert load(text).score([0, 0]) == load(once).score([0, 0])
    assert "lists 2-grams more than once: 1 entries are left out" in caplog.text


def test_unchanged_lm_file_is_loaded_from_the_cache(tmp_path):
    path = tmp_path / "lm.arpa"
    path.write_text(arpa_text(random_table([str(i) for i in range(V)], 2, 0.4, seed=7)))
    first = load_ngram_lm(path, V)
    assert load_ngram_lm(path, V) is first
    assert load_ngram_lm(path, V, normalize_unk=False) is not first
    path.write_text(arpa_text(random_table([str(i) for i in range(V)], 3, 0.4, seed=7)))
    assert load_ngram_lm(path, V).fingerprint != first.fingerprint


# -- NeMo's files, without NeMo ------------------------------------------------------------------------
def write_nemo(path, config, tensors):
    weights = io.BytesIO()
    torch.save(tensors, weights)
    with tarfile.open(path, "w") as archive:
        for name, content in (
            ("./model_config.yaml", yaml.safe_dump(config).encode()),
            ("./model_weights.ckpt", weights.getvalue()),
        ):
            member = tarfile.TarInfo(name)
            member.size = len(content)
            archive.addfile(member, io.BytesIO(content))
    return path


def bigram_tensors():
    """Over {a, b}: p(a) p(b) p(</s>) and p(b | <s>), with the padding that NeMo appends."""
    return {
        "arcs_weights": torch.tensor([-1.0, -2.0, -0.5, 0, 0]),
        "ilabels": torch.tensor([0, 1, 1, 0, 0], dtype=torch.int32),
        "to_states": torch.tensor([2, 3, 3, 0, 0], dtype=torch.int32),
        "start_end_arcs": torch.tensor([[0, 2], [2, 3], [0, 0], [0, 0]], dtype=torch.int32),
        "backoff_to_states": torch.zeros(4, dtype=torch.int32),
        "backoff_weights": torch.tensor([0.0, -0.25, -0.125, 0.0]),
        "final_weights": torch.tensor([-3.0, -10000.0, -10000.0, -0.75]),
    }


CONFIG = {"vocab_size": 2, "num_states": 4, "num_arcs": 3, "max_order": 2, "separate_bos_state": True}


def test_reads_nemo_files_without_checksums_too(tmp_path):
    lm = load_ngram_lm(write_nemo(tmp_path / "lm.nemo", CONFIG, bigram_tensors()), 2)
    assert lm.start_state == 1
    assert lm.arrays.states["final_weight"].tolist() == [-3.0, -3.25, -3.125, -0.75]
    assert lm.score([1]) == -0.5 - 0.75
    assert lm.score([0, 1], final=False) == (-0.25 - 1.0) + (-0.125 - 2.0)
    torch.serialization.set_crc32_options(False)
    try:
        path = write_nemo(tmp_path / "lm.nemo", CONFIG, bigram_tensors())
    finally:
        torch.serialization.set_crc32_options(True)
    assert load_ngram_lm(path, 2).score([1]) == -0.5 - 0.75


def test_nemo_file_of_another_kind_or_vocabulary_is_refused(tmp_path):
    path = write_nemo(tmp_path / "lm.nemo", CONFIG, bigram_tensors())
    with pytest.raises(ValueError, match="vocab_size 2, expected 3"):
        load_ngram_lm(path, 3)
    with pytest.raises(ValueError, match=r"EncDecCTCModelBPE.*expected an n-gram LM"):
        load_ngram_lm(ASSETS / "models" / "self_ctc.nemo", VOCAB_SIZE)
    path.write_text("hello")
    with pytest.raises(ValueError, match=r"is not a readable \.nemo archive"):
        load_ngram_lm(path, V)
    with tarfile.open(path, "w"):
        pass
    with pytest.raises(ValueError, match=r"it has no model_config\.yaml"):
        load_ngram_lm(path, V)


@pytest.mark.parametrize("name", ["arcs_weights", "ilabels", "to_states", "backoff_weights", "final_weights"])
def test_changed_bit_of_a_nemo_file_is_detected(tmp_path, name):
    """`torch.load` would read other scores without a word."""
    tensors = bigram_tensors()
    path = write_nemo(tmp_path / "lm.nemo", CONFIG, tensors)
    content, own = bytearray(path.read_bytes()), tensors[name].numpy().tobytes()
    assert content.count(own) == 1
    content[content.index(own)] ^= 1
    path.write_bytes(content)
    with pytest.raises(ValueError, match=r"lm\.nemo is not a readable .*data/\d in .* does not match its checksum"):
        load_ngram_lm(path, 2)


# -- KenLM as the oracle -------------------------------------------------------------------------------
@pytest.mark.parametrize("name", ["tok3.arpa", "tok6.arpa"])
def test_scores_equal_kenlm(name):
    kenlm = pytest.importorskip("kenlm")
    path = ASSETS / "lm" / name
    lm, model = load_ngram_lm(path, VOCAB_SIZE, normalize_unk=False), kenlm.Model(str(path))
    draw = random.Random(0)
    arcs = lm.arrays.arcs
    for _ in range(20):
        state, before, after = lm.start_state, kenlm.State(), kenlm.State()
        model.BeginSentenceWrite(before)
        for _ in range(30):
            own = arcs[lm.arrays.states["arc_begin"][state] : lm.arrays.states["arc_end"][state]]
            # mostly along listed n-grams, to reach the long contexts
            likely = len(own) and draw.random() < 0.7
            label = int(draw.choice(own["label"])) if likely else draw.randrange(VOCAB_SIZE)
            weight, state = lm.advance(state, label)
            assert weight == pytest.approx(model.BaseScore(before, chr(label + 100), after) * LOG_10, abs=1e-4)
            end = model.BaseScore(after, "</s>", kenlm.State()) * LOG_10
            assert lm.arrays.states["final_weight"][state] == pytest.approx(end, abs=1e-4)
            before, after = after, before
