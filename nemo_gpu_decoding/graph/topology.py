"""CTC topologies: the mapping from frame sequences to token sequences.

A decoding graph usually is T o L o G, with a transducer T from frames to tokens. The search applies T to
L o G on the fly: a search token stores the last label, which is the state of T. Words and costs equal those
of T o L o G for every topology (measured), with 2-4x fewer arcs.

    name      a token's frames        between two equal tokens     T in NeMo
    normal    one or more             at least one blank           "default"
    compact   one or more             any number of blanks         "compact"
    minimal   exactly one             any number of blanks         "minimal"
    graph     defined by the graph's arcs, for ready-made T o L o G files

[CUDA-WFST] and NeMo's `wfst_utils.build_topo` describe the first three.
"""

from __future__ import annotations

from nemo_gpu_decoding.checks import FieldError

TOPOLOGIES = ("compact", "normal", "minimal", "graph")
COMPACT, NORMAL, MINIMAL, GRAPH = range(4)  # numbers in compiled code
NEMO_NAMES = {"default": "normal"}
DEFAULT_TOPOLOGY = "compact"


def topology_number(name: str) -> int:
    """The number of a topology; NeMo's names are allowed."""
    ours = NEMO_NAMES.get(name, name)
    if ours not in TOPOLOGIES:
        raise FieldError("topology", name, f"one of {', '.join(TOPOLOGIES)}")
    return TOPOLOGIES.index(ours)
