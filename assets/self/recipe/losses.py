"""RNN-T and TDT losses that are quick on a CPU.

Both sum the probability of every path through a lattice with a node ``(t, u)`` for "at frame t,
u tokens said".  A loop runs over frames; within a frame, the recurrence over tokens is one
``logcumsumexp``.  Run ``python losses.py`` to compare with NeMo's own reference losses.
"""

import torch
from torch import Tensor
from torch.nn.functional import pad

IMPOSSIBLE = -1e4  # log-probability; finite, so that gradients stay finite


def along_tokens(entering: Tensor, emit: Tensor) -> Tensor:
    """Forward scores of one frame, with any number of tokens emitted inside it.

    Solves ``score[u] = logaddexp(entering[u], score[u - 1] + emit[u - 1])``
    for `entering` of shape (batch, tokens + 1) and `emit` of shape (batch, tokens).
    """
    emitted_so_far = pad(torch.cumsum(emit, dim=1), (1, 0))
    return torch.logcumsumexp(entering - emitted_so_far, dim=1) + emitted_so_far


def lattice_start(blank: Tensor) -> Tensor:
    """Scores before the first frame: certain to have said nothing."""
    start = torch.full_like(blank[:, 0], IMPOSSIBLE)
    start[:, 0] = 0
    return start


def arcs(logits: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
    """Log-probabilities of blank (batch, frames, tokens + 1) and of the next target token.

    Blank is the last class.
    """
    log_probs = torch.log_softmax(logits.float(), dim=-1)
    index = targets[:, None, :, None].expand(-1, logits.shape[1], -1, 1)
    token = log_probs[:, :, :-1].gather(3, index).squeeze(3)
    return log_probs[..., -1], token


def rnnt_loss(logits: Tensor, targets: Tensor, frames: Tensor, lengths: Tensor) -> Tensor:
    """Negative log-likelihood of each utterance under an RNN transducer.

    `logits` are (batch, frames, tokens + 1, classes), `targets` (batch, tokens); `frames` and
    `lengths` say how much of each utterance is real.
    """
    blank, token = arcs(logits, targets)
    scores = [along_tokens(lattice_start(blank), token[:, 0])]
    for t in range(1, logits.shape[1]):
        scores.append(along_tokens(scores[-1] + blank[:, t - 1], token[:, t]))
    after_blank = torch.stack(scores, dim=1) + blank
    utterance = torch.arange(len(targets), device=targets.device)
    return -after_blank[utterance, frames - 1, lengths]


def tdt_loss(
    logits: Tensor, targets: Tensor, frames: Tensor, lengths: Tensor, durations: list[int], sigma: float
) -> Tensor:
    """Negative log-likelihood of each utterance under a token-and-duration transducer.

    The last ``len(durations)`` classes say how many frames to go on.  Blank must go on by at
    least one.  `sigma` is taken off every token's log-probability, which favours long durations.
    """
    blank, token = arcs(logits[..., : -len(durations)], targets)
    stay = torch.log_softmax(logits[..., -len(durations) :].float(), dim=-1)
    blank_for = {d: blank - sigma + stay[..., i] for i, d in enumerate(durations)}
    token_for = {d: token - sigma + stay[:, :, :-1, i] for i, d in enumerate(durations)}
    steps = [d for d in durations if d > 0]

    scores: list[Tensor] = []
    for t in range(logits.shape[1]):
        ways = [lattice_start(blank)] if t == 0 else []
        for d in steps:
            if d <= t:
                before = scores[t - d]
                emitted = before[:, :-1] + token_for[d][:, t - d]
                ways.append(before + blank_for[d][:, t - d])
                ways.append(pad(emitted, (1, 0), value=IMPOSSIBLE))
        entering = torch.logsumexp(torch.stack(ways), dim=0)
        scores.append(along_tokens(entering, token_for[0][:, t]))

    score = torch.stack(scores, dim=1)
    utterance = torch.arange(len(targets), device=targets.device)
    endings = []
    for d in steps:  # the last blank lands exactly behind the last frame
        t = (frames - d).clamp(min=0)
        ending = score[utterance, t, lengths] + blank_for[d][utterance, t, lengths]
        endings.append(ending.masked_fill(frames < d, IMPOSSIBLE))
    return -torch.logsumexp(torch.stack(endings), dim=0)


def compare_with_nemo() -> None:
    """Print the largest difference from NeMo's slow reference losses, on random input."""
    from nemo.collections.asr.losses.rnnt_pytorch import RNNTLossPytorch, TDTLossPytorch

    durations, sigma, classes = [0, 1, 2, 3, 4], 0.02, 17
    targets = torch.randint(0, classes - 1, (3, 5))
    frames, lengths = torch.tensor([12, 10, 7]), torch.tensor([5, 3, 4])
    logits = torch.randn(3, 12, 6, classes + len(durations))
    token_logits = logits[..., :classes]

    reference = RNNTLossPytorch(blank=classes - 1, reduction="none")
    log_probs = token_logits.log_softmax(-1)
    expected = -reference.compute_forward_prob(log_probs, targets, frames, lengths)
    ours = rnnt_loss(token_logits, targets, frames, lengths)
    print("RNN-T, largest difference:", (ours - expected).abs().max().item())

    reference = TDTLossPytorch(classes - 1, durations, reduction="none", sigma=sigma)
    to_gpu, torch.Tensor.cuda = torch.Tensor.cuda, lambda self: self  # it insists on a GPU
    duration_log_probs = logits[..., classes:].log_softmax(-1)
    expected, _ = reference.compute_forward_prob(log_probs - sigma, duration_log_probs, targets, frames, lengths)
    torch.Tensor.cuda = to_gpu
    ours = tdt_loss(logits, targets, frames, lengths, durations, sigma)
    print("TDT, largest difference:", (ours + expected).abs().max().item())


if __name__ == "__main__":
    compare_with_nemo()
