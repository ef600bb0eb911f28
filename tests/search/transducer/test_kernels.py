"""The kernels of both strategies, run by the emulator, find what the CPU finds: to the bit."""

import itertools

import numpy as np
import pytest
import torch

from nemo_gpu_decoding.cuda.launch import as_records, runtime
from nemo_gpu_decoding.search.transducer import cuda_engine, cuda_workspace, records
from nemo_gpu_decoding.search.transducer.alsd import ALSDPlusPlus
from nemo_gpu_decoding.search.transducer.config import ALSDConfig
from nemo_gpu_decoding.search.transducer.cuda_workspace import RunWorkspace, WorkspaceShape
from nemo_gpu_decoding.search.transducer.records import LM_WEIGHTED_FULL, SearchParams
from tests.search.transducer.table_networks import (
    STRATEGIES,
    TableNetworks,
    assert_equal,
    random_frames,
    random_fusion,
)

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("emulated_runtime", "small_blocks")]

V, T = 12, 10
CPU = torch.device("cpu")
LENGTHS = [T, 0, 7]
DURATIONS = [(), (0, 1, 2, 4), (4, 1, 0), (1, 2)]


@pytest.fixture(params=list(STRATEGIES))
def strategy(request):
    """The class of a decoder and that of its options."""
    return STRATEGIES[request.param]


def compare(strategy, networks, fusion=None, frames=None, requests=None, **options):
    make, config = strategy
    frames = random_frames(3, T, seed=len(networks.durations)) if frames is None else frames
    options.setdefault("n_best", options.setdefault("beam_size", 4))
    assert_equal(make, networks, config(**options), frames, LENGTHS[: len(frames)], fusion, requests)


@pytest.mark.parametrize("pruning", ["late", "early"])
@pytest.mark.parametrize("kind", ["none", "lm", "boosting", "both"])
@pytest.mark.parametrize("durations", DURATIONS, ids=str)
def test_every_fusion_and_pruning_mode_equals_the_cpu(strategy, durations, kind, pruning):
    for beam_size, mode in ((3, "lm_weighted_full"), (6, "no_score")):
        compare(
            strategy, TableNetworks(V, durations, seed=4), random_fusion(V, kind, beam_size),
            beam_size=beam_size, pruning_mode=pruning, blank_lm_score_mode=mode, alignments=True,
        )  # fmt: skip


@pytest.mark.parametrize("beam_size", [1, 2, 3, 4, 5, 6, 7, 8, 16])
@pytest.mark.parametrize("durations", DURATIONS[:2], ids=str)
def test_kernels_of_any_beam_size_equal_the_cpu(strategy, durations, beam_size):
    for seed, pruning in itertools.product(range(2), ("late", "early")):
        networks = TableNetworks(V, durations, seed=seed, blank_bias=0.5)
        compare(
            strategy, networks, random_fusion(V, seed=seed), random_frames(1, T, seed=seed),
            beam_size=beam_size, pruning_mode=pruning,
        )  # fmt: skip


@pytest.mark.parametrize("most", [1, 2])
@pytest.mark.parametrize("pruning", ["late", "early"])
def test_kernels_with_forced_blanks_equal_the_cpu(strategy, pruning, most):
    name = "max_symbols" if strategy[0] is ALSDPlusPlus else "maes_num_steps"
    for durations in DURATIONS[:3]:
        networks = TableNetworks(V, durations, seed=5, blank_bias=-1.0)
        compare(strategy, networks, random_fusion(V), **{name: most, "alignments": True, "pruning_mode": pruning})


@pytest.mark.parametrize("gamma", [0.5, float("inf")])
@pytest.mark.parametrize("beta", [0, 30])
def test_kernels_with_limits_of_expansion_equal_the_cpu(gamma, beta):
    for pruning, durations in itertools.product(("late", "early"), DURATIONS[:2]):
        compare(
            STRATEGIES["aes_pp"], TableNetworks(V, durations, seed=6), random_fusion(V),
            maes_expansion_gamma=gamma, maes_expansion_beta=beta, pruning_mode=pruning,
        )  # fmt: skip


@pytest.mark.parametrize("vocab_size", [1, 2, 31, 300])
def test_kernels_of_any_vocabulary_size_equal_the_cpu(strategy, vocab_size):
    compare(strategy, TableNetworks(vocab_size, (0, 1), seed=1), random_fusion(vocab_size), softmax_temperature=1.7)


def test_kernels_that_store_no_log_probs_equal_the_cpu(strategy, monkeypatch):
    params = SearchParams(*[0] * len(SearchParams._fields))._replace(vocab_size=V, max_extensions=4)
    assert cuda_engine.list_sizes(params, 256)[0].log_probs == V + 1
    monkeypatch.setattr(cuda_engine, "MOST_BYTES_WITH_LOG_PROBS", 0)
    assert cuda_engine.list_sizes(params, 256)[0].log_probs == 0
    compare(strategy, TableNetworks(V, (0, 1), seed=3), random_fusion(V))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float64])
def test_kernels_for_any_type_of_logits_equal_the_cpu(strategy, dtype):
    class Rounding(TableNetworks):
        def join(self, frames, predictions):
            return super().join(frames, predictions).to(dtype)

    compare(strategy, Rounding(V, (0, 2), seed=3), random_fusion(V))


@pytest.mark.parametrize("threads", [64, 160])
def test_kernels_with_any_block_size_equal_the_cpu(strategy, monkeypatch, threads):
    for name in ("EXPAND_THREADS", "MERGE_THREADS", "MOVE_THREADS"):
        monkeypatch.setattr(records, name, threads)
    compare(strategy, TableNetworks(60, (0, 1), seed=3), random_fusion(60))


@pytest.mark.parametrize(("frame_by_frame", "capability", "compiler", "resident"), [
    (True, (8, 0), (13, 5), 2), (True, (8, 6), (13, 0), 4), (True, (8, 9), (13, 5), 4), (True, (9, 0), (13, 5), 2),
    (True, (8, 6), (12, 9), 2), (True, (10, 0), (13, 5), 2), (False, (8, 6), (13, 0), 4), (False, (8, 6), (12, 9), 3),
    (False, (9, 0), (13, 5), 4), (False, (9, 0), (13, 4), 3), (False, (9, 0), (14, 0), 4),
    (False, (10, 0), (13, 5), 3),
])  # fmt: skip
def test_many_hypotheses_take_blocks_of_fewer_threads(frame_by_frame, capability, compiler, resident, monkeypatch):
    monkeypatch.setattr(records, "EXPAND_THREADS", 256)
    gpu = cuda_engine.Gpu(72, capability, compiler)
    found = [cuda_engine.expand_threads(rows, frame_by_frame, gpu) for rows in (1, 72 * resident, 72 * resident + 1)]
    assert found == [256, 256, 128]
    params = SearchParams(*[0] * len(SearchParams._fields))
    assert cuda_engine.list_sizes(params, 128)[1] < cuda_engine.list_sizes(params, 256)[1]


def test_kernels_with_smaller_blocks_equal_the_cpu(strategy, monkeypatch):
    monkeypatch.setattr(cuda_engine, "gpu_of", lambda device: cuda_engine.Gpu(0, (9, 0), (13, 5)))
    monkeypatch.setattr(records, "EXPAND_THREADS", 128)
    monkeypatch.setattr(records, "FEWER_EXPAND_THREADS", 64)
    compare(strategy, TableNetworks(200, (0, 1), seed=3), random_fusion(200))


def test_short_label_lists_equal_the_cpu(strategy, monkeypatch):
    """Flat posteriors and little room: rows are scanned in parts, lists are pruned on the way."""
    monkeypatch.setattr(cuda_engine, "MOST_LABELS", 7)
    networks = TableNetworks(90, (0, 1, 2), seed=7, sharpness=0.2, blank_bias=0.0)
    for pruning in ("late", "early"):
        compare(strategy, networks, random_fusion(90), pruning_mode=pruning)


def test_full_node_buffers_equal_the_cpu(strategy, monkeypatch):
    monkeypatch.setattr(cuda_workspace, "NODE_CAPACITY", 1)
    compare(strategy, TableNetworks(V, (0, 1), seed=3), random_fusion(V), alignments=True)


def test_too_large_beam_is_refused(strategy):
    make, config = strategy
    decoder = make(TableNetworks(V), config(beam_size=1024, backend="cuda"))
    with pytest.raises(ValueError, match=r"backend is 'cuda' for tensors on cpu, .*: a beam of 1024"):
        decoder.decode(random_frames(1, 2, seed=0), [2])
    assert cuda_engine.why_not(PARAMS, 10**9) is None
    assert "exceed the 2^32" in cuda_engine.why_not(PARAMS._replace(beam_size=600, max_extensions=600), 10**9)


PARAMS = SearchParams(
    beam_size=8, vocab_size=2**20 - 1, num_durations=8, zero_duration=0, timed=True,
    blank_mode=LM_WEIGHTED_FULL, late=True, alignments=False, frame_by_frame=False,
    blank_ceiling=np.float32(1), max_symbols=10, max_extensions=8, gamma=np.float32(np.inf),
)  # fmt: skip


@pytest.mark.parametrize("durations", DURATIONS[:2], ids=str)
def test_utterances_wait_for_rows_of_the_prediction_network(strategy, monkeypatch, durations):
    """However few there are, and whoever comes first: only the steps become more."""
    networks, frames = TableNetworks(V, durations, seed=3, blank_bias=-1.0), random_frames(5, T, seed=3)
    steps, run = [], cuda_engine._Step.run

    def counted(step, **options):
        steps.append(step)
        run(step, **options)

    monkeypatch.setattr(cuda_engine._Step, "run", counted)
    make, config = strategy
    taken = []
    for rows in (4, 6, 32):
        monkeypatch.setattr(cuda_engine, "prediction_rows", lambda *_, rows=rows: rows)
        steps.clear()
        assert_equal(make, networks, config(beam_size=4, n_best=4), frames, [T, 0, 7, 9, T], random_fusion(V))
        taken.append(len(steps))
    assert taken[0] > taken[1] > taken[2]


def test_rows_of_a_waiting_utterance_go_to_others():
    """Rows are left for the third utterance, after the second one has found too few."""
    decoder = ALSDPlusPlus(TableNetworks(V), ALSDConfig(beam_size=4))
    params, row = decoder._params, (torch.float32, 2)
    work = RunWorkspace(WorkspaceShape(CPU, 3, 4, params.max_extensions, 8, 4, row, (row,)))
    counters, streams = np.zeros(3, records.STREAM_COUNTERS), np.zeros(3, records.STREAM_PARAMS)
    counters["activity"], counters["size"], counters["new_texts"] = records.WAITING, 1, [3, 2, 1]
    for name, values in (("counters", counters), ("streams", streams)):
        getattr(work, name).copy_(as_records(values))
    work.new_labels.copy_(torch.arange(12).view(3, 4))
    kernels = runtime().load(decoder.kernels, CPU, {"LOGIT": "float"})
    options = {"shared_bytes": cuda_engine.merge_bytes(params), "params": params}
    work.launch(kernels, records.MERGE, grid=3, block=32, handle=np.uint64(0), sets_condition=0, **options)
    found = work.counters.numpy().view(records.STREAM_COUNTERS)[:, 0]["activity"]
    assert [activity == records.WAITING for activity in found] == [False, True, False]
    assert work.labels.tolist() == [0, 1, 2, 8]
    assert int(work.taken_rows) == 4


def test_prediction_rows_grow_with_utterances_and_beam(monkeypatch):
    monkeypatch.setattr(records, "FEWEST_PREDICTION_ROWS", 128)

    def rows(utterances, beam_size, frame_by_frame=False):
        params = PARAMS._replace(beam_size=beam_size, frame_by_frame=frame_by_frame)
        return cuda_engine.prediction_rows(utterances, params)

    assert [rows(1, 4), rows(16, 8), rows(32, 6), rows(128, 6), rows(1, 300)] == [4, 128, 128, 384, 300]
    assert [rows(128, 6, True), rows(16, 8, True)] == [192, 128]
