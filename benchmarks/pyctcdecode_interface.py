"""pyctcdecode beside `nemo_gpu_decoding.compat.pyctcdecode`, both through pyctcdecode's interface.

    python -m benchmarks.pyctcdecode_interface                 # both tasks, beam widths 16 and 100
    python -m benchmarks.pyctcdecode_interface --tasks hard --beams 16 --utterances 8 --timed 4

Both get the same labels, word LM, words, weights and hotwords, and decode one utterance per call of `decode`. The two
alternate: each decodes the first utterances (`--timed`) one after the other, repeatedly until 0.2 s have passed, like
all decoders of the benchmarks. CPU seconds are those of these utterances, in the fastest of the measurements. Word
error rates are those of all utterances; the hard task has 20. The last column is our word error rate minus
pyctcdecode's, as an interval that has 95 % of 2,000 draws of as many utterances (paired bootstrap).
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

MODULES = {"pyctcdecode": "pyctcdecode", "ours": "nemo_gpu_decoding.compat.pyctcdecode"}


def rows_of(task: Task, beam: int, phrases: int, timed: int, repeats: int) -> str:
    """One row of the table: a task, a beam width and a number of hotwords."""
    logits = [row[:n].numpy() for row, n in zip(task.inputs, task.lengths.tolist(), strict=True)]
    search: dict[str, Any] = {"beam_width": beam}
    if phrases:
        search |= {"hotwords": task.phrases(phrases), "hotword_weight": task.weights.hotword_weight}
    decoders = {}
    for name, module in MODULES.items():
        decoders[name] = importlib.import_module(module).build_ctcdecoder(
            [*task.vocabulary.pieces, ""], str(task.word_lm), list(task.lexicon) or None,
            alpha=task.weights.pyctcdecode_lm_weight, beta=task.weights.pyctcdecode_beta,
        )  # fmt: skip
    texts = {name: [decoder.decode(one, **search) for one in logits] for name, decoder in decoders.items()}
    calls = [
        lambda decoder=decoder: [decoder.decode(one, **search) for one in logits[:timed]]
        for decoder in decoders.values()
    ]
    taken = time_in_turn(calls, HostClock(), repeats, math.inf)
    peer, ours = (min(each.cpu for each in own) for own in taken)
    errors = [f"{100 * word_errors(task.texts, texts[name]).wer:.1f}" for name in MODULES]
    low, high = wer_difference(task.texts, *texts.values())
    return (
        f"| {task.name} | {beam} | {phrases} | {peer:.3f} / {ours:.4f} | {peer / ours:.1f}x | {len(logits)} | "
        f"{' / '.join(errors)} | {low:+.1f} .. {high:+.1f} |"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tasks", nargs="+", default=["peaked", "hard"])
    parser.add_argument("--beams", nargs="+", type=int, default=[16, 100], help="beam_width of both")
    parser.add_argument("--phrases", nargs="+", type=int, default=[0, 200], help="numbers of hotwords")
    parser.add_argument("--utterances", type=int, default=200, help="for word error rates")
    parser.add_argument("--timed", type=int, default=20, help="utterances that are timed, the first ones")
    parser.add_argument("--repeats", type=int, default=5)
    given = parser.parse_args()
    logging.getLogger("pyctcdecode").setLevel(logging.ERROR)
    torch.set_num_threads(1)
    names = "task | beam width | hotwords | CPU seconds, pyctcdecode / ours | ratio | utterances"
    print(f"| {names} | WER %, pyctcdecode / ours | difference |")
    print("|---|---|---|---|---|---|---|---|")
    for task in make_tasks(BenchOptions(tasks=given.tasks, utterances=given.utterances)):
        for beam in given.beams:
            for phrases in given.phrases:
                print(rows_of(task, beam, phrases, given.timed, given.repeats), flush=True)


if __name__ == "__main__":
    main()
