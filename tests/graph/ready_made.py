"""T o L o G as an FST file, the way NeMo and Kaldi make it, from L o G and a topology."""

from __future__ import annotations

from nemo_gpu_decoding.graph.openfst import write_fst


def topology_fst(name, blank_id, vocab_size):
    """T: reads columns + 1, writes token + 1. The blank may be any column."""
    import kaldifst

    fst = kaldifst.StdVectorFst()
    start = fst.add_state()
    fst.start = start
    fst.set_final(start, 0)

    def arc(source, read, write, target):
        fst.add_arc(source, kaldifst.StdArc(read, write, 0, target))

    arc(start, blank_id + 1, 0, start)
    tokens = [v + 1 for v in range(vocab_size + 1) if v != blank_id]
    if name == "minimal":
        for v in tokens:
            arc(start, v, v, start)
    else:
        states = {v: fst.add_state() for v in tokens}
        for v, state in states.items():
            arc(start, v, v, state)
            arc(state, v, 0, state)
            if name == "compact":
                arc(state, 0, 0, start)
                continue
            fst.set_final(state, 0)
            arc(state, blank_id + 1, 0, start)
            for other, target in states.items():
                if other != v:
                    arc(state, other, other, target)
    kaldifst.arcsort(fst, sort_type="olabel")
    return fst


def write_tlg(lg, name, blank_id, vocab_size, path):
    """T o (L o G) to a file; returns it as a kaldifst FST."""
    import kaldifst

    write_fst(lg, path)
    right = kaldifst.StdVectorFst.read(str(path))
    kaldifst.arcsort(right, sort_type="ilabel")
    tlg = kaldifst.compose(topology_fst(name, blank_id, vocab_size), right)
    tlg.write(str(path))
    return tlg
