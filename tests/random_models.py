"""Random log-probs and automata for tests; everything comes from the seed that is given."""

import numpy as np
import torch

from nemo_gpu_decoding.fusion.automaton import BackoffAutomaton, Columns


def random_log_probs(batch, frames, columns, *, seed, sharpness=2.0):
    """[B, T, C] float32, peaked like a trained model's when sharpness is large."""
    generator = torch.Generator().manual_seed(seed)
    return torch.log_softmax(sharpness * torch.randn(batch, frames, columns, generator=generator), dim=-1)


def random_lm(vocab_size, *, seed, order=3, branching=3):
    """An automaton shaped like an n-gram LM: dense root, start state, histories up to order - 1."""
    rng = np.random.default_rng(seed)
    contexts = [(), ("<s>",)]
    arcs = {(): list(range(vocab_size))}
    level = [("<s>",)] + [(v,) for v in range(vocab_size)]
    contexts += level[1:]
    for _ in range(order - 1):
        following = []
        for context in level:
            labels = sorted(rng.choice(vocab_size, min(branching, vocab_size), replace=False).tolist())
            arcs[context] = labels
            following += [(*context, v) for v in labels]
        level = [context for context in following if len(context) < order]
        contexts += [context for context in level if context not in contexts]
    index = {context: i for i, context in enumerate(contexts)}

    def longest_suffix(context):
        while context not in index:
            context = context[1:]
        return index[context]

    begin, end, labels, targets = [], [], [], []
    for context in contexts:
        begin.append(len(labels))
        for v in arcs.get(context, []):
            labels.append(v)
            targets.append(longest_suffix((*context, v)))
        end.append(len(labels))
    size = len(contexts)
    return BackoffAutomaton.from_columns(
        Columns(
            arc_begin=np.array(begin),
            arc_end=np.array(end),
            backoff_to=np.array([0 if not c else longest_suffix(c[1:]) for c in contexts]),
            backoff_weights=np.where(np.arange(size) == 0, 0.0, -rng.random(size)),
            final_weights=-3 * rng.random(size),
            arc_labels=np.array(labels),
            arc_weights=-5 * rng.random(len(labels)),
            arc_targets=np.array(targets),
        ),
        vocab_size=vocab_size,
        start_state=1,
        name=f"random LM {seed}",
    )


def random_boosting(vocab_size, *, seed, phrases=4, length=3, bonus=1.5):
    """A sparse tree of random phrases that grants a bonus per token and takes it back on a mismatch."""
    rng = np.random.default_rng(seed)
    nodes = {(): 0}
    for _ in range(phrases):
        phrase = tuple(rng.integers(0, vocab_size, rng.integers(1, length + 1)).tolist())
        for i in range(len(phrase)):
            nodes.setdefault(phrase[: i + 1], len(nodes))
    ordered = sorted(nodes, key=lambda node: nodes[node])
    children = {node: sorted(c for c in nodes if len(c) == len(node) + 1 and c[:-1] == node) for node in ordered}

    def fail(node):
        suffix = node[1:]
        while suffix not in nodes:
            suffix = suffix[1:]
        return suffix

    begin, end, labels, targets = [], [], [], []
    for node in ordered:
        begin.append(len(labels))
        labels += [child[-1] for child in children[node]]
        targets += [nodes[child] for child in children[node]]
        end.append(len(labels))
    backoff = [nodes[fail(node)] if node else 0 for node in ordered]
    refund = [bonus * (len(fail(node)) - len(node)) if node else 0.0 for node in ordered]
    return BackoffAutomaton.from_columns(
        Columns(
            arc_begin=np.array(begin),
            arc_end=np.array(end),
            backoff_to=np.array(backoff),
            backoff_weights=np.array(refund),
            final_weights=np.array([-bonus * len(node) for node in ordered]),
            arc_labels=np.array(labels),
            arc_weights=np.full(len(labels), bonus),
            arc_targets=np.array(targets),
        ),
        vocab_size=vocab_size,
        start_state=0,
        name=f"random phrases {seed}",
    )
