"""What paged_biglm returns: the results of cuda_wfst, and what the search had to do for them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

from nemo_gpu_decoding.search.cuda_wfst.result import WordNBest


class Work(NamedTuple):
    """Counts over all frames of an utterance. They do not depend on chunks, except for `cache_hits`.

    `look_ups` and `groups` do not depend on the order of work either, see `cpu.py`.
    """

    look_ups: int  # words that the LMs were asked for
    cache_hits: int  # of these, answered from what was asked before
    arc_visits: int  # arcs of the graph that were looked at
    groups: int  # groups of tokens in one graph state; 0 with eager composition
    prolonged: int  # tokens that took arcs; of a group those with one LM history count as one
    frames: int


NO_WORK = Work(0, 0, 0, 0, 0, 0)


@dataclass(frozen=True)
class PagedBigLMNBest(WordNBest):
    """A `WordNBest` with the work that it took."""

    work: Work = NO_WORK
