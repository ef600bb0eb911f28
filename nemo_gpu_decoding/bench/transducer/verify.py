"""Our hypotheses beside NeMo's, utterance by utterance."""

from __future__ import annotations

from nemo_gpu_decoding.bench.peers.nemo_transducer import NemoMAES, NemoTransducerBeam
from nemo_gpu_decoding.bench.strategies import Strategy
from nemo_gpu_decoding.bench.task import Utterances

SCORE_TOLERANCE = 5e-3  # natural log; hundreds of float32 additions in another order


def equal_to_nemo(task: Utterances, theirs: NemoTransducerBeam, ours: Strategy) -> tuple[bool, str]:
    """(whether texts and scores of our batch are those of NeMo's utterances alone, what was seen).

    Where two texts score the same, either may come first: ours passes if NeMo's own n-best list has it
    with our score, and that is the score of NeMo's best.
    """
    paths = ours.paths(task.inputs, task.lengths)
    same = tied = 0
    largest = 0.0
    for n_best, path in zip(theirs.n_best_alone(task.inputs, task.lengths), paths, strict=True):
        scores = {tuple(hypothesis.tokens): hypothesis.score for hypothesis in reversed(n_best)}
        score = scores.get(tuple(path.tokens.tolist()))
        if score is None:
            continue
        largest = max(largest, abs(score - path.score))
        if abs(score - path.score) > SCORE_TOLERANCE:
            continue
        if path.tokens.tolist() == n_best[0].tokens:
            same += 1
        else:
            # NeMo ranks by score per token
            normed = score / (len(path) + 1), n_best[0].score / (len(n_best[0].tokens) + 1)
            tied += abs(normed[0] - normed[1]) <= SCORE_TOLERANCE / (len(path) + 1)
    also = f" and {tied} tied" if tied else ""
    how = (
        f"equal hypotheses and scores: {same}{also} of {len(paths)}, the peer's utterances decoded "
        f"alone, scores differ by at most {largest:.1e}"
    )
    if isinstance(theirs, NemoMAES):
        how += "; compared with maes_batch after mending its mask of hypotheses to expand"
    return same + tied == len(paths), how
