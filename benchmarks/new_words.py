"""Words of a request that the LM lacks: found in a graph with a closed vocabulary, an open one, and with a large LM.

The requests of all utterances have all words of the references that the LM lacks. With `--help`, the command lists the
options.
"""

from __future__ import annotations

import json
import sys
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
from torch.nn.utils.rnn import pad_sequence

from benchmarks.sources import read_speech, speech_lexicon, speech_text
from benchmarks.tasks import PADDED, spelling_vocabulary
from nemo_gpu_decoding import (
    CudaWFST,
    Fusion,
    PagedBigLM,
    PagedBigLMConfig,
    Request,
    WFSTConfig,
    build_graph,
    build_word_boosting,
    estimate_ngram_lm,
    pack_arpa_in_memory,
    write_arpa,
)
from nemo_gpu_decoding.cli.main import guarded, run_program
from nemo_gpu_decoding.graph.lexicon import OpenVocabulary
from nemo_gpu_decoding.graph.unknown_words import Speller, with_piece_labels
from nemo_gpu_decoding.metrics import phrase_score, word_errors
from nemo_gpu_decoding.plain_text import format_table

PROGRAM = "python -m benchmarks.new_words"
SUMMARY = "words of requests that the LM lacks, in closed and open graphs"
EXAMPLES = ("bonuses=[6,10]",)


@dataclass
class NewWordsOptions:
    """Options of the table. Without model, manifest and text, the speech is that of assets/hard_speech."""

    # A .nemo file.
    model: str | None = None
    # NeMo manifest of the test set, with model.
    manifest: str | None = None
    # Text of the LMs, one sentence per line, with model.
    text: str | None = None
    # Least number of occurrences of a word in the LMs.
    min_count: int = 1
    # Bonuses of a word, natural log, > 0.
    bonuses: list[float] = field(default_factory=lambda: [4.0, 8.0, 12.0])
    # Weight of the LMs.
    lm_weight: float = 0.5
    # Beam of the search.
    beam: float = 17.0


OPTIONS = NewWordsOptions


def run(options: NewWordsOptions) -> int:
    """Print the table: word errors, and new words found, missed and false."""
    rows, texts, vocabulary, sentences = speech_of(options)
    counts = Counter(word for sentence in sentences for word in sentence)
    listed = [word for word, count in counts.items() if count >= options.min_count]
    lacking = sorted({word for text in texts for word in text.split() if counts[word] < options.min_count})
    print(f"{len(texts)} utterances, {len(lacking)} words that the LM lacks: {' '.join(lacking)}")
    inputs, lengths = pad_sequence(rows, batch_first=True, padding_value=PADDED), [len(row) for row in rows]
    table = []
    for name, decoder in decoders(sentences, listed, vocabulary, options):
        for bonus in (0.0, *options.bonuses):
            request, fusion = None, Fusion(lm_weight=options.lm_weight)
            if bonus:
                speller = Speller(vocabulary, options.lm_weight)
                words = dict.fromkeys(lacking, bonus)
                request = Request(build_word_boosting(words, decoder.opened_graph, speller=speller), 1.0)
            own = decoder.with_options(decoder.config, fusion)
            found = [nbest.best.text for nbest in own.decode(inputs, lengths, [request] * len(texts))]
            score = phrase_score(texts, found, lacking)
            wer = f"{100 * word_errors(texts, found).wer:.2f}"
            right = score.true_positives, score.false_negatives, score.false_positives
            table.append([name, bonus or "no request", wer, *right, f"{score.fscore:.3f}"])
    print(format_table(["decoder", "bonus", "WER %", "found", "missed", "false", "F-score"], table))
    return 0


def speech_of(options: NewWordsOptions) -> tuple[list[Any], list[str], Any, list[list[str]]]:
    """Log-probs and reference of each utterance, the vocabulary of the model, and the sentences for the LMs."""
    if options.model is None:
        tensors, metadata = read_speech("emissions")
        rows = tensors["log_probs"].float().split(tensors["lengths"].tolist())
        return list(rows), json.loads(metadata["texts"]), spelling_vocabulary(*speech_lexicon()), speech_text()
    import torch

    from nemo_gpu_decoding.manifest import read_manifest, references_of
    from nemo_gpu_decoding.nemo_plugin.model import Model

    if options.manifest is None or options.text is None:
        raise ValueError("model is given without manifest or text, expected all three")
    utterances = read_manifest(Path(options.manifest))
    head = Model.load(options.model, device="cpu").head("ctc")
    encoded = head.encoded([utterance.audio for utterance in utterances])
    rows = [torch.from_numpy(np.asarray(own.inputs)) for own in encoded]
    sentences = [line.split() for line in Path(options.text).read_text(encoding="utf-8").splitlines() if line.split()]
    return rows, references_of(utterances), head.vocabulary(), sentences


def decoders(
    sentences: Sequence[Sequence[str]], words: Sequence[str], vocabulary: Any, options: NewWordsOptions
) -> Iterator[tuple[str, CudaWFST]]:
    """Decoders in the graph of a 2-gram, and with a 3-gram as the large LM."""
    size = len(vocabulary)
    config: dict[str, Any] = {"beam": options.beam, "threads": 1}
    with TemporaryDirectory() as folder:
        small, large = Path(folder) / "small.arpa", Path(folder) / "large.arpa"
        for path, order in ((small, 2), (large, 3)):
            write_arpa(estimate_ngram_lm(sentences, order, symbols=words, min_counts=(1, 1, 2)[:order]), path)
        closed = build_graph(small, vocabulary, cache=False)
        opened = with_piece_labels(build_graph(small, vocabulary, open_vocabulary=OpenVocabulary(), cache=False))
        lms = pack_arpa_in_memory(large), pack_arpa_in_memory(small)
    for kind, graph in (("open", opened), ("closed", closed)):
        yield f"cuda_wfst, {kind}", CudaWFST(graph, size, size, WFSTConfig(**config), pieces=vocabulary.pieces)
    for kind, graph in (("open", opened), ("closed", closed)):
        for composition in ("lazy", "let"):
            own = PagedBigLMConfig(**config, composition=composition)
            decoder = PagedBigLM(graph, size, size, *lms, own, pieces=vocabulary.pieces)
            yield f"paged_biglm {composition}, {kind}", decoder


def main() -> int:
    """The exit code of the program."""
    return guarded(PROGRAM, lambda: run_program(PROGRAM, SUMMARY, sys.modules[__name__], sys.argv[1:]), __name__)


if __name__ == "__main__":
    sys.exit(main())
