"""Our words and costs beside Kaldi's, utterance by utterance."""

from __future__ import annotations

from typing import cast

from nemo_gpu_decoding.bench.peers.kaldi_decoder import KaldiDecoder
from nemo_gpu_decoding.bench.strategies import Strategy
from nemo_gpu_decoding.bench.task import Utterances
from nemo_gpu_decoding.search.word_graph.result import WordPath

COST_TOLERANCE = 1e-2  # scaled natural log; hundreds of float32 additions in another order


def equal_to_kaldi(task: Utterances, theirs: KaldiDecoder, ours: Strategy) -> tuple[bool, str]:
    """(whether no utterance comes out worse than Kaldi's, what was seen).

    Where several word sequences cost the same, either may come first. Other words that cost less pass
    too, and are counted: near the beam Kaldi may drop what ours keeps. Words that cost more don't.
    """
    expected = theirs.hypotheses(task.inputs, task.lengths)
    paths = cast(list[WordPath], ours.paths(task.inputs, task.lengths))
    same = tied = better = 0
    largest = 0.0
    for their, path in zip(expected, paths, strict=True):
        more = -path.score - their.cost  # what ours costs above theirs
        if abs(more) <= COST_TOLERANCE:
            largest = max(largest, abs(more))
            if [word.label for word in path.words] == their.words:
                same += 1
            else:
                tied += 1
        else:
            better += more < 0
    others = "".join(
        f", {count} {what}" for count, what in ((tied, "tied"), (better, "better")) if count
    )
    how = f"equal words and costs: {same}{others} of {len(paths)}, costs differ by at most {largest:.1e}"
    return same + tied + better == len(paths), how
