"""`make demo`: the effect of a beam, an LM and boosted phrases on the speech shipped with the source tree.

    python scripts/demo.py models=[ctc] show=10 beam_size=16

A second process compiles the slowest decoders in the meantime; compiled code is cached.
"""

from __future__ import annotations

import copy
import json
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kaldialign import align

from nemo_gpu_decoding.cli.decoding import load_phrase_file
from nemo_gpu_decoding.cli.dev_set import DevSet, PaddedBatch, Score, encode
from nemo_gpu_decoding.cli.grid import Point, at_point
from nemo_gpu_decoding.cli.main import guarded
from nemo_gpu_decoding.cli.options import help_text, parse_options
from nemo_gpu_decoding.cli.tune_plot import FORMATS
from nemo_gpu_decoding.container import write_text, written_whole
from nemo_gpu_decoding.extras import require
from nemo_gpu_decoding.jit import cache_folder
from nemo_gpu_decoding.manifest import Utterance, read_manifest
from nemo_gpu_decoding.metrics import PhraseWords, word_errors
from nemo_gpu_decoding.plain_text import format_table
from nemo_gpu_decoding.presets import load_preset

if TYPE_CHECKING:
    from omegaconf import DictConfig
    from rich.text import Text

    from nemo_gpu_decoding.nemo_plugin.model import Head
    from nemo_gpu_decoding.search.decoder import Decoder

EXAMPLES = ("", "out=build/demo.json plot=build/demo.png", "models=[ctc] show=10 beam_size=16")
# model -> its file in models/ and its presets, which `tune` found on the dev set
MODELS = {
    "ctc": ("self_ctc.nemo", ("demo.yaml", "demo_wfst.yaml", "demo_paged.yaml")),
    "rnnt": ("self_hybrid_rnnt.nemo", ("demo_rnnt.yaml",)),
    "tdt": ("self_hybrid_tdt.nemo", ("demo_tdt.yaml",)),
}
ROOT = Path(__file__).resolve().parents[1]
LACKING = "***"  # a missing word of a transcript, as in sclite
NEXT = """
with your own model, recordings and names:
  nemo-gpu-decoding transcribe model=YOUR.nemo audio='recordings/*.wav' phrases=names.txt lm=tokens.arpa
  nemo-gpu-decoding build-lm text=corpus.txt model=YOUR.nemo out=tokens.arpa
  nemo-gpu-decoding serve model=YOUR.nemo         with your microphone, in a browser"""
REPEATS = 3  # times each decoder is timed; the median is shown


@dataclass
class DemoOptions:
    """Options of `demo`."""

    # Folder with models/, speech/test.json, phrases.txt and the presets demo.yaml, demo_wfst.yaml,
    # demo_paged.yaml, demo_rnnt.yaml and demo_tdt.yaml. The default is assets/self of the source tree.
    data: str = str(ROOT / "assets" / "self")
    # Output file: the rows of the table as JSON, a list of objects with model, decoder, wer, fscore, seconds.
    out: str | None = None
    # Output file: a plot of the error rates, .png, .svg or .pdf.
    plot: str | None = None
    # Number of utterances whose transcripts are shown. They are utterances on which the decoders differ, most improved
    # first.
    show: int = 3
    # Hypotheses kept per frame by beam searches; null: as in the presets.
    beam_size: int | None = None
    # Models to decode: any of ctc, rnnt, tdt.
    models: list[str] = field(default_factory=lambda: list(MODELS))
    # Number of first utterances to use; null: all.
    utterances: int | None = None
    # At the end show an utterance as a live stream, decoded with ctc's first preset.
    live: bool = True

    def __post_init__(self) -> None:
        if self.plot is not None and Path(self.plot).suffix not in FORMATS:
            raise ValueError(f"plot is {self.plot!r}, expected a file that ends in {', '.join(FORMATS)}")
        unknown = [model for model in self.models if model not in MODELS]
        if unknown or not self.models:
            raise ValueError(f"models is {self.models}, expected any of {', '.join(MODELS)}")


@dataclass(frozen=True)
class Decoded:
    """The texts and the time of one decoding of the test set."""

    texts: tuple[str, ...]
    seconds: float


@dataclass(frozen=True)
class Row:
    """One decoder on the whole test set."""

    decoder: str
    decoded: Decoded
    score: Score
    model: str = "ctc"


def run(options: DemoOptions) -> int:
    """For every model: encode the test speech once, decode it in several ways, print a table and some
    transcripts."""
    require("nemo", "wfst", "plot", "demo")
    from rich.console import Console

    data = Path(options.data)
    if not (data / "demo.yaml").is_file():
        raise ValueError(f"data={data} has no demo.yaml, expected the folder assets/self of the source tree")
    utterances = read_manifest(data / "speech" / "test.json")[: options.utterances]
    phrases = load_phrase_file(str(data / "phrases.txt"))
    rows: list[Row] = []
    console = Console(highlight=False, soft_wrap=True)  # colours if the terminal supports them
    others = compile_meanwhile(options.models)
    for model in options.models:
        file, preset_files = MODELS[model]
        presets = [load_preset(str(data / preset_file)) for preset_file in preset_files]
        for preset in presets:
            if options.beam_size is not None and "beam" in preset:
                preset.beam.beam_size = options.beam_size
        test, encoder_seconds, own = decode_model(model, data / "models" / file, presets, utterances, phrases, others)
        console.print(report(model, test, encoder_seconds, own), markup=False)
        console.print(differences(test, own, phrases, options.show if model == options.models[0] else 0))
        rows += own
    if options.live and "ctc" in options.models:
        print(live_stream(data, utterances[0]))
    if options.out:
        out = Path(options.out)
        out.parent.mkdir(parents=True, exist_ok=True)
        write_text(out, json.dumps([json_row(row) for row in rows], indent=2) + "\n")
        print(f"\nrows: {out}")
    if options.plot:
        plot = Path(options.plot)
        plot.parent.mkdir(parents=True, exist_ok=True)
        draw(rows, plot)
        print(f"error rates as a picture: {plot}")
    print(NEXT)
    return 0


def compile_meanwhile(models: Sequence[str]) -> subprocess.Popen[bytes] | None:
    """A process that compiles the search of a transducer while this one loads NeMo and compiles word graphs; None if
    it is in the cache or not needed."""
    last = models[-1]
    if len(models) == 1 or last == "ctc" or any(cache_folder().rglob("*.nbi")):
        return None
    command = [sys.executable, __file__, f"models=[{last}]", "utterances=1", "show=0"]
    return subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)


def decode_model(
    model: str,
    file: Path,
    presets: Sequence[DictConfig],
    utterances: Sequence[Utterance],
    phrases: Sequence[str],
    others: subprocess.Popen[bytes] | None,
) -> tuple[DevSet, float, list[Row]]:
    """Encode the speech once; decode it greedily and with the presets, after the other process has ended.

    Returns:
        the encoded speech, the seconds of the encoder, and a row per decoder.
    """
    from nemo_gpu_decoding.nemo_plugin.model import Model

    say(f"{model}: loading NeMo and the model")
    head = Model.load(str(file), device="cpu").head("ctc" if model == "ctc" else "rnnt")
    started = time.perf_counter()
    test = encode(head, utterances)
    encoder_seconds = time.perf_counter() - started
    decoders: dict[str, Decoder] = {}
    for preset in presets:
        say(f"preparing {preset.strategy} (compiled on first use, then kept)")
        for label, ours in steps_of(head, preset, file.parents[1] / f"heard_{model}.txt").items():
            ours.decode(test.batches[0].inputs[:1], test.batches[0].lengths[:1])  # compiles
            decoders[label] = ours
    if others is not None:
        others.wait()
    decoded = {"greedy": decode_greedy(head, test)}
    decoded |= {label: decode_beam(test, ours, head) for label, ours in decoders.items()}
    rows = [Row(label, result, test.score(result.texts, phrases), model) for label, result in decoded.items()]
    return test, encoder_seconds, rows


def steps_of(head: Head, preset: DictConfig, heard: Path) -> dict[str, Decoder]:
    """The decoders of a preset: without models, with the LM, with LM and phrases; with aliases and without a weight of
    phrases if there is a file of aliases."""
    from nemo_gpu_decoding.search.word_graph.decoder import CudaWFST, PagedBigLM

    name, decoder = str(preset.strategy), head.search(preset)
    if isinstance(decoder, CudaWFST):  # the graph contains the LM, so that it cannot be removed
        unboosted = copy.deepcopy(preset)
        unboosted.wfst.boosting_tree = None
        without_phrases = head.search(unboosted)
        if not isinstance(decoder, PagedBigLM):
            return {f"{name} + LM": without_phrases, f"{name} + LM + phrases": decoder}
        narrow = preset.wfst.beam_width / 2  # the preset's wide beam is needed for phrases only
        return {
            f"{name} + small LM": at_point(without_phrases, Point(beam_width=narrow, large_lm_weight=0.0)),
            f"{name} + large LM": at_point(without_phrases, Point(beam_width=narrow)),
            f"{name} + large LM + phrases": decoder,
        }
    fusion, config = decoder.fusion, decoder.config
    if "beam_beta" in preset.beam:  # beta offsets the deletions of the LM; without an LM it causes insertions
        config = replace(config, beam_beta=0.0)
    steps = {
        name: decoder.with_options(config, replace(fusion, lm=None, boosting=None)),
        f"{name} + LM": decoder.with_options(decoder.config, replace(fusion, boosting=None)),
        f"{name} + LM + phrases": decoder,
    }
    if heard.is_file():
        aliased = copy.deepcopy(preset)
        aliased.beam.boosting_tree.key_phrases_file, aliased.beam.boosting_tree_alpha = str(heard), None
        steps[f"{name} + LM + aliases"] = head.search(aliased)
    return steps


def decode_beam(test: DevSet, ours: Decoder, head: Head) -> Decoded:
    """Decode all utterances several times; the result has the median of the seconds."""
    return timed(lambda: test.decode(ours, head.text_of))


def timed(decode: Callable[[], Sequence[str]]) -> Decoded:
    """Return the texts of a decoding, and the median of its seconds."""
    seconds = []
    for _ in range(REPEATS):
        started = time.perf_counter()
        texts = decode()
        seconds.append(time.perf_counter() - started)
    return Decoded(tuple(texts), statistics.median(seconds))


def nemo_texts(head: Head, batch: PaddedBatch) -> list[str]:
    """Decode a batch with NeMo's decoding object and its current strategy."""
    import torch

    decoding: Any = head.decoding
    if head.name == "ctc":
        found = decoding.ctc_decoder_predictions_tensor(batch.inputs, batch.lengths, return_hypotheses=True)
    else:
        frames = batch.inputs.transpose(1, 2)
        with torch.inference_mode():
            found = decoding.rnnt_decoder_predictions_tensor(frames, batch.lengths, return_hypotheses=True)
    return [hypothesis.text for hypothesis in found]


def decode_greedy(head: Head, test: DevSet) -> Decoded:
    """Decode the same input with NeMo's greedy_batch, timed like the others."""
    head.use_greedy()
    return timed(lambda: [text for batch in test.batches for text in nemo_texts(head, batch)])


def report(model: str, test: DevSet, encoder_seconds: float, rows: Sequence[Row]) -> str:
    """The table. Decoder seconds are for the whole set; RTFx counts encoder and decoder."""
    table = []
    for row in rows:
        errors = row.score.errors
        assert row.score.phrases is not None
        rtfx = test.audio_seconds / (encoder_seconds + row.decoded.seconds)
        cells = [f"{100 * errors.wer:.1f}", errors.substitutions, errors.deletions, errors.insertions]
        cells += [f"{row.score.phrases.fscore:.2f}", f"{row.decoded.seconds:.4f}", f"{rtfx:.0f}"]
        table.append([row.decoder, *cells])
    header = ["decoder", "WER %", "sub", "del", "ins", "phrase F", "decoder s", "RTFx"]
    about = (
        f"{model}: {len(test.references)} utterances, {test.audio_seconds:.0f} s of speech; "
        f"encoder, once: {encoder_seconds:.2f} s"
    )
    return f"\n{about}\n\n{format_table(header, table)}"


def differences(test: DevSet, rows: Sequence[Row], phrases: Sequence[str], show: int) -> Text:
    """Transcripts of utterances on which the decoders differ, in descending order of the last one's improvement."""
    from rich.text import Text

    columns = list(zip(*(row.decoded.texts for row in rows), strict=True))
    disputed = [i for i, texts in enumerate(columns) if len(set(texts)) > 1]

    def gain(i: int) -> int:
        """Word errors of the first decoder minus those of the last one."""
        before, after = (word_errors([test.references[i]], [columns[i][end]]).total for end in (0, -1))
        return before - after

    gains = {i: gain(i) for i in disputed}
    better = sum(gain > 0 for gain in gains.values())
    worse = sum(gain < 0 for gain in gains.values())
    first, last = rows[0].decoder, rows[-1].decoder
    verdict = f"from {first} to {last} {better} get better and {worse} worse"
    shown = Text(f"\ntranscripts differ in {len(disputed)} utterances; {verdict}\n")
    width = max(len(name) for name in ("reference", *(row.decoder for row in rows)))
    wanted = PhraseWords.of(phrases)
    for i in sorted(disputed, key=lambda i: -gains[i])[:show]:
        shown.append(f"\n  {'reference':{width}}  {test.references[i]}\n")
        for row in rows:
            shown.append(f"  {row.decoder:{width}}  ")
            shown.append_text(coloured(test.references[i], row.decoded.texts[i], wanted)).append("\n")
    return shown


def coloured(reference: str, text: str, wanted: PhraseWords) -> Text:
    """A transcript with wrong and missing words in red, and correct phrases in green."""
    from rich.text import Text

    in_phrase = iter(wanted.covered(text.split()))
    shown = Text()
    for said, word in align(reference.split(), text.split(), LACKING):
        found = word != LACKING and next(in_phrase)
        shown.append(" " if shown else "")
        shown.append(word, "red" if word != said else "green" if found else "")
    return shown


def draw(rows: Sequence[Row], target: Path) -> None:
    """Write a plot of the word error rates: a panel per model, a bar per decoder; the suffix of `target` chooses the
    format."""
    from matplotlib.figure import Figure

    models = list(dict.fromkeys(row.model for row in rows))
    figure = Figure(figsize=(4.5 * len(models), 3.2), layout="constrained")
    for axes, model in zip(figure.subplots(1, len(models), squeeze=False)[0], models, strict=True):
        own = [row for row in rows if row.model == model][::-1]  # bars grow from the bottom
        bars = axes.barh([row.decoder for row in own], [100 * row.score.errors.wer for row in own])
        axes.bar_label(bars, fmt="%.1f", padding=2)
        axes.set(title=model, xlabel="word error rate, %")
        axes.margins(x=0.25)
    with written_whole(target) as temporary:
        figure.savefig(temporary, dpi=120)


def live_stream(data: Path, utterance: Utterance) -> str:
    """The output of `nemo-gpu-decoding serve` for an utterance: partial transcripts, then the final one."""
    import soundfile

    from nemo_gpu_decoding.cli.serve import ServeOptions, build_recognizer
    from nemo_gpu_decoding.live.interface import Chunk, StreamOptions

    say("a live stream: the same model in NeMo's streaming pipeline")
    file, (preset, *_) = MODELS["ctc"]
    model = data / "models" / file
    recognizer = build_recognizer(ServeOptions(model=str(model), preset=str(data / preset), device="cpu"))
    samples, _ = soundfile.read(utterance.path, dtype="float32")
    options, n = recognizer.prepare(StreamOptions()), recognizer.chunk_samples
    lines = [f"\n{Path(utterance.path).name} as a live stream, {recognizer.strategy} + LM + phrases:\n"]
    shown = ""
    for at in range(0, len(samples), n):
        is_last = at + n >= len(samples)
        (step,) = recognizer.step([Chunk(0, samples[at : at + n], at == 0, is_last, options)])
        found, kind = (step.final, "final  ") if step.final is not None else (step.partial, "partial")
        if found is not None and (found.text != shown or step.final is not None):
            shown = found.text
            lines.append(f"  {min(at + n, len(samples)) / recognizer.sample_rate:4.1f} s  {kind}  {shown}")
    return "\n".join(lines)


def json_row(row: Row) -> dict[str, Any]:
    assert row.score.phrases is not None
    return {
        "model": row.model,
        "decoder": row.decoder,
        "wer": round(row.score.errors.wer, 4),
        "fscore": round(row.score.phrases.fscore, 4),
        "seconds": round(row.decoded.seconds, 6),
    }


def say(message: str) -> None:
    print(message, file=sys.stderr, flush=True)


def main() -> int:
    """Run the command; returns an exit code as `nemo-gpu-decoding` does."""
    arguments, program = sys.argv[1:], "python scripts/demo.py"
    if any(argument in ("-h", "--help") for argument in arguments):
        summary = "greedy against beam, + LM, + phrases on the speech in this repository"
        print(help_text(program, summary, DemoOptions, EXAMPLES))
        return 0
    return guarded(program, lambda: run(parse_options(DemoOptions, arguments)), __name__)


if __name__ == "__main__":
    sys.exit(main())
