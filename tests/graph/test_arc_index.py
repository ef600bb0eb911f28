"""The index that finds the arcs of a state with a label."""

import numpy as np

from nemo_gpu_decoding.graph.csr import EPSILON, GRAPH_ARC, GRAPH_STATE, MANY_ARCS, GraphArrays, WordGraph, first_arc
from nemo_gpu_decoding.jit import compiled


@compiled
def found_arcs(index, states, arcs, labels):
    found = np.empty((len(states), labels), np.int64)
    for s in range(len(states)):
        for label in range(labels):
            found[s, label] = first_arc(index, arcs, s, states[s], label)
    return found


def random_graph(sizes, columns: int) -> WordGraph:
    """A graph whose states have so many arcs; some arcs of a state have one label."""
    rng = np.random.default_rng(0)
    states, arcs = np.zeros(len(sizes), GRAPH_STATE), np.zeros(sum(sizes), GRAPH_ARC)
    states["arc_end"] = np.cumsum(sizes)
    states["arc_begin"] = states["arc_end"] - sizes
    for state in states:
        own = arcs[state["arc_begin"] : state["arc_end"]]
        own["ilabel"] = np.sort(rng.integers(columns, size=len(own)))
    arcs["ilabel"][-1] = columns - 1
    return WordGraph(GraphArrays(states, arcs, np.zeros(0, EPSILON), np.zeros((0, 2), np.int32)), 0, ("<eps>",), None)


def test_the_first_arc_with_a_label_is_found():
    columns = 200
    limit = columns // MANY_ARCS
    graph = random_graph([0, 1, 2, 7, limit - 1, limit, limit + 1, 190, 400], columns)
    labels = columns + 64  # models may have labels that no arc reads
    states, arcs, *_ = graph.arrays
    found = found_arcs(graph.arc_index, states, arcs, labels)
    assert len(graph.arc_index.tables) == 4
    for s, state in enumerate(states):
        begin, end = int(state["arc_begin"]), int(state["arc_end"])
        own = arcs["ilabel"][begin:end].tolist()
        for label in range(labels):
            a = int(found[s, label])
            if label in own:
                assert a == begin + own.index(label)
            else:
                assert begin <= a <= end
                assert a == end or arcs["ilabel"][a] != label


def test_an_index_of_a_graph_without_arcs_is_empty():
    graph = random_graph([0, 1], 1)
    nothing = GraphArrays(graph.arrays.states[:1], graph.arrays.arcs[:0], *graph.arrays[2:])
    index = WordGraph(nothing, 0, ("<eps>",), None).arc_index
    assert found_arcs(index, nothing.states, nothing.arcs, 3).tolist() == [[0, 0, 0]]
