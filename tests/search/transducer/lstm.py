"""A small LSTM transducer of plain torch modules, with random weights."""

import torch
from torch import nn

from nemo_gpu_decoding.search.transducer.networks import LSTMNetworks
from tests.search.transducer.table_networks import WIDTH

HIDDEN, JOINT = 20, 27  # no multiples of a block or of a vector


def lstm_networks(
    vocab_size, durations=(), *, seed=0, layers=1, activation=nn.ReLU, blank_bias=1.5, sharpness=6.0
) -> LSTMNetworks:
    """`blank_bias`: the larger, the fewer tokens are found. `sharpness`: the larger, the more peaked."""
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        output = nn.Sequential(activation(), nn.Dropout(0.5), nn.Linear(JOINT, vocab_size + 1 + len(durations)))
        networks = LSTMNetworks(
            nn.Embedding(vocab_size + 1, HIDDEN), nn.LSTM(HIDDEN, HIDDEN, num_layers=layers),
            nn.Linear(WIDTH, JOINT), nn.Linear(HIDDEN, JOINT), output, durations=durations,
        )  # fmt: skip
    with torch.no_grad():
        networks.encoder_projection.weight.mul_(2.0)
        networks.prediction_projection.weight.mul_(8.0)
        output[-1].weight.mul_(sharpness)
        output[-1].bias[vocab_size] += blank_bias
    return networks
