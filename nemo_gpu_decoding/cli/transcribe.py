"""`nemo-gpu-decoding transcribe`: audio files to text with any strategy."""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Iterable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple, TextIO, cast

from omegaconf import DictConfig, OmegaConf

from nemo_gpu_decoding.cli.decoding import (
    DEFAULT_STRATEGY,
    DecodingOptions,
    check_counts,
    check_rescoring,
    decoding_config,
    section_of,
    writable_file,
)
from nemo_gpu_decoding.manifest import Utterance, find_utterances
from nemo_gpu_decoding.metrics import oracle_text, word_errors
from nemo_gpu_decoding.nemo_plugin.register import STRATEGIES

if TYPE_CHECKING:
    from nemo_gpu_decoding.nemo_plugin.model import Model, Transcript

EXAMPLES = (
    "model=model.nemo audio=talk.wav",
    "model=model.nemo audio=recordings/ lm=lm.arpa lm_weight=0.5 phrases=names.txt out=hyps.jsonl",
    "model=model.nemo manifest=dev.json preset=best.yaml timestamps=true n_best=5 beam_size=16",
    "model=hybrid.nemo audio=talk.wav strategy=alsd_pp lm=lm.arpa",
    "model=model.nemo audio=talk.wav strategy=cuda_wfst lm=words.arpa phrases=names.txt",
    "model=model.nemo audio=talk.wav strategy=paged_biglm lm=small.arpa large_lm=large.packed",
    "model=model.nemo audio='*.flac' strategy=greedy_batch",
    "model=model.nemo audio=talk.wav decoding.beam.beam_threshold=12",
)


@dataclass
class TranscribeOptions(DecodingOptions):
    """Options of `transcribe`. What is null keeps the value of the preset, or of NeMo."""

    # What to transcribe: a file, a folder, a pattern in quotes ('*.wav') or a list [a.wav,b.flac].
    audio: Any = None
    # Instead of audio: a NeMo manifest, JSON lines with audio_filepath (relative to the manifest). Lines
    # with `text` are scored: word error rate per line in `out` and in total at the end.
    manifest: str | None = None
    # Write one JSON object per utterance here: audio_filepath, duration, pred_text, score, and where
    # they apply n_best, words (with start, end and confidence), text, wer and oracle_wer: that of the best
    # of the n_best hypotheses, or of the lattice with decoding.wfst.decoding_mode=lattice.
    out: str | None = None
    # Hypotheses returned per utterance (in `out`); by beam searches at most beam_size.
    n_best: int = 1
    # Second pass: an LM that orders the n_best hypotheses: a word n-gram LM (a file of pack-lm, or ARPA), or the
    # name or folder of a causal LM of Hugging Face.
    rescore: str | None = None
    # Weight of its log-probabilities, natural log, >= 0.
    rescore_weight: float = 0.5
    # What stays of the first LM's scores, >= 0; 0 replaces them.
    rescore_lm_share: float = 1.0
    # Start and end of every word in seconds, and its confidence in [0, 1], in `out`.
    timestamps: bool = False
    # The head of a hybrid model: ctc or rnnt. null: the one that the strategy is for; else ctc if the
    # model has it.
    head: str | None = None

    def __post_init__(self) -> None:
        check_counts(self, "n_best", "batch_size")
        check_rescoring(self)
        if self.head not in (None, "ctc", "rnnt"):
            raise ValueError(f"head is {self.head!r}, expected ctc or rnnt")


OPTIONS = TranscribeOptions


def run(options: TranscribeOptions) -> int:
    """Transcribe; text to stdout, JSON lines to `out`, progress and totals to stderr."""
    utterances = find_utterances(options.audio, options.manifest)
    out = writable_file("out", options.out) if options.out else None

    from nemo_gpu_decoding.nemo_plugin.model import Model

    model = Model.load(options.model, device=options.device, verbose=options.verbose)
    config = build_decoding(options, model.default_head)
    model.head(head_of(options, str(config.strategy), model.default_head)).use(config)
    started = time.perf_counter()
    with ExitStack() as stack:
        sink = stack.enter_context(out.open("w", encoding="utf-8")) if out else None
        emitted = list(emit(utterances, _transcripts(model, utterances, options), sink))
    report(utterances, emitted, time.perf_counter() - started, model.device_name)
    return 0


def head_of(options: TranscribeOptions, strategy: str, default: str) -> str:
    """The head of the model that decodes: as asked for, else the one that the strategy is for."""
    if options.head:
        return options.head
    return STRATEGIES[strategy].family if strategy in STRATEGIES else default


def build_decoding(options: TranscribeOptions, default_head: str = "ctc") -> DictConfig:
    """NeMo's decoding section for these options."""
    strategy = options.strategy
    if strategy is None and options.preset is None:
        strategy = DEFAULT_STRATEGY[options.head or default_head]
    config = decoding_config(strategy, options.preset, vars(options))
    if options.n_best > 1:
        section = section_of(str(config.strategy))
        OmegaConf.update(config, f"{section}.return_best_hypothesis", False, force_add=True)
        OmegaConf.update(config, f"{section}.n_best", options.n_best, force_add=True)
    if options.timestamps:
        config.compute_timestamps = True
        OmegaConf.update(config, "confidence_cfg.preserve_word_confidence", True, force_add=True)
    return cast(DictConfig, OmegaConf.merge(config, options.decoding))


class Emitted(NamedTuple):
    """What is left of a transcript for the totals."""

    text: str
    oracle: str | None  # the text with the fewest errors of several, where there are any and a reference


def emit(utterances: Iterable[Utterance], transcripts: Iterable[Transcript], sink: TextIO | None) -> Iterator[Emitted]:
    """Print each text and write its JSON line as soon as it is there."""
    from tqdm import tqdm

    for utterance, transcript in zip(utterances, transcripts, strict=True):
        tqdm.write(transcript.text, file=sys.stdout)
        oracle = oracle_of(utterance.text, transcript)
        if sink:
            sink.write(json.dumps(json_row(utterance, transcript, oracle), ensure_ascii=False) + "\n")
        yield Emitted(transcript.text, oracle)


def json_row(utterance: Utterance, transcript: Transcript, oracle: str | None) -> dict[str, Any]:
    """One line of `out`."""
    row: dict[str, Any] = {
        "audio_filepath": utterance.name,
        "duration": round(utterance.duration, 3),
        "pred_text": transcript.text,
        "score": transcript.score,
    }
    if transcript.n_best:
        row["n_best"] = [{"text": text, "score": score} for text, score in transcript.n_best]
    if transcript.words:
        row["words"] = [vars(word) for word in transcript.words]
    if utterance.text is not None:
        row["text"] = utterance.text
        row["wer"] = round(word_errors([utterance.text], [transcript.text]).wer, 4)
        if oracle is not None:
            row["oracle_wer"] = round(word_errors([utterance.text], [oracle]).wer, 4)
    return row


def oracle_of(reference: str | None, transcript: Transcript) -> str | None:
    """The text of the lattice, or of the n-best list, with the fewest word errors; None if there is neither."""
    if reference is None or (transcript.lattice is None and not transcript.n_best):
        return None
    if transcript.lattice is not None:
        return transcript.lattice.oracle(reference)
    return oracle_text(reference, [text for text, _ in transcript.n_best])


def report(utterances: list[Utterance], emitted: list[Emitted], seconds: float, device: str) -> None:
    """Totals on stderr: RTFx (seconds of audio per second of work) and the word error rate."""
    audio = sum(utterance.duration for utterance in utterances)
    print(
        f"{len(emitted)} utterances, {audio:.1f} s of audio in {seconds:.2f} s on {device}: "
        f"RTFx {audio / max(seconds, 1e-9):.1f}",
        file=sys.stderr,
    )
    scored = [(u.text, found) for u, found in zip(utterances, emitted, strict=True) if u.text is not None]
    if scored:
        references = [reference for reference, _ in scored]
        errors = word_errors(references, [found.text for _, found in scored])
        print(
            f"WER {100 * errors.wer:.2f} % of {errors.words} words "
            f"(sub {errors.substitutions}, del {errors.deletions}, ins {errors.insertions})",
            file=sys.stderr,
        )
        oracles = [found.oracle for _, found in scored if found.oracle is not None]
        if len(oracles) == len(scored):
            print(f"oracle WER {100 * word_errors(references, oracles).wer:.2f} %", file=sys.stderr)


def _transcripts(model: Model, utterances: list[Utterance], options: TranscribeOptions) -> Iterator[Transcript]:
    from tqdm import tqdm

    from nemo_gpu_decoding.search.rescoring import Rescoring, load_scorer

    files = [utterance.path for utterance in utterances]
    second = None
    if options.rescore:
        second = Rescoring(load_scorer(options.rescore), options.rescore_weight, options.rescore_lm_share)
    with tqdm(total=len(files), unit="utt", desc="transcribing", disable=None, file=sys.stderr) as bar:
        for transcript in model.transcribe(files, batch_size=options.batch_size, second=second):
            yield transcript
            bar.update()
