"""pyctcdecode and ctc-beam-decoder beside `nemo_gpu_decoding.compat.pyctcdecode`, through the same interface.

    python -m benchmarks.pyctcdecode_interface                 # both tasks, beam widths 16 and 100, with the word LM
    python -m benchmarks.pyctcdecode_interface --lms none --peers ctc-beam-decoder --utterances 100
    python -m benchmarks.pyctcdecode_interface --tasks hard --beams 16 --utterances 8 --timed 4

All get the same labels, word LM, words, weights and hotwords, and decode one utterance per call of `decode`. They
alternate: each decodes the first utterances (`--timed`) one after the other, repeatedly until 0.2 s have passed, like
all decoders of the benchmarks. CPU milliseconds are per utterance, in the fastest of the measurements. Word errors are
those of all utterances; the hard task has 20. The last column is our word error rate minus that of the first peer, as
an interval that has 95 % of 2,000 draws of as many utterances (paired bootstrap).
"""

from __future__ import annotations

import argparse
import importlib
import logging
import math
from typing import Any

import torch

from benchmarks.clock import HostClock, time_in_turn
from benchmarks.options import BenchOptions
from benchmarks.sources import make_tasks
from benchmarks.tasks import Task
from benchmarks.verify import wer_difference
from nemo_gpu_decoding.metrics import word_errors

BUILDERS = {  # module, and its function or class
    "pyctcdecode": ("pyctcdecode", "build_ctcdecoder"),
    "ctc-beam-decoder": ("ctc_beam_decoder", "BeamSearchDecoder"),
    "ours": ("nemo_gpu_decoding.compat.pyctcdecode", "build_ctcdecoder"),
}


def rows_of(task: Task, names: list[str], lm: str, beam: int, phrases: int, timed: int, repeats: int) -> str:
    """One row of the table: a task, an LM, a beam width and a number of hotwords; the last name is "ours"."""
    logits = [row[:n].numpy() for row, n in zip(task.inputs, task.lengths.tolist(), strict=True)]
    search: dict[str, Any] = {"beam_width": beam}
    if phrases:
        search |= {"hotwords": task.phrases(phrases), "hotword_weight": task.weights.hotword_weight}
    given: dict[str, Any] = {}
    if lm == "word":
        weights = {"alpha": task.weights.pyctcdecode_lm_weight, "beta": task.weights.pyctcdecode_beta}
        given = {"kenlm_model_path": str(task.word_lm), "unigrams": list(task.lexicon) or None, **weights}
    builders = [getattr(importlib.import_module(BUILDERS[name][0]), BUILDERS[name][1]) for name in names]
    decoders = [build([*task.vocabulary.pieces, ""], **given) for build in builders]
    texts = [[decoder.decode(one, **search) for one in logits] for decoder in decoders]
    calls = [lambda decoder=decoder: [decoder.decode(one, **search) for one in logits[:timed]] for decoder in decoders]
    taken = time_in_turn(calls, HostClock(), repeats, math.inf)
    times = [1000 * min(seconds.cpu for seconds in runs) / len(logits[:timed]) for runs in taken]
    errors = [word_errors(task.texts, written) for written in texts]
    low, high = wer_difference(task.texts, texts[0], texts[-1])
    cells = (
        f"{task.name} | {lm} | {beam} | {phrases} | {' / '.join(f'{one:.2f}' for one in times)}",
        " / ".join(f"{one / times[-1]:.1f}x" for one in times[:-1]),
        f"{len(logits)} ({errors[0].words}) | {' / '.join(str(counts.total) for counts in errors)}",
        f"{' / '.join(f'{100 * counts.wer:.1f}' for counts in errors)} | {low:+.1f} .. {high:+.1f}",
    )
    return f"| {' | '.join(cells)} |"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tasks", nargs="+", default=["peaked", "hard"])
    peers = list(BUILDERS)[:-1]
    parser.add_argument("--peers", nargs="+", choices=peers, default=peers)
    parser.add_argument("--lms", nargs="+", choices=["word", "none"], default=["word"])
    parser.add_argument("--beams", nargs="+", type=int, default=[16, 100], help="beam_width of all")
    parser.add_argument("--phrases", nargs="+", type=int, default=[0, 200], help="numbers of hotwords")
    parser.add_argument("--utterances", type=int, default=200, help="for word errors")
    parser.add_argument("--timed", type=int, default=20, help="utterances that are timed, the first ones")
    parser.add_argument("--repeats", type=int, default=5)
    given = parser.parse_args()
    logging.getLogger("pyctcdecode").setLevel(logging.ERROR)
    torch.set_num_threads(1)
    names = [*given.peers, "ours"]
    print("; ".join(f"{n + 1}: {name}" for n, name in enumerate(names)))
    columns = "task | LM | beam width | hotwords | CPU ms per utterance | ours is faster by | utterances (words)"
    print(f"| {columns} | word errors | WER % | difference |\n{10 * '|---'}|")
    for task in make_tasks(BenchOptions(tasks=given.tasks, utterances=given.utterances)):
        for lm in given.lms:
            for beam in given.beams:
                for phrases in given.phrases:
                    print(rows_of(task, names, lm, beam, phrases, given.timed, given.repeats), flush=True)


if __name__ == "__main__":
    main()
