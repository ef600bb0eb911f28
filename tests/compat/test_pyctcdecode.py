"""`compat.pyctcdecode` against all alignments of short utterances, scored by pyctcdecode's definition."""

import copy
import itertools
import lzma
import math
import pickle
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch

from nemo_gpu_decoding.compat.alphabet import Alphabet
from nemo_gpu_decoding.compat.language_model import LanguageModel
from nemo_gpu_decoding.compat.pyctcdecode import BeamSearchDecoderCTC, OutputBeam, _Call, build_ctcdecoder
from nemo_gpu_decoding.compat.search import SKIPPED, TokenSearch, likely_of, log_probs_of
from tests.oracles.ngram import arpa_text, log10_prob, random_table

CHARACTERS, PIECES = [" ", "a", "b", ""], ["▁a", "▁b", "a", "b", ""]
WIDE = {"beam_width": 4000, "beam_prune_logp": -400.0, "token_min_logp": -500.0}
WORDS = ("a", "b", "ab", "bb")
ORDER = 2  # with longer n-grams, back-off in a graph may lead to more likely contexts


def log_softmax(logits):
    return torch.as_tensor(logits).log_softmax(-1).numpy()


def random_logits(frames, columns, seed):
    return np.random.default_rng(seed).normal(0, 2, (frames, columns))


def sequences(log_probs, labels, joined=max):
    """Pieces -> log-prob of their best alignment, or `joined` of all."""
    scores = {}
    for path in itertools.product(range(len(labels)), repeat=len(log_probs)):
        tokens = [label for n, label in enumerate(path) if n == 0 or label != path[n - 1]]
        pieces = tuple(labels[token] for token in tokens if labels[token])
        score = sum(log_probs[t][label] for t, label in enumerate(path))
        scores[pieces] = joined(scores[pieces], score) if pieces in scores else score
    return scores


def text_of(pieces):
    return " ".join("".join(pieces).replace("▁", " ").split())


def best_alignments(log_probs, labels, joined=max):
    """Text -> log-prob of its best token sequence; words of BPE pieces begin with "▁"."""
    texts = {}
    for pieces, score in sequences(log_probs, labels, joined).items():
        if not pieces or "▁" not in "".join(labels) or pieces[0].startswith("▁"):
            texts[text_of(pieces)] = max(texts.get(text_of(pieces), -np.inf), score)
    return texts


def lm_score(
    table, words, *, alpha, beta, offset=-10.0, unigrams=None, hotwords=(), weight=0.0, boundary=True, before=()
):
    """What LM, beta and hotwords add to the score of a text."""
    history, total = [*(["<s>"] if boundary else []), *before], 0.0
    for word in words:
        symbol = word if (word,) in table else "<unk>"
        log10 = log10_prob(table, history, symbol, ORDER)
        if symbol == "<unk>" or (unigrams is not None and word not in unigrams):
            log10 += offset
        total += alpha * math.log(10) * log10 + beta + weight * (word in hotwords)
        history.append(symbol)
    return total + (alpha * math.log(10) * log10_prob(table, history, "</s>", ORDER) if boundary else 0.0)


@pytest.fixture(scope="module")
def lm(tmp_path_factory):
    """A random LM with n-grams below their back-off estimates, and its file; <unk> is too unlikely for its words."""
    table = {
        ngram: (prob - 6.0 * (ngram[-1] == "<unk>"), backoff)
        for ngram, (prob, backoff) in random_table([*WORDS, "<unk>"], ORDER, 0.4, seed=5).items()
    }
    path = tmp_path_factory.mktemp("lm") / "random.arpa"
    path.write_text(arpa_text(table))
    return table, path


CASES = {
    "plain": {},
    "weights": {"alpha": 1.3, "beta": -0.7, "offset": -8.0},
    "no LM weight": {"alpha": 0.0},
    "unigrams": {"unigrams": ["a", "bb"]},
    "hotwords": {"hotwords": ["ab", "a"], "weight": 4.0},
    "unknown hotwords": {"hotwords": ["aab", "ba b"], "weight": 9.0},
    "no boundaries": {"boundary": False},
}


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("labels", [CHARACTERS, PIECES], ids=["characters", "bpe"])
def test_beams_and_scores_are_those_of_all_texts(lm, labels, case):
    table, path = lm
    options = {"alpha": 0.5, "beta": 1.5, "offset": -10.0, "boundary": True} | CASES[case]
    phrases, weight = options.pop("hotwords", []), options.pop("weight", 0.0)
    hotwords = [word for phrase in phrases for word in phrase.split()]
    decoder = build_ctcdecoder(
        labels,
        path,
        options.get("unigrams"),
        options["alpha"],
        options["beta"],
        options["offset"],
        options["boundary"],
    )
    for seed in range(3):
        logits = random_logits(5, len(labels), seed)
        acoustic = best_alignments(log_softmax(logits), labels)
        expected = {
            text: score + lm_score(table, text.split(), hotwords=hotwords, weight=weight, **options)
            for text, score in acoustic.items()
        }
        ranked = sorted(expected, key=lambda text: -expected[text])
        beams = decoder.decode_beams(logits, hotwords=phrases, hotword_weight=weight, **WIDE)
        assert decoder.decode(logits, hotwords=phrases, hotword_weight=weight, **WIDE) == beams[0].text == ranked[0]
        # unknown words have one spelling per sequence of words
        known = [beam.text for beam in beams if set(beam.text.split()) <= set(WORDS)]
        assert known[:10] == [text for text in ranked if set(text.split()) <= set(WORDS)][:10]
        for beam in beams:
            assert beam.lm_score == pytest.approx(expected[beam.text], abs=1e-3)
            assert beam.logit_score == pytest.approx(acoustic[beam.text], abs=1e-3)


def test_utterance_in_parts_has_the_lm_state_of_the_whole(lm):
    table, path = lm
    decoder = build_ctcdecoder(CHARACTERS, path, unk_score_offset=-10.0)
    first = decoder.decode_beams(random_logits(6, 4, 3), **WIDE)[:6]
    assert any(len(beam.text.split()) > 1 for beam in first)
    logits = random_logits(5, 4, 8)
    acoustic = best_alignments(log_softmax(logits), CHARACTERS)
    for beam in first:
        before = [word if word in WORDS else "<unk>" for word in beam.text.split()]
        expected = {
            text: score + lm_score(table, text.split(), alpha=0.5, beta=1.5, before=before)
            for text, score in acoustic.items()
        }
        found = decoder.decode_beams(logits, lm_start_state=beam.last_lm_state, **WIDE)
        assert found[0].text == max(expected, key=expected.__getitem__)
        assert found[0].lm_score == pytest.approx(expected[found[0].text], abs=1e-3)
        assert all(0 <= start < end <= 5 for _, (start, end) in found[0].text_frames)


def test_without_an_lm_alignments_add_up():
    decoder = build_ctcdecoder(["▁a", "b", ""])
    for seed in range(4):
        logits = random_logits(5, 3, seed)
        expected = best_alignments(log_softmax(logits), ["▁a", "b", ""], np.logaddexp)
        best = decoder.decode_beams(logits, **WIDE)[0]
        if not best.text.startswith("b"):
            assert best.text == max(expected, key=expected.__getitem__)
            assert best.logit_score == best.lm_score == pytest.approx(expected[best.text], abs=1e-4)


@pytest.mark.parametrize("labels", [CHARACTERS, PIECES], ids=["characters", "bpe"])
@pytest.mark.parametrize("hotwords", [["ab"], ["a", "ab", "abb"], ["ba b", "aa"]])
def test_hotwords_without_an_lm_are_whole_words(labels, hotwords):
    decoder, weight = build_ctcdecoder(labels), 3.0
    words = {word for phrase in hotwords for word in phrase.split()}
    for seed in range(3):
        logits = random_logits(5, len(labels), seed)
        expected = {}
        for pieces, score in sequences(log_softmax(logits), labels, np.logaddexp).items():
            spoken = "".join(pieces)
            listed = spoken.split("▁")[1:] if labels is PIECES else spoken.split()  # words that "▁" begins
            score += weight * sum(word in words for word in listed)
            expected[text_of(pieces)] = max(expected.get(text_of(pieces), -np.inf), score)
        beams = decoder.decode_beams(logits, hotwords=hotwords, hotword_weight=weight, **WIDE)
        assert {beam.text: beam.lm_score for beam in beams} == pytest.approx(expected, abs=1e-3)


def test_without_an_lm_a_text_alone_recombines():
    """Of the texts with the same last token, only the best goes on."""
    log_probs = torch.as_tensor(log_softmax(random_logits(12, 4, 2))).float()
    alone, several = TokenSearch(3, 50, -30.0, 1), TokenSearch(3, 50, -30.0, 20)
    (whole,) = several.decode(log_probs)
    several._params = alone._params
    (nbest,) = several.decode(log_probs)
    last = [path.tokens[-1:].tolist() for path in nbest.paths]
    assert 2 < len(last) == len(set(map(tuple, last))) < len(whole.paths)
    assert nbest.best.score <= whole.best.score + 1e-4
    (best,) = alone.decode(log_probs)
    assert best.best.tokens.tolist() == nbest.best.tokens.tolist()


@pytest.mark.parametrize("has_lm", [True, False])
def test_hotwords_with_other_characters_are_ignored(lm, has_lm, caplog):
    decoder, logits = build_ctcdecoder(CHARACTERS, lm[1] if has_lm else None), random_logits(9, 4, 3)
    options = {"hotword_weight": 6.0, "token_min_logp": -30.0}
    expected = decoder.decode_beams(logits, hotwords=["ab"], **options)
    without = decoder.decode_beams(logits, **options)
    bad = ["ab", "AB", "a2 ab", "", " "]
    assert decoder.decode_beams(logits, hotwords=bad, **options) == expected
    assert caplog.messages == ["hotwords with characters that are no labels are ignored (2): 'AB', 'a2'"]
    assert decoder.decode(logits, hotwords=bad, **options) == expected[0].text
    assert decoder.decode(logits, hotwords=["", "2"], **options) == without[0].text
    lists = [bad, ["AB"], [""], None]
    texts = [expected[0].text, *3 * [without[0].text]]
    assert decoder.decode_batch(None, 4 * [logits], hotwords=lists, **options) == texts
    beams = decoder.decode_beams_batch(None, 4 * [logits], hotwords=lists, **options)
    assert [[b.lm_score for b in own] for own in beams] == [
        [b.lm_score for b in own] for own in (expected, without, without, without)
    ]
    if has_lm:
        state = {"lm_start_state": expected[0].last_lm_state}
        assert decoder.decode_beams(logits, hotwords=bad, **state, **options) == decoder.decode_beams(
            logits, hotwords=["ab"], **state, **options
        )
    assert caplog.messages[1:] == ["hotwords with characters that are no labels are ignored (1): '2'"]


def test_words_that_the_labels_cannot_spell_are_named(tmp_path, caplog):
    path = tmp_path / "capitals.arpa"
    path.write_text(arpa_text(random_table(["A", "B", "ab", "b", "<unk>"], 2, 0.5, seed=1)))
    decoder, logits = build_ctcdecoder(CHARACTERS, path), random_logits(5, 4, 1)
    for _ in range(2):
        decoder.decode(logits)
        decoder.decode(logits, hotwords=["ab"])
    (record,) = caplog.records
    assert "2 of 5 words have no spelling, e.g. A, B, and are left out" in record.getMessage()


def test_weights_change_after_a_call(lm):
    decoder = build_ctcdecoder(CHARACTERS, lm[1], ["a", "bb"])
    logits, weights = random_logits(5, 4, 1), {"alpha": 1.2, "beta": -0.5, "unk_score_offset": -3.0}
    before = decoder.decode_beams(logits, **WIDE)
    for name, value in weights.items():
        decoder.reset_params(**{name: value})
        expected = build_ctcdecoder(CHARACTERS, lm[1], ["a", "bb"], **{name: value}).decode_beams(logits, **WIDE)
        assert before != decoder.decode_beams(logits, **WIDE) == expected
        decoder.reset_params(alpha=0.5, beta=1.5, unk_score_offset=-10.0)
    assert decoder.decode_beams(logits, **WIDE) == before


@pytest.mark.parametrize("has_lm", [True, False])
def test_utterances_of_a_batch_have_their_hotwords(lm, has_lm):
    decoder = build_ctcdecoder(CHARACTERS, lm[1] if has_lm else None)
    batch = [random_logits(9, 4, seed) for seed in range(3)]
    lists, options = [["bb"], None, ["a b", "ab"]], {"hotword_weight": 8.0, "token_min_logp": -30.0}
    alone = [decoder.decode_beams(one, hotwords=own, **options) for one, own in zip(batch, lists, strict=True)]
    assert decoder.decode_batch(None, batch, hotwords=lists, **options) == [beams[0].text for beams in alone]
    together = decoder.decode_beams_batch(None, batch, hotwords=lists, **options)
    assert [[b.lm_score for b in own] for own in together] == [[b.lm_score for b in own] for own in alone]
    assert together != decoder.decode_beams_batch(None, batch, **options)
    with pytest.raises(ValueError, match=r"hotwords is '2 lists', expected .* one for each of the 3 utterances"):
        decoder.decode_batch(None, batch, hotwords=lists[:2])
    with pytest.raises(ValueError, match="hotwords is 'bb', expected a list of words"):
        decoder.decode_batch(None, batch, hotwords=["bb", None, ["ab"]])


def test_logits_log_probs_and_probabilities(lm):
    decoder = build_ctcdecoder(CHARACTERS, lm[1])
    logits = random_logits(9, 4, 1)
    (expected, *_) = decoder.decode_beams(logits)
    for form in log_softmax(logits), np.exp(log_softmax(logits)), logits.astype(np.float32), torch.from_numpy(logits):
        (found, *_) = decoder.decode_beams(form)
        assert found.text == expected.text
        assert found.lm_score == pytest.approx(expected.lm_score, abs=1e-4)


@pytest.mark.parametrize("labels", [["a", "", "b", "<pad>"], ["a", "b", "[PAD]"], ["a", "b"]])
def test_log_probs_have_the_blank_last(labels):
    alphabet = Alphabet.build_alphabet(labels)
    logits = np.random.default_rng(0).normal(40, 9, (20, len(alphabet.labels))).astype(np.float32)
    logits[3, :2] = -np.inf
    expected = torch.from_numpy(logits).double().log_softmax(-1)
    blanks = [column for column, label in enumerate(alphabet.labels) if label == ""]
    tokens = [column for column in range(len(alphabet.labels)) if column not in blanks]
    blank = expected[:, blanks].logsumexp(-1, keepdim=True)
    found = log_probs_of(logits, "logits", alphabet)
    assert found == pytest.approx(torch.cat([expected[:, tokens], blank], 1).numpy(), abs=1e-5)
    for value in (np.nan, np.inf):
        logits[5, 1] = value
        with pytest.raises(ValueError, match=rf"logits\[5, 1\] is {value}"):
            log_probs_of(logits, "logits", alphabet)


def test_unlikely_tokens_are_skipped_but_the_likeliest_of_a_frame():
    values = np.float32([[-1, -6, -0.5], [-9, -7, -8]])
    assert likely_of(values, -5.0).tolist() == [[-1, SKIPPED, -0.5], [SKIPPED, -7, SKIPPED]]
    assert likely_of(np.float32([[-50, -1]]), -np.inf).tolist() == [[SKIPPED, -1]]


def test_a_long_text_is_that_of_the_best_beam(lm):
    decoder = build_ctcdecoder(CHARACTERS, lm[1])
    logits = random_logits(3000, 4, 3)
    logits[:2, 1] = logits[2:4, 2] = 30
    for state in (None, decoder.decode_beams(logits[:9])[0].last_lm_state):
        best = decoder.decode_beams(logits, beam_width=20, lm_start_state=state)[0]
        assert best.text.startswith("ab")
        assert decoder.decode(logits, beam_width=20, lm_start_state=state) == best.text


@pytest.mark.parametrize("labels", [CHARACTERS, PIECES], ids=["characters", "bpe"])
def test_a_text_of_few_likely_tokens_is_that_of_the_best_beam(lm, labels):
    """The only likely token may begin no word, so that the search takes one below token_min_logp."""
    decoder, rng = build_ctcdecoder(labels, lm[1]), np.random.default_rng(0)
    for _ in range(40):
        logits = rng.normal(0, 1, (6, len(labels)))
        logits[np.arange(6), rng.integers(len(labels), size=6)] += 20
        logits[rng.random(logits.shape) < 0.1] += 19
        assert decoder.decode(logits) == decoder.decode_beams(logits)[0].text


def test_the_graph_follows_the_boundaries_and_the_alphabet(lm):
    """One LM serves other alphabets and options later; its last graph must not."""
    model, alphabets = (
        LanguageModel(lm[1]),
        [Alphabet.build_alphabet(CHARACTERS), Alphabet.build_alphabet(["b", "a", " ", ""])],
    )
    found = []
    for alphabet in alphabets:
        for boundary in (True, False):
            model.reset_params(score_boundary=boundary)
            found.append(model.weighted_graph(alphabet))
            fresh = LanguageModel(lm[1], score_boundary=boundary).weighted_graph(alphabet)
            assert all(map(np.array_equal, found[-1].arrays, fresh.arrays))
    assert len({graph.arrays.arcs.tobytes() for graph in found}) == 4


def test_a_copy_has_its_own_lm(lm):
    decoder = build_ctcdecoder(CHARACTERS, lm[1], ["a", "b"], alpha=0.8, lm_score_boundary=False)
    logits = random_logits(9, 4, 2)
    expected = decoder.decode_beams(logits)
    copied = copy.deepcopy(decoder)
    decoder.reset_params(alpha=0.1)
    decoder.cleanup()
    assert copied.decode_beams(logits) == pickle.loads(pickle.dumps(copied)).decode_beams(logits) == expected


def test_words_that_no_path_allows_are_found(tmp_path):
    """The LM has no <unk>, and the utterance is none of its words."""
    path = tmp_path / "closed.arpa"
    path.write_text(arpa_text(random_table(["ab", "b"], 2, 0.5, seed=1)))
    logits = np.full((4, 4), -20.0)
    for frame, label in enumerate([1, 3, 1, 2]):
        logits[frame, label] = 20.0
    assert isinstance(build_ctcdecoder(CHARACTERS, path).decode(logits), str)


def test_the_blank_may_be_any_column(lm):
    order = [3, 1, 0, 2]
    decoder, other = build_ctcdecoder(CHARACTERS, lm[1]), build_ctcdecoder([CHARACTERS[i] for i in order], lm[1])
    wav2vec2 = build_ctcdecoder(["<pad>", "a", "|", "b"], lm[1])
    logits = random_logits(9, 4, 6)
    assert decoder.decode(logits) == other.decode(logits[:, order]) == wav2vec2.decode(logits[:, order])


def test_saved_decoder_is_loaded_again(lm, tmp_path):
    (packed := tmp_path / "lm.xz").write_bytes(lzma.compress(Path(lm[1]).read_bytes()))
    decoder = build_ctcdecoder(CHARACTERS, packed, ["a", "b"], alpha=0.8, beta=0.3, lm_score_boundary=False)
    (folder := tmp_path / "saved").mkdir()
    decoder.save_to_dir(folder)
    loaded = BeamSearchDecoderCTC.load_from_dir(folder)
    logits = random_logits(9, 4, 2)
    assert loaded.decode_beams(logits) == decoder.decode_beams(logits)
    decoder.reset_params(alpha=0.1, lm_score_boundary=True)
    assert loaded.decode_beams(logits) != decoder.decode_beams(logits)


def test_folder_of_pyctcdecode_is_loaded(tmp_path_factory, tmp_path):
    pyctcdecode = pytest.importorskip("pyctcdecode")
    path = tmp_path_factory.mktemp("lm") / "all.arpa"
    path.write_text(arpa_text(random_table([*WORDS, "<unk>"], ORDER, 1.0, seed=2)))
    pyctcdecode.build_ctcdecoder(CHARACTERS, str(path), ["a", "bb"], alpha=0.8).save_to_dir(str(tmp_path))
    loaded = BeamSearchDecoderCTC.load_from_dir(tmp_path)
    expected = BeamSearchDecoderCTC(Alphabet(CHARACTERS, False), LanguageModel(path, ["a", "bb"], alpha=0.8))
    logits = random_logits(9, 4, 2)
    assert loaded.decode_beams(logits) == expected.decode_beams(logits)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"beam_width": 0}, "beam_width is 0, expected"),
        ({"beam_prune_logp": 0.0}, "beam_prune_logp is 0.0, expected a finite number < 0"),
        ({"beam_prune_logp": None}, "beam_prune_logp is None, expected a finite number < 0"),
        ({"token_min_logp": math.nan}, "token_min_logp is nan"),
        ({"token_min_logp": "x"}, "token_min_logp is 'x', expected a number"),
        ({"lm_start_state": 3}, "lm_start_state is 3, expected a LMState"),
        ({"hotwords": "ab"}, "hotwords is 'ab', expected a list of words"),
        ({"hotwords": [b"ab"]}, "hotwords is .* expected a list of words"),
        ({"hotword_weight": math.inf}, "hotword_weight is inf"),
    ],
)
def test_arguments_are_refused_by_name(options, message):
    with pytest.raises(ValueError, match=message):
        build_ctcdecoder(CHARACTERS).decode(random_logits(3, 4, 0), **options)


def test_wrong_inputs_are_refused(lm):
    decoder = build_ctcdecoder(CHARACTERS, lm[1], alpha=-1.0)
    for labels, taken in (
        (CHARACTERS, r"'' \(column 3\)"),
        ([" ", "a", "", "<pad>"], r"'' \(column 2\) and '<pad>' \(column 3\)"),
        ([" ", "a", "b"], "a column after the labels, which lack <pad>"),
    ):
        with pytest.raises(ValueError, match=rf"shape \(3, 5\), expected \[T, 4\]: .*; taken for the blank: {taken}"):
            build_ctcdecoder(labels).decode(np.zeros((3, 5)))
    with pytest.raises(ValueError, match=r"alpha is -1\.0"):
        decoder.decode(random_logits(3, 4, 0))
    decoder.reset_params(alpha=0.5)
    with pytest.raises(ValueError, match=r"logits\[0, 0\] is nan, expected a finite value or -inf"):
        decoder.decode(np.full((3, 4), np.nan))
    with pytest.raises(ValueError, match=r"logits is None, expected numbers \[T, 4\]"):
        decoder.decode(None)
    with pytest.raises(ValueError, match=r"logits_list\[1\] has shape \(4,\), expected \[T, 4\]"):
        decoder.decode_batch(None, [np.zeros((3, 4)), np.zeros(4)])
    assert build_ctcdecoder(["<unk>", "▁a", "[UNK]"])._alphabet.pieces == ("▁⁇▁", "▁a", "▁⁇▁")
    with pytest.raises(ValueError, match="labels has 'a' twice"):
        build_ctcdecoder(["a", "b", "a"])


def test_pyctcdecode_interface_works_without_nemo(lm):
    code = (
        "import sys, numpy as np\n"
        "absent = 'nemo', 'lightning', 'pytorch_lightning', 'transformers', 'sentencepiece', 'soundfile', 'kenlm'\n"
        "sys.modules.update(dict.fromkeys(absent))\n"
        "from nemo_gpu_decoding.compat.pyctcdecode import build_ctcdecoder\n"
        "logits = np.eye(4)[[1, 3, 0, 2]] * 20\n"
        f"print(*(build_ctcdecoder({CHARACTERS}, lm).decode(logits) for lm in ({str(lm[1])!r}, None)))"
    )
    done = subprocess.run([sys.executable, "-c", code], check=True, timeout=300, capture_output=True, text=True)
    assert done.stdout.strip() == "a b a b"


@pytest.mark.parametrize(("order", "kept"), [(1, 2), (2, 2), (3, 3), (4, 4)])
def test_pruned_history_and_the_state_of_the_lm_are_as_long_as_the_lm_looks_back(order, kept, tmp_path):
    (tmp_path / "lm.arpa").write_text(arpa_text(random_table(["a", "b"], order, 1.0, seed=0)))
    decoder = build_ctcdecoder(CHARACTERS, str(tmp_path / "lm.arpa"))
    texts = ["a a a b", "b a a b", "a b a b", "b b a b", "a a b b", "a a a a"]
    beams = [OutputBeam(text, None, [], 0.0, -float(n)) for n, text in enumerate(texts)]
    options = _Call(9, -99.0, -5.0, True, (), 0.0, 9)
    assert len(decoder._beams(beams, options)) == len({tuple(text.split()[1 - max(order, 2) :]) for text in texts})
    assert len(decoder._beams(beams, options)) == kept
    (best, *_) = decoder.decode_beams(log_softmax(9 * np.eye(4)[[1, 0, 2, 0, 1, 0, 2, 0, 1]]))
    assert best.text == "a b a b a"
    words = [CHARACTERS[token] for token in best.last_lm_state.tokens]
    assert "".join(words).split() == ["a", "b", "a", "b", "a"][1 - max(order, 2) :]
