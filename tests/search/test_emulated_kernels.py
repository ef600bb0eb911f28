"""Each kernel in one variant: the emulator finds what the CPU finds. All variants are in the tests of each search."""

import pytest
import torch

from nemo_gpu_decoding.cuda.compile import kernel_files
from nemo_gpu_decoding.search.transducer.cuda_networks import PredictionPaths
from tests.contract.subject import all_facts
from tests.cuda_emulator.emulator import EmulatedModule
from tests.graph.toy import PIECES
from tests.random_models import random_log_probs
from tests.search.flexctc_beam import both as ctc
from tests.search.transducer import table_networks as tables
from tests.search.transducer.test_cuda_networks import TextsInMemory, assert_outputs, lstm_networks, lstm_output
from tests.search.word_graph import both as word_graph
from tests.search.word_graph.models import make, toy_graph


def run_flexctc():
    log_probs = random_log_probs(2, 8, 31, seed=1, sharpness=1.0)
    ctc.assert_equal(log_probs, [8, 5], fusion=ctc.random_fusion(30), beam_size=5, n_best=5)


def run_transducer(strategy):
    networks = tables.TableNetworks(20, (0, 1, 2), seed=1, sharpness=1.0, blank_bias=0.0)
    decoder, config = tables.STRATEGIES[strategy]
    frames, options = tables.random_frames(2, 5, seed=1), config(beam_size=4, n_best=4, alignments=True)
    tables.assert_equal(decoder, networks, options, frames, [5, 3], tables.random_fusion(20))


def run_networks():
    networks = lstm_networks()
    with torch.inference_mode():
        memory = TextsInMemory(networks)
        memory.run(PredictionPaths(networks).on(memory.work))
        assert_outputs(memory, lambda text: lstm_output(networks, text))


def run_cuda_wfst():
    """In two chunks; the records of the first one are compacted to make room for the second."""
    log_probs, results = random_log_probs(1, 12, len(PIECES) + 1, seed=1), []
    for backend in ("cpu", "cuda"):
        decoder = make(toy_graph(0), backend=backend, beam=9.0, max_active=200)
        streams = decoder.open(1)
        decoder.push(streams, log_probs[:, :6], [6])
        if backend == "cuda":
            state = streams.engine._state
            full = int(state.counters["back_pointers"].max())
            streams.engine._state = state._replace(back_pointers=state.back_pointers[:, :full].contiguous())
        decoder.push(streams, log_probs[:, 6:], [6])
        results.append(all_facts(decoder.close(streams)))
    assert results[0] == results[1]


def run_paged_biglm():
    graph, lms = word_graph.random_case(1)
    log_probs = random_log_probs(2, 5, word_graph.RANDOM_COLUMNS, seed=1, sharpness=0.7)
    word_graph.assert_equal_paged(graph, lms, log_probs, [5, 3], topology="normal", beam=8.0, chunk=3)


# what is run, and the kernel files that it launches, without their folder
CASES = {
    "flexctc_beam": (run_flexctc, {"kernel", "finish"}),
    "transducer": (lambda: run_transducer("alsd_pp"), {"alsd", "schedule"}),
    "transducer aes": (lambda: run_transducer("aes_pp"), {"aes", "schedule"}),
    "transducer networks": (run_networks, {"networks"}),
    "word_graph": (run_cuda_wfst, {"kernel", "best_path", "compact"}),
    "word_graph with a large LM": (run_paged_biglm, {"kernel", "best_path", "compact"}),
}


def files_of(case):
    return {f"search/{case.split()[0]}/{name}.cu" for name in CASES[case][1]}


def test_every_kernel_is_emulated():
    assert set().union(*map(files_of, CASES)) == set(kernel_files())


@pytest.mark.parametrize("case", CASES)
def test_a_kernel_finds_what_the_cpu_finds(case, emulated_runtime, small_blocks, monkeypatch):
    if case.startswith("word_graph"):
        pytest.importorskip("kaldifst")
    launched, launch = set(), EmulatedModule.launch

    def noted(module, *given, **named):
        launched.add(module.source)
        launch(module, *given, **named)

    monkeypatch.setattr(EmulatedModule, "launch", noted)
    CASES[case][0]()
    assert launched == files_of(case)
