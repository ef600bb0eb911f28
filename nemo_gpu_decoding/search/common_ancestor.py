"""What live hypotheses have in common: their back-pointers form a tree, in which older nodes have lower numbers."""

from __future__ import annotations

from nemo_gpu_decoding.jit import compiled


@compiled
def common_ancestor(parents, ends):
    """The newest node that lies on the way back from all of `ends`, or what stands for no node if none does.

    Looks at the nodes after it only, however long the past is.

    Args:
        parents: [nodes] the node before each one, lower than its own number.
        ends: [n] nodes.
    """
    ends, newest = ends.copy(), ends.max()
    while newest != ends.min():
        for i in range(len(ends)):
            if ends[i] == newest:
                ends[i] = parents[newest]
        newest = ends.max()
    return newest
