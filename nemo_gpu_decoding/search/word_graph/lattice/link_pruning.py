"""Pruning of recorded links during the search: drops links that are on no path within the lattice beam."""

from __future__ import annotations

import numpy as np

from nemo_gpu_decoding.jit import compiled
from nemo_gpu_decoding.search.word_graph.best_path import concatenated
from nemo_gpu_decoding.search.word_graph.records import LINK

BEAM_SLACK = 1e-4  # added to the lattice beam: rounding must not drop the best path


def grown_links(links: np.ndarray, counters: np.ndarray, lattice_beam: float) -> np.ndarray:
    """Drop links that are on no path within the lattice beam; double the array if it stays more than half full."""
    used, kept = int(counters["links"][0]), np.empty(len(links), LINK)
    size = prune_links(links, used, int(counters["frames"][0]), lattice_beam + BEAM_SLACK, kept)
    counters["links"] = size
    return kept if size < used and 2 * size <= len(links) else grown(kept, size)


def with_links(
    former: tuple[np.ndarray, ...], links: np.ndarray, frames: int, lattice_beam: float
) -> tuple[np.ndarray, ...]:
    """Append new links to the links of a stream, a tuple of arrays in order of time.

    The first array is the result of the last pruning. All links are pruned again when their number exceeds twice the
    length of that array. The time per link therefore stays constant in a long stream, and the memory at most doubles.

    Args:
        former: arrays of LINK; empty at first.
        links: LINK, links of the frames after those of `former`.
        frames: number of frames read so far.
    """
    arrays = (*former, links)
    if former and sum(map(len, arrays)) <= 2 * len(former[0]):
        return arrays
    links = concatenated(arrays)
    kept = np.empty(len(links), LINK)
    return (kept[: prune_links(links, len(links), frames, lattice_beam + BEAM_SLACK, kept)].copy(),)


@compiled
def prune_links(links, count, frames, beam, kept):
    """Copy the links that may be on a path within a beam of the best one to `kept`, in order.

    The method is Kaldi's PruneActiveTokens. A token of the last frame may be on the best path, so its extra cost is
    0. The extra cost of a link is its cost above the best path to its target, plus the least extra cost of the links
    from the target. Any path with the link costs at least this much more than another, whatever later frames cost.

    Returns:
        the number of links copied.
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
    """A copy of array[:used] with twice the capacity of the array, or of `used + more` entries if that is larger."""
    larger = np.empty(2 * max(len(array), used + more), array.dtype)
    larger[:used] = array[:used]
    return larger
