"""CTC topologies: which sequences of frames stand for a sequence of tokens.

A decoding graph usually is T o L o G, with a transducer T that reads frames and writes tokens. The
search runs T natively on L o G: a search token remembers the last label, which is all that T's states
do. Measured, words and costs are those of T o L o G for every topology, with 2-4x fewer arcs.

    name      a token's frames        between two equal tokens     T in NeMo
    normal    one or more             at least one blank           "default"
    compact   one or more             nothing is asked for         "compact"
    minimal   exactly one             nothing is asked for         "minimal"
    graph     what the graph's own arcs say: for ready-made T o L o G files

[CUDA-WFST] and NeMo's `wfst_utils.build_topo` describe the first three.
"""

from __future__ import annotations

from nemo_gpu_decoding.checks import FieldError

TOPOLOGIES = ("compact", "normal", "minimal", "graph")
COMPACT, NORMAL, MINIMAL, GRAPH = range(4)  # as compiled code knows them
NEMO_NAMES = {"default": "normal"}
DEFAULT_TOPOLOGY = "compact"


def topology_number(name: str) -> int:
    """The number of a topology, NeMo's names included.

    Raises:
        FieldError: there is none of this name.
    """
    ours = NEMO_NAMES.get(name, name)
    if ours not in TOPOLOGIES:
        raise FieldError("topology", name, f"one of {', '.join(TOPOLOGIES)}")
    return TOPOLOGIES.index(ours)
