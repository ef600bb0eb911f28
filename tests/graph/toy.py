"""Small word LMs and lexicons with everything that makes graphs hard."""

import itertools
import random
from dataclasses import replace

from nemo_gpu_decoding.graph.lexicon import Lexicon
from nemo_gpu_decoding.graph.openfst import write_fst
from tests.oracles.ngram import Table, arpa_text, random_table

PIECES = ("▁a", "▁b", "b", "c", "d")  # columns 0 .. 4; the blank is column 5
BLANK = len(PIECES)
# "ab" and "abc" share a beginning, "ab" and "AB" a spelling; "cab" has two, "bb" a token twice
LEXICON = {
    "a": [("▁a",)],
    "ab": [("▁a", "b")],
    "AB": [("▁a", "b")],
    "abc": [("▁a", "b", "c")],
    "b": [("▁b",)],
    "bb": [("▁b", "b", "b")],
    "cab": [("▁b", "c"), ("▁b", "d", "d")],
}
WORDS = tuple(LEXICON)


def toy_lexicon() -> Lexicon:
    entries = [(word, spelling) for word, spellings in LEXICON.items() for spelling in spellings]
    return replace(Lexicon.from_pieces(entries, PIECES), beginning_tokens=(0, 1))


def toy_table(*, seed, order=3, keep=0.3, words=WORDS, specials=("<s>", "</s>", "<unk>")) -> Table:
    """A random LM over the words of the lexicon: contexts and suffixes may well be missing."""
    return random_table(words, order, keep, seed, specials)


def toy_arpa(path, **options):
    path.write_text(arpa_text(toy_table(**options)))
    return path


def random_texts(count, *, seed, longest=4):
    rng = random.Random(seed)
    return [tuple(rng.choices(WORDS, k=rng.randint(1, longest))) for _ in range(count)]


def spellings_of(text):
    """All token sequences that spell a text."""
    index = {piece: i for i, piece in enumerate(PIECES)}
    choices = [[tuple(index[p] for p in s) for s in LEXICON[word]] for word in text]
    return [sum(choice, ()) for choice in itertools.product(*choices)]


# ---------------- T o L o G as an FST file, the way NeMo and Kaldi make it, from L o G and a topology
def topology_fst(name, blank_id, vocab_size):
    """T: reads columns + 1, writes token + 1. The blank may be any column."""
    import kaldifst

    fst = kaldifst.StdVectorFst()
    start = fst.add_state()
    fst.start = start
    fst.set_final(start, 0)

    def arc(source, read, write, target):
        fst.add_arc(source, kaldifst.StdArc(read, write, 0, target))

    arc(start, blank_id + 1, 0, start)
    tokens = [v + 1 for v in range(vocab_size + 1) if v != blank_id]
    if name == "minimal":
        for v in tokens:
            arc(start, v, v, start)
    else:
        states = {v: fst.add_state() for v in tokens}
        for v, state in states.items():
            arc(start, v, v, state)
            arc(state, v, 0, state)
            if name == "compact":
                arc(state, 0, 0, start)
                continue
            fst.set_final(state, 0)
            arc(state, blank_id + 1, 0, start)
            for other, target in states.items():
                if other != v:
                    arc(state, other, other, target)
    kaldifst.arcsort(fst, sort_type="olabel")
    return fst


def write_tlg(lg, name, blank_id, vocab_size, path):
    """T o (L o G) to a file; returns it as a kaldifst FST."""
    import kaldifst

    write_fst(lg, path)
    right = kaldifst.StdVectorFst.read(str(path))
    kaldifst.arcsort(right, sort_type="ilabel")
    tlg = kaldifst.compose(topology_fst(name, blank_id, vocab_size), right)
    tlg.write(str(path))
    return tlg
