"""`nemo-gpu-decoding demo`: what a beam, an LM and boosted phrases do to real mistakes."""

from __future__ import annotations

import json
import statistics
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from nemo_gpu_decoding.cli.audio import read_manifest
from nemo_gpu_decoding.cli.dev_set import Decoded, DevSet, Score, encode
from nemo_gpu_decoding.cli.options import UsageError
from nemo_gpu_decoding.cli.presets import load_preset
from nemo_gpu_decoding.cli.table import format_table
from nemo_gpu_decoding.cli.tune import load_phrase_file
from nemo_gpu_decoding.metrics import word_errors

if TYPE_CHECKING:
    from nemo_gpu_decoding.nemo_plugin.session import Session
    from nemo_gpu_decoding.search.flexctc_beam.decoder import FlexCTCBeam

EXAMPLES = ("", "out=build/demo.json", "show=10 beam_size=16")
REPEATS = 5  # times each decoder is timed; the median is shown


@dataclass
class DemoOptions:
    """Options of `demo`."""

    # Folder with models/self_ctc.nemo, speech/test.json, phrases.txt and demo.yaml.
    # null: assets/self of the source tree.
    data: str | None = None
    # Write the rows of the table here as JSON: a list of objects with decoder, wer, fscore, seconds.
    out: str | None = None
    # Utterances whose transcripts are shown, of those where the decoders differ; most improved first.
    show: int = 4
    # Hypotheses kept per frame; null: as in demo.yaml.
    beam_size: int | None = None
    # Use the first so many utterances only; null: all.
    utterances: int | None = None


OPTIONS = DemoOptions


@dataclass(frozen=True)
class Row:
    """One decoder on the whole test set."""

    decoder: str
    decoded: Decoded
    score: Score


def run(options: DemoOptions) -> int:
    """Encode the test speech once, decode it in four ways, print a table and some transcripts."""
    data = find_data(options.data)
    preset = load_preset(str(data / "demo.yaml"))
    if options.beam_size is not None:
        preset.beam.beam_size = options.beam_size
    utterances = read_manifest(data / "speech" / "test.json")[: options.utterances]
    phrases = load_phrase_file(str(data / "phrases.txt"))

    from nemo_gpu_decoding.nemo_plugin.session import Session

    say("loading NeMo and the model")
    session = Session.load(str(data / "models" / "self_ctc.nemo"), device="cpu")
    test = encode(session, utterances)
    greedy = decode_greedy(session, test)  # the strategy that `encode` leaves behind
    say("preparing the decoder (compiled on first use, then kept)")
    decoder = session.beam_decoder(preset)
    rows = [Row("greedy", greedy, test.score(greedy.texts, phrases))]
    rows += decode_beams(session, test, decoder, phrases)
    print(report(test, rows))
    print(differences(test, rows, options.show))
    if options.out:
        out = Path(options.out)
        out.parent.mkdir(parents=True, exist_ok=True)
        out.write_text(json.dumps([json_row(row) for row in rows], indent=2) + "\n", encoding="utf-8")
        print(f"\nrows: {out}")
    return 0


def find_data(folder: str | None) -> Path:
    """The folder with the demo's material.

    Raises:
        UsageError: it is not there.
    """
    data = Path(folder) if folder else Path(__file__).resolve().parents[2] / "assets" / "self"
    if not (data / "demo.yaml").is_file():
        raise UsageError(
            f"no demo.yaml in {data}: the demo's speech comes with the source tree, not with the "
            "installed package. Run it from a clone, or name the folder with data=..."
        )
    return data


def decode_beams(
    session: Session, test: DevSet, decoder: FlexCTCBeam, phrases: Sequence[str]
) -> list[Row]:
    """Ours on the same log-probs: without anything, with the LM, with LM and phrases."""
    fusion = decoder.fusion
    steps = {
        # beta repays what the LM takes; without an LM it would only add insertions
        "flexctc_beam": (
            replace(decoder.config, beam_beta=0.0),
            replace(fusion, lm=None, boosting=None),
        ),
        "flexctc_beam + LM": (decoder.config, replace(fusion, boosting=None)),
        "flexctc_beam + LM + phrases": (decoder.config, fusion),
    }
    rows = []
    for name, (config, with_fusion) in steps.items():
        ours = type(decoder)(decoder.vocab_size, decoder.blank_id, config, with_fusion)
        ours.decode(test.batches[0].log_probs[:1], test.batches[0].lengths[:1])  # compile before timing
        runs = [test.decode(ours, session.text_of) for _ in range(REPEATS)]
        seconds = statistics.median(run.seconds for run in runs)
        rows.append(Row(name, Decoded(runs[0].texts, seconds), test.score(runs[0].texts, phrases)))
    return rows


def decode_greedy(session: Session, test: DevSet) -> Decoded:
    """NeMo's greedy_batch on the log-probs, timed like the others."""
    seconds = []
    for _ in range(REPEATS):
        texts, started = [], time.perf_counter()
        for batch in test.batches:
            texts += session.decode_texts(batch.log_probs, batch.lengths)
        seconds.append(time.perf_counter() - started)
    return Decoded(tuple(texts), statistics.median(seconds))


def report(test: DevSet, rows: Sequence[Row]) -> str:
    """The table. Decoder seconds are for the whole set; RTFx counts encoder and decoder."""
    table = []
    for row in rows:
        errors = row.score.errors
        assert row.score.phrases is not None
        rtfx = test.audio_seconds / (test.encoder_seconds + row.decoded.seconds)
        cells = [f"{100 * errors.wer:.1f}", errors.substitutions, errors.deletions, errors.insertions]
        cells += [f"{row.score.phrases.fscore:.2f}", f"{row.decoded.seconds:.4f}", f"{rtfx:.0f}"]
        table.append([row.decoder, *cells])
    header = ["decoder", "WER %", "sub", "del", "ins", "phrase F", "decoder s", "RTFx"]
    about = (
        f"{len(test.references)} utterances, {test.audio_seconds:.0f} s of speech; "
        f"encoder, once: {test.encoder_seconds:.2f} s"
    )
    return f"\n{about}\n\n{format_table(header, table)}"


def differences(test: DevSet, rows: Sequence[Row], show: int) -> str:
    """Transcripts of utterances on which the decoders disagree, what the last one mends most first."""
    columns = list(zip(*(row.decoded.texts for row in rows), strict=True))
    disputed = [i for i, texts in enumerate(columns) if len(set(texts)) > 1]

    def gain(i: int) -> int:
        """Word errors of the first decoder that the last one does not make."""
        before, after = (word_errors([test.references[i]], [columns[i][end]]).total for end in (0, -1))
        return before - after

    gains = {i: gain(i) for i in disputed}
    better = sum(gain > 0 for gain in gains.values())
    worse = sum(gain < 0 for gain in gains.values())
    first, last = rows[0].decoder, rows[-1].decoder
    verdict = f"from {first} to {last} {better} get better and {worse} worse"
    lines = [f"\ntranscripts differ in {len(disputed)} utterances; {verdict}"]
    width = max(len(name) for name in ("reference", *(row.decoder for row in rows)))
    for i in sorted(disputed, key=lambda i: -gains[i])[:show]:
        lines += ["", f"  {'reference':{width}}  {test.references[i]}"]
        lines += [f"  {row.decoder:{width}}  {row.decoded.texts[i]}" for row in rows]
    return "\n".join(lines)


def json_row(row: Row) -> dict[str, Any]:
    assert row.score.phrases is not None
    return {
        "decoder": row.decoder,
        "wer": round(row.score.errors.wer, 4),
        "fscore": round(row.score.phrases.fscore, 4),
        "seconds": round(row.decoded.seconds, 6),
    }


def say(message: str) -> None:
    print(message, file=sys.stderr, flush=True)
