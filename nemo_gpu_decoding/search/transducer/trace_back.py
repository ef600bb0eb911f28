"""Make the n-best list of a beam: rank it, trace paths back in the tree of tokens, split scores, compute log-probs."""

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from nemo_gpu_decoding.fusion.batch import FusionArrays
from nemo_gpu_decoding.jit import compiled
from nemo_gpu_decoding.search.numerics import add_text_scores, merge_equal_texts, select_best
from nemo_gpu_decoding.search.result import Path
from nemo_gpu_decoding.search.transducer.networks import TransducerNetworks
from nemo_gpu_decoding.search.transducer.records import NODE, ROOT, SearchParams


@compiled
def rank(rows, state, fusions, final, score_norm, order, scores):
    """Rank the N best hypotheses, which have different texts, of the n utterances `rows`.

    Fill order [n, N], which holds -1, with slots, best first, and scores [n, N]. `final`: the utterances have ended,
    and bonuses of unfinished phrases are subtracted, unless no sentence of a grammar ends here. As in NeMo's
    searches, the LM's end-of-sentence weight is not added.
    """
    for r in range(order.shape[0]):
        b = rows[r]
        for attempt in range(2):
            if order[r, 0] >= 0:
                break
            score = np.empty(max(0, state.counters[b].size), np.float32)
            for k in range(len(score)):
                hypothesis = state.beam[b, k]
                score[k] = hypothesis.score
                if final and attempt == 0 and fusions.utterances[b].boosting_weight > 0:
                    refund = fusions.boosting.states[hypothesis.boosting_state].final_weight
                    score[k] += fusions.utterances[b].boosting_weight * refund
            merge_equal_texts(state.beam[b], score, False)
            rating = score.copy()  # the sort key
            if score_norm:
                for k in range(len(score)):
                    rating[k] = (rating[k] + np.float32(state.offsets[b])) / np.float32(state.beam[b, k].length + 1)
            select_best(rating, score, order[r], scores[r])
        scores[r] += np.float32(state.offsets[b])


@compiled
def trace_back(nodes, node):
    """Return the nodes on the path from the root to `node`, in that order, [n] NODE."""
    count, before = 0, node
    while before != ROOT:
        count += 1
        before = nodes[before].parent
    path = np.empty(count, NODE)
    for i in range(count - 1, -1, -1):
        path[i] = nodes[node]
        node = nodes[node].parent
    return path


@compiled
def tokens_between(nodes, ancestor, node, vocab_size):
    """Return the number of tokens on the path from an ancestor to a node."""
    count = 0
    while node != ancestor:
        count += nodes[node].label < vocab_size
        node = nodes[node].parent
    return count


def path_fields(steps: np.ndarray, params: SearchParams) -> dict[str, np.ndarray]:
    """Return fields of a `Path` from its NODEs `steps`."""
    emitted = steps[steps["label"] < params.vocab_size]
    durations = emitted["duration"].copy()
    columns = {
        "tokens": emitted["label"].copy(),
        "frames": emitted["frame"].copy(),
        "repeats": np.maximum(durations, 1),
        "token_confidence": np.exp(emitted["log_prob"]),
    }
    if params.timed:
        columns["durations"] = durations
    if params.alignments:
        names = {"alignment": "label", "alignment_log_probs": "log_prob", "alignment_frames": "frame"}
        columns |= {name: steps[field].copy() for name, field in names.items()}
    return columns


@compiled
def drop_nodes(nodes, ancestor, beam):
    """Make a common ancestor of all hypotheses the root, and drop nodes that lead to no hypothesis, in place.

    Args:
        nodes: [N] NODE.
        beam: [size] HYPOTHESIS; their node numbers are updated.

    Returns:
        The number of remaining nodes.
    """
    numbers = np.zeros(len(nodes), np.int32)  # 1: leads to a hypothesis
    for k in range(len(beam)):
        node = beam[k].node
        while node != ancestor and numbers[node] == 0:
            numbers[node] = 1
            node = nodes[node].parent
    numbers[ancestor], count = ROOT, ROOT + 1
    for node in range(ancestor + 1, len(nodes)):
        if numbers[node] == 1:
            numbers[node] = count
            nodes[count] = nodes[node]
            nodes[count].parent = numbers[nodes[count].parent]
            count += 1
    for k in range(len(beam)):
        beam[k].node = numbers[beam[k].node]
    return count


def add_scores(
    tokens: np.ndarray, vocab_size: int, fusions: FusionArrays, b: int, scores: np.ndarray, final: bool
) -> None:
    """Run `add_text_scores` for utterance b in double; if `final`, add the refunds at the end of the text."""
    # the blank is label V
    add_text_scores(tokens, vocab_size, vocab_size, fusions, b, np.float64(1.0), (False, final), scores)


def step_log_probs(networks: TransducerNetworks, frames: Sequence[Tensor], paths: Sequence[Path]) -> list[Tensor]:
    """Return log-probs at every step of every path; labels and durations are normalised separately.

    A search keeps one number per step. NeMo's confidence measures and alignments need the whole output of the joint,
    so the networks run again over the tokens of the hypotheses.

    Args:
        frames: [T, D] encoder output of each path's utterance.
        paths: hypotheses with alignments.

    Returns:
        One tensor [m, V + 1], for TDT [m, V + 1 + durations], float32 on the CPU, per path of m steps.
    """
    with torch.inference_mode(), networks.evaluation():
        predictions = _predictions(networks, paths)
        labels = networks.vocab_size + 1
        log_probs = []
        for i, (path, own_frames) in enumerate(zip(paths, frames, strict=True)):
            assert path.alignment is not None
            assert path.alignment_frames is not None
            emits = path.alignment < networks.vocab_size
            texts: np.ndarray = np.cumsum(emits) - emits  # tokens before each step
            projected = networks.project_encoder(own_frames)
            frame_numbers = torch.from_numpy(path.alignment_frames.astype(np.int64)).to(projected.device)
            outputs = predictions[torch.from_numpy(texts).to(predictions.device), i]
            logits = networks.join(projected[frame_numbers], outputs).float().cpu()
            parts = (logits[:, :labels], logits[:, labels:])
            log_probs.append(torch.cat([torch.log_softmax(part, dim=-1) for part in parts], dim=-1))
    return log_probs


def _predictions(networks: TransducerNetworks, paths: Sequence[Path]) -> Tensor:
    """Return [longest + 1, paths, H]: entry u holds the predictions after u tokens."""
    longest = max((len(path) for path in paths), default=0)
    labels = np.zeros((longest, len(paths)), np.int64)
    for i, path in enumerate(paths):
        labels[: len(path), i] = path.tokens
    output, state = networks.start()
    outputs = [output.expand(len(paths), -1)]
    state = tuple(part.expand(len(paths), *part.shape[1:]) for part in state)
    for row in labels:
        output, state = networks.predict(torch.from_numpy(row).to(output.device), state)
        outputs.append(output)
    return torch.stack(outputs)
