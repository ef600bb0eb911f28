"""Make n-gram LMs by the commands `build-lm`, `prune-lm` and `pack-lm`.

`build-lm` estimates an LM over words or over the tokens of a model, from text or from a transducer (its internal LM).
`prune-lm` keeps a subset of the n-grams. `pack-lm` writes the file that paged_biglm maps into memory.
"""

from __future__ import annotations

import json
import sys
from codecs import BOM_UTF8
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

from omegaconf import MISSING
from tqdm import tqdm

from nemo_gpu_decoding.checks import MOST_FAULTS, leave_out
from nemo_gpu_decoding.cli.build_graph import vocabulary_of
from nemo_gpu_decoding.cli.decoding import existing_file, writable_file
from nemo_gpu_decoding.manifest import NO_TEXT
from nemo_gpu_decoding.plain_text import format_table
from nemo_gpu_decoding.schema import checked_options, option

if TYPE_CHECKING:
    from nemo_gpu_decoding.lm.arpa import Arpa
    from nemo_gpu_decoding.vocabulary import Vocabulary


MANIFEST_SUFFIXES = (".json", ".jsonl")


@checked_options
@dataclass
class BuildLMOptions:
    """Options of `build-lm`."""

    # Text, plain or compressed by gzip, xz or bzip2, UTF-8, one sentence per line: a file or a list [a.txt,b.txt.gz].
    # Of NeMo manifests (.json, .jsonl) the field text is read. The text is not normalised: convert it to the letter
    # case and spelling of the model's transcripts first.
    text: Any = None
    # Instead of text: the LM that an RNN-T or TDT model has learnt, a bigram over its tokens, estimated from its
    # prediction network. Subtract it as source_lm if the training text is not available.
    internal: bool = option(False, needs="model=...")
    # Output file: ARPA, gzipped if the name ends in .gz.
    out: str = MISSING
    # Order of the LM (length of the longest n-grams), 1 .. 10. For words 3 or 4 is usual, for tokens 6 or more.
    # null: 3, over tokens 6; the internal LM is a bigram.
    order: int | None = None
    # Minimum count of n-grams, by order; the last number holds for all higher orders. The LM omits rarer n-grams.
    # [1,1,2] is lmplz's --prune 0 0 1.
    min_counts: Any = 1
    # Model (a .nemo file, or the name of a pretrained one) over whose tokens the LM is estimated, for flexctc_beam,
    # alsd_pp and aes_pp. The file has the encoding of NeMo's own LMs. null: an LM over words, for word graphs.
    model: str | None = None
    # The language of the text, for models with one tokenizer per language.
    source_lang: str | None = option(None, needs="model=...")
    # Instead of the model: its SentencePiece model (*.model), or a text file with one piece per line.
    tokenizer: str | None = None

    def check_rules(self) -> None:
        if self.model is not None and self.tokenizer is not None:
            raise ValueError("give model=... or tokenizer=FILE, not both")
        if (self.text is None) != self.internal:
            raise ValueError(
                f"text is {self.text} and internal is {self.internal}, expected one of text=FILE and internal=true"
            )
        if self.internal and (self.order not in (None, 2) or self.min_counts != 1):
            raise ValueError(
                f"order is {self.order} and min_counts is {self.min_counts}, expected neither with internal=true: "
                "the internal LM is a bigram that is not counted"
            )


def build_lm(options: BuildLMOptions) -> int:
    """Estimate an n-gram LM and write it as ARPA file, with progress bar and report on stderr."""
    out = writable_file("out", options.out)
    arpa = internal_lm_of(str(options.model)) if options.internal else lm_of_text(options)

    from nemo_gpu_decoding.lm.estimate import write_arpa

    write_arpa(arpa, out)
    counted = " + ".join(str(len(block.symbols)) for block in arpa.orders)
    print(f"{counted} n-grams written to {out}", file=sys.stderr)
    return 0


def internal_lm_of(name: str) -> Arpa:
    """Estimate the internal LM of a transducer as an n-gram LM over its tokens."""
    from nemo_gpu_decoding.nemo_plugin.model import Model
    from nemo_gpu_decoding.search.transducer.internal_lm import internal_lm

    head: Any = Model.load(name, device="cpu").head("rnnt")
    return replace(internal_lm(head.networks()), tokenizer=head.vocabulary().fingerprint)


def lm_of_text(options: BuildLMOptions) -> Arpa:
    """Estimate an n-gram LM over words or tokens from text files."""
    texts = [options.text] if isinstance(options.text, str) else list(options.text)
    files = [existing_file("text", file) for file in texts]
    counts = options.min_counts
    min_counts = [counts] if isinstance(counts, int) else list(counts)

    from nemo_gpu_decoding.fusion.ngram import nemo_symbol
    from nemo_gpu_decoding.lm.estimate import estimate_ngram_lm

    vocabulary: Vocabulary | None = None
    symbols, order = None, 3
    if options.model is not None or options.tokenizer is not None:
        vocabulary, order = vocabulary_of(options.model, options.tokenizer, options.source_lang, None), 6
        symbols = [nemo_symbol(token) for token in range(len(vocabulary))]
    order = order if options.order is None else options.order
    arpa = estimate_ngram_lm(sentences(files, vocabulary), order, symbols=symbols, min_counts=min_counts)
    return arpa if vocabulary is None else replace(arpa, tokenizer=vocabulary.fingerprint)


def sentences(files: Sequence[str], vocabulary: Vocabulary | None) -> Iterator[list[str]]:
    """Yield each non-empty line as words or tokens, with a progress bar; skip unusable lines with one warning."""
    from nemo_gpu_decoding.fusion.ngram import nemo_symbol
    from nemo_gpu_decoding.lm.arpa import opener_of
    from nemo_gpu_decoding.lm.estimate import BOS, EOS, UNK

    reserved, kept = {UNK, BOS, EOS}, 0
    faults: list[str] = []
    for name in files:
        with open(name, "rb") as start:
            opened = opener_of(start.read(8))
        is_manifest = name.removesuffix(".gz").endswith(MANIFEST_SUFFIXES)
        with opened(name, "rb") as file, tqdm(unit=" lines", desc=name, disable=None) as bar:
            for number, line in enumerate(file, 1):
                bar.update()
                if number == 1:
                    line = line.removeprefix(BOM_UTF8)
                try:
                    words = (text_of_row(line) if is_manifest else line.decode("utf-8")).split()
                    if "\0" in line.decode("utf-8", "replace"):
                        raise ValueError("has the character '\\0', as text in UTF-16; expected UTF-8")
                    if vocabulary is None and (marks := reserved.intersection(words)):
                        raise ValueError(f"has {min(marks)!r}, a symbol of LMs, expected words of a text")
                    if words and vocabulary is not None:
                        words = [nemo_symbol(token) for token in vocabulary.tokenize(" ".join(words))]
                except ValueError as error:
                    faults.append(f"text={name}, line {number}: {error}" if len(faults) < MOST_FAULTS else "")
                    continue
                if words:
                    kept += 1
                    yield words
    leave_out("build-lm", faults, kept, "lines")
    if not kept:
        raise ValueError(f"text={','.join(files)} has no words")


def text_of_row(line: bytes) -> str:
    """Return the `text` of a line of a manifest, or "" for an empty line.

    Raises:
        ValueError: the row is no JSON object with a `text`.
    """
    row = json.loads(line) if line.strip() else {"text": ""}
    if not isinstance(row, dict) or not isinstance(row.get("text"), str):
        raise ValueError("has no text, expected a row of a NeMo manifest: a JSON object with the field text")
    return str(row["text"]) if row["text"].strip() != NO_TEXT else ""


@dataclass
class PruneLMOptions:
    """Options of `prune-lm`."""

    # n-gram LM over words or tokens: ARPA, plain or gzipped. It takes about 150 bytes of memory per n-gram.
    lm: str = MISSING
    # Output file: ARPA, gzipped if the name ends in .gz. Used with the unpruned LM, it saves paged_biglm one of two
    # look-ups per word.
    out: str = MISSING
    # Maximum number of n-grams, of all orders together. All words are kept.
    size: int | None = None
    # Instead of size: n-grams are removed if the perplexity then grows by less than this share, as with SRILM's
    # `ngram -prune`; 1e-8 is usual.
    threshold: float | None = None

    def __post_init__(self) -> None:
        if (self.size is None) == (self.threshold is None):
            raise ValueError("give either size=... or threshold=...")


def prune_lm(options: PruneLMOptions) -> int:
    """Prune an n-gram LM and write it; print the report to stderr."""
    lm, out = existing_file("lm", options.lm), writable_file("out", options.out)

    from nemo_gpu_decoding.lm.arpa import read_arpa
    from nemo_gpu_decoding.lm.estimate import write_arpa
    from nemo_gpu_decoding.lm.prune import prune_ngram_lm

    source = read_arpa(lm)
    small = prune_ngram_lm(source, size=options.size, threshold=options.threshold)
    write_arpa(replace(small, tokenizer=source.tokenizer), out)
    sizes = [" + ".join(str(len(block.symbols)) for block in arpa.orders) for arpa in (source, small)]
    print(f"{sizes[1]} of {sizes[0]} n-grams written to {out}", file=sys.stderr)
    return 0


@dataclass
class PackLMOptions:
    """Options of `pack-lm`."""

    # Word n-gram LM: ARPA, plain or gzipped, of any size, with its n-grams in any sequence.
    lm: str = MISSING
    # Output file. It is renamed into place when it is complete.
    out: str = MISSING
    # Folder for temporary files, about 30 bytes per n-gram. null: the folder of `out`. A fast disk is best, or memory
    # if there is enough (/dev/shm).
    temporary: str | None = None
    # Print the report as JSON instead of a table.
    json: bool = False


def pack_lm(options: PackLMOptions) -> int:
    """Write an ARPA LM as a packed file for paged_biglm; print progress to stderr and the report to stdout."""
    from nemo_gpu_decoding.lm.pack import pack_arpa

    lm, out = existing_file("lm", options.lm), writable_file("out", options.out)
    temporary = options.temporary
    if temporary is not None and not Path(temporary).is_dir():
        raise ValueError(f"temporary={temporary}: there is no such folder")
    packed = pack_arpa(lm, out, temporary=temporary, progress=True)
    facts = {**asdict(packed), "ngrams": packed.num_ngrams}
    print(json.dumps(facts, indent=2) if options.json else _pack_report(facts))
    print(f"written to {out}", file=sys.stderr)
    return 0


def _pack_report(facts: Mapping[str, Any]) -> str:
    """Return the sizes of a packed LM as a table; with `json=true` the command prints all facts as JSON instead."""
    orders = " + ".join(map(str, facts["counts"]))
    per_ngram, speed = facts["num_bytes"] / facts["ngrams"], facts["ngrams"] / facts["seconds"]
    bridged = "n-grams without their suffix (all but the first word): it gets its backed-off score"
    rows = [
        ("n-grams", f"{facts['ngrams']} = {orders}", ""),
        ("repaired", facts["repaired"], bridged if facts["repaired"] else ""),
        ("contexts", facts["states"], ""),
        ("size in MB", f"{facts['num_bytes'] / 1e6:.1f}", f"{per_ngram:.1f} bytes per n-gram"),
        ("seconds", f"{facts['seconds']:.1f}", f"{speed:.0f} n-grams per second"),
    ]
    return format_table(["what", "found", "remark"], rows)


# by name of the command
COMMANDS = {
    "build-lm": SimpleNamespace(
        OPTIONS=BuildLMOptions,
        EXAMPLES=(
            "text=corpus.txt out=word.arpa order=3",
            "text=[news.txt.gz,talks.txt] out=word.arpa.gz order=4 min_counts=[1,1,2]",
            "text=corpus.txt out=token.arpa order=6 model=model.nemo",
            "text=train.json out=source.arpa order=2 model=model.nemo",
            "internal=true out=source.arpa model=rnnt.nemo",
        ),
        run=build_lm,
    ),
    "prune-lm": SimpleNamespace(
        OPTIONS=PruneLMOptions,
        EXAMPLES=("lm=large.arpa.gz out=small.arpa size=100000", "lm=large.arpa.gz out=small.arpa.gz threshold=1e-8"),
        run=prune_lm,
    ),
    "pack-lm": SimpleNamespace(
        OPTIONS=PackLMOptions,
        EXAMPLES=("lm=large.arpa.gz out=large.packed", "lm=large.arpa.gz out=large.packed json=true"),
        run=pack_lm,
    ),
}
