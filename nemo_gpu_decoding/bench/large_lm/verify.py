"""Words and costs of lazy composition beside those of eager composition, utterance by utterance."""

from __future__ import annotations

from typing import cast

from nemo_gpu_decoding.bench.large_lm.strategies import EagerSearch
from nemo_gpu_decoding.bench.strategies import Strategy
from nemo_gpu_decoding.bench.task import Utterances
from nemo_gpu_decoding.search.word_graph.result import WordPath

COST_TOLERANCE = 1e-2  # scaled natural log; hundreds of float32 additions in another order
LEAST_SAME = 0.95  # share of utterances: both prune, each by what it knows


def equal_to_eager(task: Utterances, theirs: EagerSearch, ours: Strategy) -> tuple[bool, str]:
    """(whether hardly any utterance differs, what was seen).

    Lazy composition prunes by the small LM's cost too, before it asks the large one. Near the beam one
    of both may drop what the other keeps: utterances that come out better or worse are counted.
    """
    expected = cast(list[WordPath], theirs.paths(task.inputs, task.lengths))
    paths = cast(list[WordPath], ours.paths(task.inputs, task.lengths))
    same = better = worse = 0
    for their, path in zip(expected, paths, strict=True):
        gain = path.score - their.score
        same += abs(gain) <= COST_TOLERANCE
        better += gain > COST_TOLERANCE
        worse += gain < -COST_TOLERANCE
    how = f"equal costs: {same}, {better} better, {worse} worse of {len(paths)}"
    return same + better >= LEAST_SAME * len(paths), how
