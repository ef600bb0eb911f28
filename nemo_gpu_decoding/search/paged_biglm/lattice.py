"""The lattice of an utterance; what it is and can do stands in `cuda_wfst/lattice.py`.

Its nodes are tokens with an LM history, so that every path has the large LM's true cost.
"""

from __future__ import annotations

import numpy as np

from nemo_gpu_decoding.search.cuda_wfst.lattice import Lattice, _pruned
from nemo_gpu_decoding.search.paged_biglm.streams import Utterance
from nemo_gpu_decoding.search.paged_biglm.trace import all_ends


def lattice_of(utterance: Utterance) -> Lattice:
    """What the search of an utterance that is over has kept, pruned to the lattice beam."""
    setup = utterance.setup
    links = utterance.links[: int(utterance.progress["links"][0])].copy()
    sizes = np.ones(utterance.frames + 1, np.int64)
    np.maximum.at(sizes, links["frame"] + 1, links["target"].astype(np.int64) + 1)
    first = np.append(0, np.cumsum(sizes))  # node of the first token of each frame
    links["source"] += first[links["frame"]].astype(np.int32)
    links["target"] += first[links["frame"] + 1].astype(np.int32)
    links = links[np.argsort(links["target"], kind="stable")]
    facts = setup.search, setup.graph.arrays, setup.boosting.arrays, setup.rescoring
    ends = all_ends(utterance.tokens, True, *facts)
    reaches_end = bool(len(ends))
    if not reaches_end:
        ends = all_ends(utterance.tokens, False, *facts)
    ends["node"] += first[utterance.frames]
    frames = np.repeat(np.arange(len(sizes)), sizes)
    frames, links, ends = _pruned(frames, links, ends, float(setup.search.lattice_beam))
    return Lattice(setup.graph, float(setup.search.acoustic_scale), frames, links, ends, reaches_end)
