"""Links of former frames: those that no path within the lattice beam can take are dropped as frames go by."""

from __future__ import annotations

import numpy as np

from nemo_gpu_decoding.jit import compiled
from nemo_gpu_decoding.search.word_graph.best_path import concatenated
from nemo_gpu_decoding.search.word_graph.records import LINK

BEAM_SLACK = 1e-4  # of the lattice beam: rounding must not drop the best path


def grown_links(links: np.ndarray, counters: np.ndarray, lattice_beam: float) -> np.ndarray:
    """Those that no path within the lattice beam can take are dropped; more room is made if that is not enough."""
    used, kept = int(counters["links"][0]), np.empty(len(links), LINK)
    size = prune_links(links, used, int(counters["frames"][0]), lattice_beam + BEAM_SLACK, kept)
    counters["links"] = size
    return kept if size < used and 2 * size <= len(links) else grown(kept, size)


def with_links(
    former: tuple[np.ndarray, ...], links: np.ndarray, frames: int, lattice_beam: float
) -> tuple[np.ndarray, ...]:
    """The links of a stream in arrays, one after the other: the former ones, and those that came since.

    The first array is what a lattice may need of all that there was when it was made. All are pruned again where there
    are more than twice as many: so a link takes no more time in a long stream, and no more than twice its memory.

    Args:
        former: arrays of LINK; empty at first.
        links: of the frames since.
        frames: read so far.
    """
    arrays = (*former, links)
    if former and sum(map(len, arrays)) <= 2 * len(former[0]):
        return arrays
    links = concatenated(arrays)
    kept = np.empty(len(links), LINK)
    return (kept[: prune_links(links, len(links), frames, lattice_beam + BEAM_SLACK, kept)].copy(),)


@compiled
def prune_links(links, count, frames, beam, kept):
    """Copy the links that may be on a path within a beam of the best one, in order, to `kept`.

    As Kaldi's PruneActiveTokens: each token of the last frame may turn out to be on the best path, at no extra cost;
    the extra cost of a link is what it costs more than the best way to its target, and the least extra cost of the
    links from there. Whatever the frames to come may cost, a path with that link costs so much more than another.

    Returns:
        how many were copied.
    """
    first = np.zeros(frames + 3, np.int64)  # node of the first token of each frame
    for i in range(count):
        first[links[i].frame + 1] = max(first[links[i].frame + 1], links[i].source + 1)
        first[links[i].frame + 2] = max(first[links[i].frame + 2], links[i].target + 1)
    first = np.cumsum(first)
    costs, extra = np.full(first[-1] + 1, np.inf), np.full(first[-1] + 1, np.inf)
    costs[0], extra[first[frames] :] = 0.0, 0.0
    for i in range(count):
        source, target = first[links[i].frame] + links[i].source, first[links[i].frame + 1] + links[i].target
        costs[target] = min(costs[target], costs[source] + links[i].cost)
    is_kept, size = np.zeros(count, np.bool_), 0
    for i in range(count - 1, -1, -1):
        source, target = first[links[i].frame] + links[i].source, first[links[i].frame + 1] + links[i].target
        more = costs[source] + links[i].cost - costs[target] + extra[target]
        if more <= beam:
            is_kept[i] = True
            extra[source] = min(extra[source], more)
    for i in range(count):
        if is_kept[i]:
            kept[size] = links[i]
            size += 1
    return size


def grown(array: np.ndarray, used: int, more: int = 0) -> np.ndarray:
    """A copy of what is used, with capacity for as much again and for `more`."""
    larger = np.empty(2 * max(len(array), used + more), array.dtype)
    larger[:used] = array[:used]
    return larger
