"""`nemo-gpu-decoding build-graph` builds the word graph of cuda_wfst from a word LM and a model's tokens."""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

from omegaconf import MISSING
from tqdm import tqdm

from nemo_gpu_decoding.checks import FieldError
from nemo_gpu_decoding.cli.decoding import existing_file, writable_file
from nemo_gpu_decoding.container import write_text
from nemo_gpu_decoding.plain_text import format_table, read_lines
from nemo_gpu_decoding.schema import checked_options, option
from nemo_gpu_decoding.vocabulary import Vocabulary

EXAMPLES = (
    "lm=word.arpa model=model.nemo out=word.graph",
    "lm=word.arpa.gz tokenizer=tokenizer.model out=word.graph segmentations=4 oov=oov.txt",
    "lm=word.arpa tokenizer=vocab.txt lexicon=lexicon.txt out=word.graph",
    "lm=word.arpa model=model.nemo out=open.graph open_vocabulary=true json=true",
)


@checked_options
@dataclass
class BuildGraphOptions:
    """Options of `build-graph`."""

    # Word n-gram LM: ARPA, plain or gzipped. `build-lm` or KenLM's lmplz estimates one from text.
    lm: str = MISSING
    # Output file: the graph L o G. It does not contain the CTC topology; the search applies compact, normal or
    # minimal.
    out: str = MISSING
    # The model whose tokens spell the words: a .nemo file, or the name of a pretrained model that NeMo can fetch.
    model: str | None = None
    # The language of the LM, for models with one tokenizer per language.
    source_lang: str | None = option(None, needs="model=...")
    # Instead of the model: its SentencePiece model (*.model), or a text file with one piece per line in the order of
    # the ids. A second column, as in SentencePiece's .vocab, is ignored.
    tokenizer: str | None = None
    # Lexicon that replaces the tokenizer's spellings: a text file with a word and its pieces per line. The graph
    # omits words that the lexicon does not list.
    lexicon: str | None = None
    # Maximum number of spellings per word, >= 1: the tokenizer's, then those with the fewest pieces. More spellings
    # cover more alignments and make the graph larger.
    segmentations: int = option(1, low=1)
    # Text file of words or phrases (the format of boosting lists) whose words are added to the graph. Words that the
    # LM does not list get the probability of <unk>. Boosting works only for words in the graph.
    added_words: str | None = None
    # Also decode words that the LM does not list, piece by piece. The LM must contain <unk>.
    open_vocabulary: bool = False
    # With open_vocabulary: cost of a word that the LM does not list, natural log, >= 0, in addition to that of <unk>.
    unknown_word_cost: float = option(2.0, low=0, needs="open_vocabulary=true")
    # With open_vocabulary: cost of each piece of such a word, natural log, >= 0.
    unknown_piece_cost: float = option(4.0, low=0, needs="open_vocabulary=true")
    # Output file: the words of the LM that the tokens cannot spell, one per line.
    oov: str | None = None
    # Print the report as JSON instead of a table.
    json: bool = False
    # Show NeMo's own messages.
    verbose: bool = False

    def check_rules(self) -> None:
        if (self.model is None) == (self.tokenizer is None):
            raise ValueError("give either model=... or tokenizer=FILE: their tokens spell the words")
        if self.lexicon is not None and self.segmentations > 1:
            expected = "1: the lexicon lists all spellings of its words"
            raise FieldError("segmentations", self.segmentations, expected, "with a lexicon")


OPTIONS = BuildGraphOptions


def run(options: BuildGraphOptions) -> int:
    """Build and write the word graph; print progress to stderr and the report to stdout."""
    lm, out = existing_file("lm", options.lm), writable_file("out", options.out)
    oov = writable_file("oov", options.oov) if options.oov else None
    lexicon_file = existing_file("lexicon", options.lexicon) if options.lexicon else None
    words_file = existing_file("added_words", options.added_words) if options.added_words else None

    from nemo_gpu_decoding.fusion.boosting import BoostingConfig, can_spell
    from nemo_gpu_decoding.fusion.phrases import read_phrases, spelled_phrases
    from nemo_gpu_decoding.graph.build import build_graph, listed_words, spell_words
    from nemo_gpu_decoding.graph.lexicon import Lexicon, OpenVocabulary, beginning_tokens
    from nemo_gpu_decoding.graph.store import save_graph
    from nemo_gpu_decoding.graph.word_boosting import words_of

    began = time.perf_counter()
    phrases = read_phrases(words_file) if words_file else []
    listed = listed_words(lm)  # raises an error for files that are no LM, before a model is loaded
    vocabulary = vocabulary_of(options.model, options.tokenizer, options.source_lang, "ctc", options.verbose)
    added = words_of(spelled_phrases(phrases, lambda phrase: can_spell(phrase, vocabulary, BoostingConfig())))
    if lexicon_file is None:
        track = partial(tqdm, unit="word", desc="spelling", disable=None, file=sys.stderr)
        lexicon = spell_words(lm, vocabulary, options.segmentations, added, track)
    else:
        lexicon = Lexicon.from_file(lexicon_file, vocabulary.pieces)
        lexicon = replace(lexicon, beginning_tokens=beginning_tokens(vocabulary))
    costs = OpenVocabulary(options.unknown_word_cost, options.unknown_piece_cost) if options.open_vocabulary else None
    with step_bar() as progress:
        graph = build_graph(lm, lexicon, open_vocabulary=costs, added_words=added, cache=False, progress=progress)
    save_graph(graph, out)
    if oov:
        left_out = (word for word in dict.fromkeys([*listed, *added]) if word not in graph.word_ids)
        write_text(oov, "".join(f"{word}\n" for word in left_out))
    seconds = round(time.perf_counter() - began, 1)
    facts = {**graph.report, "bytes": out.stat().st_size, "seconds": seconds}
    print(json.dumps(facts, ensure_ascii=False, indent=2) if options.json else report(facts))
    print(f"written to {out}; use it with  transcribe strategy=cuda_wfst lm={out}", file=sys.stderr)
    return 0


def vocabulary_of(
    model: str | None, tokenizer: str | None, language: str | None, head: str | None, verbose: bool = False
) -> Vocabulary:
    """Return the vocabulary in the file `tokenizer` or, if it is None, the vocabulary of a model's head.

    Args:
        language: the language of the tokenizer, for models with one tokenizer per language.
        head: ctc or rnnt; None means the head that the model has.
    """
    if tokenizer is not None:
        return vocabulary_of_file(tokenizer)
    from nemo_gpu_decoding.graph.load import in_language
    from nemo_gpu_decoding.nemo_plugin.model import Model

    loaded = Model.load(str(model), device="cpu", verbose=verbose)
    return in_language(loaded.head(head or loaded.default_head).vocabulary(), language)


def vocabulary_of_file(name: str) -> Vocabulary:
    """Return the vocabulary of a SentencePiece model (*.model) or of a text file with one piece per line."""
    file = Path(existing_file("tokenizer", name))
    if file.suffix == ".model":
        try:
            return Vocabulary.from_sentencepiece(file)
        except (RuntimeError, OSError) as error:
            raise ValueError(f"tokenizer={file} cannot be read as a SentencePiece model: {error}") from error
    sibling = file.with_name("tokenizer.model")
    if file.name == "vocab.txt" and sibling.is_file():
        raise ValueError(
            f"tokenizer={file}: the vocab.txt that NeMo writes beside a SentencePiece model leaves out "
            f"<unk>, so that its lines are not the ids; give tokenizer={sibling}"
        )
    name = f"tokenizer={file}, which is no *.model, expected text with a piece per line"
    pieces = [line.split("\t")[0] for line in read_lines(file, name)]
    if "" in pieces:
        raise ValueError(f"tokenizer={file}, line {pieces.index('') + 1}: no piece, expected one per line")
    try:
        return Vocabulary.from_pieces(pieces)
    except ValueError as error:
        raise ValueError(f"tokenizer={file}: {error}") from error


@contextmanager
def step_bar() -> Iterator[Callable[[str], None]]:
    """Show a progress bar of the graph build; yield a function to call with a step's name when the step begins."""
    from nemo_gpu_decoding.graph.build import BUILD_STEPS

    with tqdm(total=BUILD_STEPS, unit="step", desc="graph", disable=None, file=sys.stderr) as bar:

        def begin(step: str) -> None:
            bar.set_postfix_str(step)
            bar.update()

        yield begin


def report(facts: Mapping[str, Any]) -> str:
    """Return the sizes of a graph as a table; with `json=true` the command prints all facts as JSON instead."""
    oov = facts["LM words without spelling"]
    orders = " + ".join(map(str, facts["n-grams by order"]))
    examples = ", ".join(facts["examples of them"][:5])
    rows = [
        ("n-grams", f"{facts['n-grams']} = {orders}", ""),
        ("words", facts["words"], "and any others" * facts["open vocabulary"]),
        ("added words", facts["added words"], ""),
        ("spellings", facts["spellings"], ""),
        ("OOV words, left out", oov, f"e.g. {examples}: oov=FILE lists all" if oov else ""),
        ("n-grams that end in one", facts["n-grams that end in such a word"], facts["why"]),
        ("contexts", facts["LM contexts"], f"{facts['LM contexts kept']} of them needed"),
        ("states", facts["states"], ""),
        ("arcs", facts["arcs"], "the CTC topology is not composed: the search runs it"),
        ("epsilon arcs", facts["epsilon arcs"], ""),
        ("size in MB", f"{facts['bytes'] / 1e6:.1f}", ""),
        ("seconds", facts["seconds"], ""),
    ]
    return format_table(["what", "found", "remark"], rows)
