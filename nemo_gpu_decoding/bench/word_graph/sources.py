"""Where word-graph tasks come from: files that the user names, or the synthetic language."""

from __future__ import annotations

from nemo_gpu_decoding.bench.options import BenchOptions
from nemo_gpu_decoding.bench.sources import read_task
from nemo_gpu_decoding.bench.synthetic import synthetic_task
from nemo_gpu_decoding.bench.task import Task


def word_graph_task(options: BenchOptions) -> Task:
    """The task of `data`, or a synthetic one whose word LM is as large as real graphs' are."""
    if options.data:
        task = read_task(options)
    else:
        task = synthetic_task(options, graph_sentences=options.graph_sentences)
    return task.first(options.utterances)
