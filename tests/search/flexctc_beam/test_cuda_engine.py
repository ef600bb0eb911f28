"""What surrounds the kernels: launches, uploads, room for frames, lengths on the device, CUDA graphs."""

from types import SimpleNamespace

import pytest
import torch

from nemo_gpu_decoding.cuda import upload
from nemo_gpu_decoding.fusion.batch import on_device
from nemo_gpu_decoding.search.flexctc_beam import cuda_engine
from tests.contract.subject import all_facts
from tests.cuda_emulator.emulator import EmulatedModule
from tests.random_models import random_log_probs
from tests.search.flexctc_beam.both import on_cuda, random_fusion
from tests.search.pushes import Operators

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("emulated_runtime", "small_blocks")]

V, T = 12, 24
LENGTHS = [24, 0, 17]


@pytest.fixture
def decoder():
    return on_cuda(V, V, random_fusion(V), beam_size=6, n_best=3)


@pytest.fixture
def log_probs():
    return random_log_probs(3, T, V + 1, seed=1)


@pytest.fixture
def expected(decoder, log_probs):
    return all_facts(decoder.decode(log_probs, LENGTHS))


def test_automata_are_uploaded_once_and_not_kept_longer_than_needed(log_probs, monkeypatch):
    uploads = []
    as_records = upload.as_records
    monkeypatch.setattr(upload, "as_records", lambda array: uploads.append(array) or as_records(array))
    kept = len(upload._uploaded)
    decoder = on_cuda(V, V, random_fusion(V, seed=7))
    for _ in range(3):
        decoder.decode(log_probs, LENGTHS)
    assert len(uploads) == 4  # states and arcs of both
    assert len(upload._uploaded) == kept + 2
    del decoder
    uploads.clear()
    assert len(upload._uploaded) == kept


def test_automata_outlive_kernels_that_still_run(log_probs, monkeypatch):
    kept = []
    monkeypatch.setattr(cuda_engine, "outlive_kernels", kept.extend)
    decoder = on_cuda(V, V, random_fusion(V, seed=7))
    streams = decoder.open(3)
    decoder.push(streams, log_probs, LENGTHS)
    assert not kept  # it has waited for the results
    decoder.decode(log_probs, LENGTHS)
    device = torch.device("cpu")
    automata = on_device(decoder.fusion.lm, device), on_device(decoder.fusion.boosting, device)
    assert [table.data_ptr() for table in kept] == [table.data_ptr() for parts in automata for table in parts]


def test_memory_is_kept_for_the_stream_that_reads_it(monkeypatch):
    streams = []
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: f"stream of {device}")
    table = SimpleNamespace(device=torch.device("cuda", 1), record_stream=streams.append)
    upload.outlive_kernels([table, torch.zeros(1)])
    assert streams == ["stream of cuda:1"]


@pytest.mark.parametrize("capturing", [False, True])
def test_no_synchronisation_while_capturing(monkeypatch, capturing):
    waited = []
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: capturing)
    monkeypatch.setattr(torch.cuda, "synchronize", waited.append)
    upload.synchronize_unless_capturing("cuda:1")
    assert waited == ([] if capturing else ["cuda:1"])


def test_back_pointers_grow_as_frames_come(decoder, log_probs, expected):
    streams = decoder.open(3)
    sizes = []
    for t in range(T):
        decoder.push(streams, log_probs[:, t : t + 1], [int(t < length) for length in LENGTHS])
        sizes.append(streams.engine._capacity)
    assert all_facts(decoder.close(streams)) == expected
    assert sorted(set(sizes)) == [1, 2, 4, 8, 16, 32]


def test_pushes_allocate_nothing_and_copy_once(decoder, log_probs, expected, emulated_runtime, monkeypatch):
    """From the second push on; each push is a frame of 80 ms. Opening the streams allocates the back-pointers."""
    streams = decoder.open(3, capacity=T, device="cpu")
    copies = []
    to_host = torch.Tensor.cpu
    monkeypatch.setattr(torch.Tensor, "cpu", lambda tensor: copies.append(tensor.shape) or to_host(tensor))
    for t in range(T):
        before = emulated_runtime.launches
        copies.clear()
        with Operators() as operators:
            decoder.push(streams, log_probs[:, t : t + 1], [int(t < length) for length in LENGTHS])
        assert emulated_runtime.launches == before + 1
        assert len(copies) == 1
        allocated = [name for name in operators.names if name.startswith(("empty", "new_", "zeros", "ones", "clone"))]
        assert len(allocated) == (2 if t == 0 else 0), operators.names
    monkeypatch.undo()
    assert all_facts(decoder.close(streams)) == expected


# ---------------------------------------------------------------------- lengths on the device
@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
def test_lengths_on_the_device_give_the_same_results(decoder, log_probs, expected, dtype):
    lengths = torch.tensor(LENGTHS, dtype=dtype)
    assert decoder.open(3, device="cpu").engine.accepts_device_lengths(lengths)
    assert all_facts(decoder.decode(log_probs, lengths)) == expected
    streams = decoder.open(3)
    for begin in range(0, T, 6):
        decoder.push(streams, log_probs[:, begin : begin + 6], (lengths - begin).clamp(0, 6))
    assert all_facts(decoder.close(streams)) == expected


@pytest.mark.parametrize("bad", [-1, T + 1])
def test_lengths_on_the_device_are_checked_there(decoder, log_probs, expected, bad):
    lengths = torch.tensor([24, bad, 17])
    message = rf"lengths\[1\] is {bad}, expected 0 \.\. {T}"
    with pytest.raises(ValueError, match=message):
        decoder.decode(log_probs, lengths)
    streams = decoder.open(3)
    with pytest.raises(ValueError, match=message):
        decoder.push(streams, log_probs, lengths)
    decoder.push(streams, log_probs, torch.tensor(LENGTHS))
    assert all_facts(decoder.close(streams)) == expected


@pytest.mark.parametrize("emulated_runtime", [{"check": True}], indirect=True, ids=["checked"])
def test_no_frame_of_an_empty_tensor_is_read(decoder, emulated_runtime):
    """Its address may be 0."""
    with pytest.raises(ValueError, match=r"lengths\[1\] is 2, expected 0 \.\. 0"):
        decoder.decode(torch.zeros(2, 0, V + 1), torch.tensor([0, 2]))


def test_streams_may_be_opened_in_inference_mode_and_used_outside(decoder, log_probs, expected):
    with torch.inference_mode():
        streams = decoder.open(3)
        decoder.push(streams, log_probs, LENGTHS)
    assert all_facts(decoder.close(streams)) == expected
    decoder.reopen(streams, [0, 1, 2])
    decoder.push(streams, log_probs, LENGTHS)
    assert all_facts(decoder.close(streams)) == expected


# ---------------------------------------------------------------------- inside a CUDA graph
class Graph:
    """Stands in for a CUDA graph: notes the launches of a captured push, to be run again."""

    def __init__(self, monkeypatch):
        self._patch = monkeypatch
        self._launches = []

    def capture(self, work):
        launch = EmulatedModule.launch
        with self._patch.context() as patch:
            patch.setattr(cuda_engine, "is_capturing", lambda device: True)
            patch.setattr(EmulatedModule, "launch", lambda *given, **more: self._note(launch, given, more))
            work()

    def _note(self, launch, given, more):
        self._launches.append(lambda: launch(*given, **more))

    def replay(self):
        for launch in self._launches:
            launch()


@pytest.fixture
def captured(decoder, monkeypatch):
    """Streams with room for T frames, the inputs of a push of 6 frames, and its graph."""
    streams = decoder.open(3, capacity=T, device="cpu")
    chunk, lengths = torch.zeros(3, 6, V + 1), torch.zeros(3, dtype=torch.int64)
    graph = Graph(monkeypatch)
    graph.capture(lambda: decoder.push(streams, chunk, lengths))
    return streams, chunk, lengths, graph


def replay_all(log_probs, captured):
    _, chunk, lengths, graph = captured
    for begin in range(0, T, 6):
        chunk.copy_(log_probs[:, begin : begin + 6])
        lengths.copy_((torch.tensor(LENGTHS) - begin).clamp(0, 6))
        graph.replay()


def test_a_captured_push_reads_a_chunk_per_replay(decoder, log_probs, expected, captured):
    streams = captured[0]
    replay_all(log_probs, captured)
    assert all_facts(decoder.partial(streams, n_best=3)) != expected  # no final weights
    assert all_facts(decoder.close(streams)) == expected


def test_push_after_the_graph_continues_its_streams(decoder, log_probs, expected, captured):
    streams, chunk, lengths, graph = captured
    chunk.copy_(log_probs[:, :6])
    lengths.copy_(torch.tensor([6, 0, 6]))
    graph.replay()
    decoder.push(streams, log_probs[:, 6:], [18, 0, 11])
    assert all_facts(decoder.close(streams)) == expected


@pytest.mark.parametrize(
    ("fault", "message"),
    [
        (lambda chunk, lengths: chunk[2, 3, 5].fill_(float("nan")), "stream 2 held NaN or .* frame 9"),
        (lambda chunk, lengths: chunk[0, 1].fill_(-float("inf")), "stream 0 left no label .* frame 7"),
        (lambda chunk, lengths: lengths[2].fill_(7), r"lengths\[2\] was below 0 or beyond T .* frame 6"),
    ],
)
def test_fault_in_a_graph_is_reported_by_partial_and_close(decoder, log_probs, captured, fault, message):
    streams, chunk, lengths, graph = captured
    chunk.copy_(log_probs[:, :6])
    lengths.copy_(torch.tensor([6, 0, 6]))
    graph.replay()
    fault(chunk, lengths)
    graph.replay()
    chunk.copy_(log_probs[:, :6])
    lengths.fill_(3)
    graph.replay()  # the stream at fault stands still
    for verb in (decoder.partial, decoder.close):
        with pytest.raises(ValueError, match=message):
            verb(streams)


def test_more_frames_than_a_graph_has_room_for(decoder, log_probs, captured):
    streams, _, lengths, graph = captured
    replay_all(log_probs, captured)
    lengths.copy_(torch.tensor([1, 0, 0]))
    graph.replay()
    with pytest.raises(ValueError, match=f"stream 0 got more than the {T} frames"):
        decoder.close(streams)


def test_push_after_the_graph_reports_its_fault(decoder, log_probs, captured):
    streams, chunk, lengths, graph = captured
    chunk.fill_(float("nan"))
    lengths.copy_(torch.tensor([0, 0, 1]))
    graph.replay()
    with pytest.raises(ValueError, match=r"stream 2 held NaN or .* frame 0"):
        decoder.push(streams, log_probs, [0, 0, 0])


def test_a_graph_needs_a_device_and_lengths_there(decoder, log_probs, monkeypatch):
    streams = decoder.open(3, capacity=T, device="cpu")
    monkeypatch.setattr(cuda_engine, "is_capturing", lambda device: True)
    with pytest.raises(ValueError, match="lengths came from the host while a CUDA graph is captured"):
        decoder.push(streams, log_probs, LENGTHS)
    with pytest.raises(ValueError, match="streams were opened without device"):
        decoder.push(decoder.open(3), log_probs, torch.tensor(LENGTHS))


def test_shared_memory_is_enough_for_any_shape(log_probs, emulated_runtime):
    """The checker knows what was asked for: a byte beyond it is an error."""
    emulated_runtime.check = True
    for beam_size in (1, 3, 17):
        for columns in (2, 9, 40):
            for dtype in (torch.float32, torch.float16):
                decoder = on_cuda(columns - 1, 0, beam_size=beam_size)
                decoder.decode(random_log_probs(1, 3, columns, seed=2).to(dtype), [3])
    assert cuda_engine.finish_sizes(128, 200_000)[1] < 48 * 1024
