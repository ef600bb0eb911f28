"""alsd_pp and aes_pp on a GPU find what they find on the CPU, however their steps are launched."""

import copy
import gc
import subprocess
import sys
from dataclasses import replace
from functools import partial

import pytest
import torch
from torch import nn

from nemo_gpu_decoding.search.transducer import cuda_graphs
from nemo_gpu_decoding.search.transducer.cuda_graphs import LOOP, PLAIN
from nemo_gpu_decoding.search.transducer.networks import LSTMNetworks, StatelessNetworks
from tests.gpu import sized
from tests.gpu.test_concurrency import in_threads
from tests.search.transducer import table_networks
from tests.search.transducer.table_networks import STRATEGIES, random_fusion

VOCAB, WIDTH, HIDDEN = 30, 16, 32
BATCH, FRAMES = sized(8, 3), sized(60, 8)
LENGTHS = [FRAMES, 0, FRAMES // 2, 1, FRAMES - 1, 7, 20, 33][:BATCH]
assert_same = partial(table_networks.assert_same, score=1e-2)


class Model(nn.Module):
    """All weights of a transducer with an LSTM, and of one with a stateless prediction network."""

    def __init__(self, durations=(), seed=0):
        super().__init__()
        torch.manual_seed(seed)
        self.durations = durations
        self.embedding = nn.Embedding(VOCAB + 1, HIDDEN)
        self.lstm = nn.LSTM(HIDDEN, HIDDEN, num_layers=2)
        self.encoder = nn.Linear(WIDTH, HIDDEN)
        self.prediction = nn.Linear(HIDDEN, HIDDEN)
        self.joint = nn.Sequential(nn.ReLU(), nn.Linear(HIDDEN, VOCAB + 1 + len(durations)))
        self.embeddings = nn.ModuleList(nn.Embedding(VOCAB + 1, HIDDEN // 2) for _ in range(2))
        self.norm = nn.LayerNorm(HIDDEN)
        with torch.no_grad():
            self.joint[1].weight.mul_(8.0)
            self.joint[1].bias[VOCAB] += 2.0

    def networks(self):
        return LSTMNetworks(
            self.embedding, self.lstm, self.encoder, self.prediction, self.joint,
            durations=self.durations,
        )  # fmt: skip

    def stateless(self):
        output = nn.Sequential(nn.Tanh(), self.joint[1])
        return StatelessNetworks(
            self.embeddings, self.norm, self.encoder, self.prediction, output, durations=self.durations
        )


@pytest.fixture(params=list(STRATEGIES))
def strategy(request):
    return STRATEGIES[request.param]


@pytest.fixture
def full_precision():
    """Matrix products as exact as those of the CPU."""
    before = torch.backends.cuda.matmul.allow_tf32
    torch.backends.cuda.matmul.allow_tf32 = False
    yield
    torch.backends.cuda.matmul.allow_tf32 = before


pytestmark = pytest.mark.usefixtures("full_precision")


def frames_of(batch=BATCH, frames=FRAMES, seed=1):
    return torch.randn(batch, frames, WIDTH, generator=torch.Generator().manual_seed(seed))


def both(strategy, device, durations=(), fusion=None, networks=Model.networks, **options):
    """A decoder on the device and its counterpart on the CPU, with the same weights."""
    make, config = strategy
    model = Model(durations)
    options = config(beam_size=4, n_best=2, **options)
    on_device = make(networks(copy.deepcopy(model).to(device)), replace(options, backend="cuda"), fusion)
    return on_device, make(networks(model), replace(options, backend="cpu"), fusion)


@pytest.mark.parametrize("pruning", ["late", "early"])
@pytest.mark.parametrize(
    ("networks", "durations"),
    [("lstm", ()), ("lstm", (0, 1, 2, 4)), ("stateless", ())],
    ids=["rnnt", "tdt", "stateless"],
)
def test_hypotheses_equal_those_of_the_cpu(device, strategy, networks, durations, pruning):
    make = Model.stateless if networks == "stateless" else Model.networks
    found, host = both(strategy, device, durations, random_fusion(VOCAB), make, pruning_mode=pruning, alignments=True)
    frames = frames_of()
    with torch.no_grad():
        assert_same(found.decode(frames.to(device), LENGTHS), host.decode(frames, LENGTHS))
    assert found.device_modes["prediction"] == networks


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("autocast", [False, True], ids=["model", "autocast"])
def test_lower_precisions_give_the_texts_of_the_cpu(device, strategy, dtype, autocast):
    """Kernels and products in the type of the model or of autocast; scores are near those in float32."""
    make, config = strategy
    model, frames = Model(), frames_of()
    expected = make(model.networks(), config(beam_size=4, backend="cpu")).decode(frames, LENGTHS)
    given = model.to(device, torch.float32 if autocast else dtype)
    decoder = make(given.networks(), config(beam_size=4, backend="cuda"))
    with torch.no_grad(), torch.autocast(device.type, dtype, enabled=autocast):
        for _ in range(2):
            found = decoder.decode(frames.to(device), LENGTHS)
    assert decoder.device_modes["prediction"] == "lstm"
    for nbest, wanted in zip(found, expected, strict=True):
        assert nbest.best.score == pytest.approx(wanted.best.score, rel=0.02, abs=0.5)


def test_every_mode_of_graphs_gives_the_same_results(gpu, strategy, monkeypatch):
    frames = frames_of()
    for mode in (LOOP, PLAIN):
        found, expected = both(strategy, gpu, fusion=random_fusion(VOCAB))
        found._shared.graphs.first_mode = mode
        for _ in range(3):  # captured, then replayed
            assert_same(found.decode(frames.to(gpu), LENGTHS), expected.decode(frames, LENGTHS))
        assert found._shared.graphs.mode == mode


def test_loop_is_the_default_mode(gpu, strategy):
    if cuda_graphs.why_no_while_graphs(gpu):
        pytest.skip(cuda_graphs.why_no_while_graphs(gpu))
    for allowed, mode in ((True, LOOP), (False, PLAIN)):
        decoder, _ = both(strategy, gpu, allow_cuda_graphs=allowed)
        decoder.decode(frames_of().to(gpu), LENGTHS)
        assert decoder._shared.graphs.mode == mode


def decode_what_cannot_be_captured(way):
    """In a process of its own: the prediction network does in every step what no capture permits."""

    class Forbidden(LSTMNetworks):
        def predict(self, labels, state):
            if way == "asks the host":
                assert labels.max().item() >= 0
            else:
                torch.cuda.synchronize()
            return super().predict(labels, state)

    gpu = torch.device("cuda", torch.cuda.current_device())
    before = torch.cuda.current_stream()
    for strategy in STRATEGIES.values():
        found, expected = both(strategy, gpu, fusion=random_fusion(VOCAB))
        found.networks.__class__ = Forbidden
        for _ in range(2):
            assert_same(found.decode(frames_of().to(gpu), LENGTHS), expected.decode(frames_of(), LENGTHS))
        assert found._shared.graphs.mode == PLAIN
        assert torch.cuda.current_stream() == before
        assert torch.randn(1, device=gpu).isfinite().all()  # the generator does not wait for the end of the capture
    del found
    gc.collect()
    torch.cuda.empty_cache()
    graph = torch.cuda.CUDAGraph()
    numbers = torch.zeros(4, device=gpu)
    with torch.cuda.graph(graph):
        numbers += 1  # torch's own captures still work
    graph.replay()
    assert numbers.tolist() == [1.0] * 4


@pytest.mark.parametrize("way", ["asks the host", "synchronises"])
def test_a_process_survives_captures_that_fail(gpu, way):
    program = f"from tests.gpu import test_transducer_gpu as t; t.decode_what_cannot_be_captured({way!r})"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


def test_threads_decode_for_the_first_time_at_once(gpu, strategy):
    found, expected = both(strategy, gpu, fusion=random_fusion(VOCAB))
    frames = frames_of()
    wanted = expected.decode(frames, LENGTHS)
    in_threads([lambda: assert_same(found.decode(frames.to(gpu), LENGTHS), wanted)] * 4)
    assert found._shared.graphs.mode == LOOP or cuda_graphs.why_no_while_graphs(gpu)
    assert not found._shared.graphs._failures


def test_graph_survives_later_captures(gpu, strategy):
    """torch has 32 streams in turn, and cuBLAS a workspace for each: twenty captures would come round to the first."""
    frames, decoders = (frames_of(), [both(strategy, gpu, fusion=random_fusion(VOCAB)) for _ in range(20)])
    for found, expected in decoders:
        assert_same(found.decode(frames.to(gpu), LENGTHS), expected.decode(frames, LENGTHS))
    (first, expected), decoders = decoders[0], None
    found = None
    gc.collect()
    assert_same(first.decode(frames.to(gpu), LENGTHS), expected.decode(frames, LENGTHS))


def test_graphs_survive_other_sizes(gpu, strategy):
    found, expected = both(strategy, gpu, fusion=random_fusion(VOCAB))
    for batch, count in ((8, 60), (5, 30), (8, 200), (1, 60), (3, 7), (8, 60)):
        frames, lengths = frames_of(batch, count, seed=count), [count] * batch
        assert_same(found.decode(frames.to(gpu), lengths), expected.decode(frames, lengths))


def test_changed_weights_reach_graphs(gpu, strategy):
    make, config = strategy
    model = Model().to(gpu)
    decoder = make(model.networks(), config(beam_size=4, backend="cuda"))
    frames = frames_of().to(gpu)
    decoder.decode(frames, LENGTHS)
    with torch.no_grad():
        for weight in model.parameters():
            weight.add_(0.05 * torch.randn_like(weight))
    fresh = make(copy.deepcopy(model).networks(), config(beam_size=4, backend="cuda"))
    assert_same(decoder.decode(frames, LENGTHS), fresh.decode(frames, LENGTHS))


def test_networks_on_another_device_are_named(gpu, strategy):
    make, config = strategy
    decoder = make(Model().networks(), config(backend="cuda"))
    with pytest.raises(ValueError, match="the networks are on cpu"):
        decoder.decode(frames_of().to(gpu), LENGTHS)
