"""`nemo-gpu-decoding build-lm`: estimates an n-gram LM over words, or over the tokens of a model.

The LM is that of a text, or the internal LM of a transducer.
"""

from __future__ import annotations

import gzip
import json
import sys
from codecs import BOM_UTF8
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from omegaconf import MISSING
from tqdm import tqdm

from nemo_gpu_decoding.cli.build_graph import vocabulary_of_file, vocabulary_of_model
from nemo_gpu_decoding.cli.decoding import existing_file, writable_file
from nemo_gpu_decoding.fusion.ngram import nemo_symbol

if TYPE_CHECKING:
    from nemo_gpu_decoding.lm.arpa import Arpa
    from nemo_gpu_decoding.vocabulary import Vocabulary

MANIFEST_SUFFIXES = (".json", ".jsonl")

EXAMPLES = (
    "text=corpus.txt out=word.arpa order=3",
    "text=[news.txt.gz,talks.txt] out=word.arpa.gz order=4 min_counts=[1,1,2]",
    "text=corpus.txt out=token.arpa order=6 model=model.nemo",
    "text=train.json out=source.arpa order=2 model=model.nemo",
    "internal=true out=source.arpa model=rnnt.nemo",
)


@dataclass
class BuildLMOptions:
    """Options of `build-lm`."""

    # Text, plain or gzipped, UTF-8, one sentence per line: a file or a list [a.txt,b.txt.gz]. Of NeMo manifests
    # (.json, .jsonl) the field text is read. The text is not normalised: convert it to the letter case and spelling of
    # the model's transcripts first.
    text: Any = None
    # Instead of text: the LM that an RNN-T or TDT model has learnt, a bigram over its tokens, estimated from its
    # prediction network. Subtract it as source_lm if the training text is not available.
    internal: bool = False
    # Output file: ARPA, gzipped if the name ends in .gz.
    out: str = MISSING
    # Order of the LM (length of the longest n-grams), 1 .. 10. For words 3 or 4 is usual, for tokens 6 or more.
    # null: 3; the internal LM is a bigram.
    order: int | None = None
    # Minimum count of n-grams, by order; the last number holds for all higher orders. The LM omits rarer n-grams.
    # [1,1,2] is lmplz's --prune 0 0 1.
    min_counts: Any = 1
    # Model (a .nemo file, or the name of a pretrained one) over whose tokens the LM is estimated, for flexctc_beam,
    # alsd_pp and aes_pp. The file has the encoding of NeMo's own LMs. null: an LM over words, for word graphs.
    model: str | None = None
    # The language of the text, for models with one tokenizer per language.
    source_lang: str | None = None
    # Instead of the model: its SentencePiece model (*.model), or a text file with one piece per line.
    tokenizer: str | None = None

    def __post_init__(self) -> None:
        if self.model is not None and self.tokenizer is not None:
            raise ValueError("give model=... or tokenizer=FILE, not both")
        if self.source_lang is not None and self.model is None:
            raise ValueError(f"source_lang is {self.source_lang!r}, which needs model=...")
        if (self.text is None) != self.internal:
            raise ValueError(
                f"text is {self.text} and internal is {self.internal}, expected one of text=FILE and internal=true"
            )
        if self.internal and self.model is None:
            raise ValueError("internal is True, which needs model=...")
        if self.internal and (self.order not in (None, 2) or self.min_counts != 1):
            raise ValueError(
                f"order is {self.order} and min_counts is {self.min_counts}, expected neither with internal=true: "
                "the internal LM is a bigram that is not counted"
            )


OPTIONS = BuildLMOptions


def run(options: BuildLMOptions) -> int:
    """Estimate and write the LM, with a progress bar and the report on stderr."""
    out = writable_file("out", options.out)
    arpa = internal_lm_of(str(options.model)) if options.internal else lm_of_text(options)

    from nemo_gpu_decoding.lm.estimate import write_arpa

    write_arpa(arpa, out)
    counted = " + ".join(str(len(block.symbols)) for block in arpa.orders)
    print(f"{counted} n-grams written to {out}", file=sys.stderr)
    return 0


def internal_lm_of(name: str) -> Arpa:
    """The internal LM of a transducer."""
    from nemo_gpu_decoding.nemo_plugin.model import Model
    from nemo_gpu_decoding.search.transducer.internal_lm import internal_lm

    head: Any = Model.load(name, device="cpu").head("rnnt")
    return internal_lm(head.networks())


def lm_of_text(options: BuildLMOptions) -> Arpa:
    """The LM of the texts, over words or tokens."""
    texts = [options.text] if isinstance(options.text, str) else list(options.text)
    files = [existing_file("text", file) for file in texts]
    counts = options.min_counts
    min_counts = [counts] if isinstance(counts, int) else list(counts)

    from nemo_gpu_decoding.lm.estimate import estimate_ngram_lm

    vocabulary = None
    if options.model is not None:
        vocabulary = vocabulary_of_model(options.model, options.source_lang, head=None)
    elif options.tokenizer is not None:
        vocabulary = vocabulary_of_file(options.tokenizer)
    lines = sentences(files, vocabulary)
    symbols = None if vocabulary is None else [nemo_symbol(token) for token in range(len(vocabulary))]
    order = 3 if options.order is None else options.order
    return estimate_ngram_lm(lines, order, symbols=symbols, min_counts=min_counts)


def sentences(files: Sequence[str], vocabulary: Vocabulary | None) -> Iterator[list[str]]:
    """The words of each non-empty line, or the tokens that spell them, with a progress bar on stderr."""
    from nemo_gpu_decoding.lm.estimate import BOS, EOS, UNK

    reserved, found = {UNK, BOS, EOS}, False
    for name in files:
        opened = gzip.open if name.endswith(".gz") else open
        is_manifest = name.removesuffix(".gz").endswith(MANIFEST_SUFFIXES)
        with opened(name, "rb") as file, tqdm(unit=" lines", desc=name, disable=None) as bar:
            for number, line in enumerate(file, 1):
                bar.update()
                if number == 1:
                    line = line.removeprefix(BOM_UTF8)
                try:
                    words = (text_of_row(line) if is_manifest else line.decode("utf-8")).split()
                    if vocabulary is None and (marks := reserved.intersection(words)):
                        raise ValueError(f"has {min(marks)!r}, a symbol of LMs, expected words of a text")
                    if words and vocabulary is not None:
                        words = [nemo_symbol(token) for token in vocabulary.tokenize(" ".join(words))]
                except ValueError as error:
                    raise ValueError(f"text={name}, line {number}: {error}") from error
                if words:
                    found = True
                    yield words
    if not found:
        raise ValueError(f"text={','.join(files)} has no words")


def text_of_row(line: bytes) -> str:
    """The text of a row of a manifest; "" of an empty line.

    Raises:
        ValueError: the row is no JSON object with a `text`.
    """
    row = json.loads(line) if line.strip() else {"text": ""}
    if not isinstance(row, dict) or not isinstance(row.get("text"), str):
        raise ValueError("has no text, expected a row of a NeMo manifest: a JSON object with the field text")
    return str(row["text"])
