"""`nemo-gpu-decoding build-lm`: estimates an n-gram LM over words, or over the tokens of a model, from text."""

from __future__ import annotations

import gzip
import json
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from omegaconf import MISSING
from tqdm import tqdm

from nemo_gpu_decoding.cli.build_graph import vocabulary_of_file, vocabulary_of_model
from nemo_gpu_decoding.cli.decoding import existing_file, writable_file
from nemo_gpu_decoding.fusion.ngram import nemo_symbol

if TYPE_CHECKING:
    from nemo_gpu_decoding.vocabulary import Vocabulary

MANIFEST_SUFFIXES = (".json", ".jsonl")

EXAMPLES = (
    "text=corpus.txt out=word.arpa order=3",
    "text=[news.txt.gz,talks.txt] out=word.arpa.gz order=4 min_counts=[1,1,2]",
    "text=corpus.txt out=token.arpa order=6 model=model.nemo",
    "text=train.json out=source.arpa order=2 model=model.nemo",
)


@dataclass
class BuildLMOptions:
    """Options of `build-lm`."""

    # Text, plain or gzipped, UTF-8, one sentence per line: a file or a list [a.txt,b.txt.gz]. Of NeMo manifests
    # (.json, .jsonl) the field text is read. The text is not normalised: convert it to the letter case and spelling of
    # the model's transcripts first.
    text: Any = MISSING
    # Output file: ARPA, gzipped if the name ends in .gz.
    out: str = MISSING
    # Order of the LM (length of the longest n-grams), 1 .. 10. For words 3 or 4 is usual, for tokens 6 or more.
    order: int = 3
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


OPTIONS = BuildLMOptions


def run(options: BuildLMOptions) -> int:
    """Estimate and write the LM, with a progress bar and the report on stderr."""
    texts = [options.text] if isinstance(options.text, str) else list(options.text)
    files = [existing_file("text", file) for file in texts]
    out = writable_file("out", options.out)
    counts = options.min_counts
    min_counts = [counts] if isinstance(counts, int) else list(counts)

    from nemo_gpu_decoding.lm.estimate import estimate_ngram_lm, write_arpa

    vocabulary = None
    if options.model is not None:
        vocabulary = vocabulary_of_model(options.model, options.source_lang, head=None)
    elif options.tokenizer is not None:
        vocabulary = vocabulary_of_file(options.tokenizer)
    lines = sentences(files, vocabulary)
    symbols = None if vocabulary is None else [nemo_symbol(token) for token in range(len(vocabulary))]
    arpa = estimate_ngram_lm(lines, options.order, symbols=symbols, min_counts=min_counts)
    write_arpa(arpa, out)
    counted = " + ".join(str(len(block.symbols)) for block in arpa.orders)
    print(f"{counted} n-grams written to {out}", file=sys.stderr)
    return 0


def sentences(files: Sequence[str], vocabulary: Vocabulary | None) -> Iterator[list[str]]:
    """The words of each non-empty line, or the tokens that spell them, with a progress bar on stderr."""
    for name in files:
        opened = gzip.open if name.endswith(".gz") else open
        is_manifest = name.removesuffix(".gz").endswith(MANIFEST_SUFFIXES)
        with opened(name, "rb") as file, tqdm(unit=" lines", desc=name, disable=None) as bar:
            for number, line in enumerate(file, 1):
                bar.update()
                try:
                    words = (text_of_row(line) if is_manifest else line.decode("utf-8")).split()
                    if words and vocabulary is not None:
                        words = [nemo_symbol(token) for token in vocabulary.tokenize(" ".join(words))]
                except ValueError as error:
                    raise ValueError(f"text={name}, line {number}: {error}") from error
                if words:
                    yield words


def text_of_row(line: bytes) -> str:
    """The text of a row of a manifest; "" of an empty line.

    Raises:
        ValueError: the row is no JSON object with a `text`.
    """
    row = json.loads(line) if line.strip() else {"text": ""}
    if not isinstance(row, dict) or not isinstance(row.get("text"), str):
        raise ValueError("has no text, expected a row of a NeMo manifest: a JSON object with the field text")
    return str(row["text"])
