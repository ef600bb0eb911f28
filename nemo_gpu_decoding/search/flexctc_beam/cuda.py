"""The GPU's engine: buffers and launches around `kernel.cu` and `finish.cu`. A batch is two launches.

    advance   one block per utterance reads the frames of a chunk: the search
    finish    one block per utterance puts results together: final weights, order, trace-back

Nothing but results is copied to the host. A `push` waits for the device once, to say whether a frame was
bad; `decode` waits for nothing but its results. In a steady state no memory is asked of the driver:
torch's allocator hands out again what the batch before had. Work goes to torch's current stream; who
pushes to the same streams from several CUDA streams must order them.

**Inside a CUDA graph.** While torch captures, `push` must neither wait nor ask the driver for memory. So
streams that are to be captured are opened with `capacity` and `device`; `lengths` is an integer tensor
on that device and is checked there; beams are advanced in place, so that every replay reads the next
chunk; and errors wait for `partial` or `close`: a stream with an error stands still until then. As
always with graphs, push once before capturing (to other streams), so that kernels are compiled:

    streams = decoder.open(8, capacity=2000, device="cuda")   # frames that a stream may have in total
    with torch.cuda.graph(graph):
        decoder.push(streams, log_probs, lengths)              # the caller fills both before a replay
"""

from __future__ import annotations

import numpy as np
import torch

from nemo_gpu_decoding.cuda.launch import as_records, runtime
from nemo_gpu_decoding.fusion.on_device import DeviceAutomaton, on_device, upload
from nemo_gpu_decoding.search.flexctc_beam import launch_shape as shapes
from nemo_gpu_decoding.search.flexctc_beam.cpu import HYPOTHESIS, MERGE_PREFIX
from nemo_gpu_decoding.search.flexctc_beam.device_results import DeviceResults
from nemo_gpu_decoding.search.flexctc_beam.engine import Found, Setup
from nemo_gpu_decoding.search.inputs import as_float32, checked_lengths, raise_bad_frame

DEFINES = {"HYPOTHESIS_BYTES": HYPOTHESIS.itemsize}


def why_not(setup: Setup, device: torch.device) -> str | None:
    """None if the kernels can do what `setup` asks for on `device`, else why not, in one line."""
    most_shared = runtime().shared_bytes(device)
    return shapes.why_not(setup.config.beam_size, setup.vocab_size + 1, most_shared)


class CUDAEngine:
    """See `engine.Engine`. Tensors of any device are taken; the search runs on one.

    Args:
        setup: what the streams are decoded with.
        device: of the first log-probs; on the CPU: the current GPU is taken.
        capacity: frames to make room for at once; more is made as they come, except inside graphs.
    """

    def __init__(self, setup: Setup, device: torch.device, capacity: int = 0) -> None:
        n, beam_size = len(setup), setup.config.beam_size
        self.device = runtime().device_for(device)
        if _is_capturing(self.device):
            raise ValueError(
                "streams were opened without device, expected open(n, capacity=..., device=...) for "
                "streams that are pushed to while a CUDA graph is captured"
            )
        self._setup = setup
        self._lm = on_device(setup.fusion.lm, self.device)
        self._boosting = _trees_on_device(setup, self.device)
        self._utterances = as_records(_utterances(setup)).to(self.device, non_blocking=True)
        self._beams = self._empty(n, beam_size, HYPOTHESIS.itemsize, dtype=torch.uint8)
        self._progress = torch.zeros(n, shapes.PROGRESS.itemsize, dtype=torch.uint8, device=self.device)
        self._frames = np.zeros(n, np.int64)  # read before the last `push` that waited
        self._most_frames = 0  # no utterance has read more
        self._capacity = 0
        self._history: dict[str, torch.Tensor] = {}
        self._grow_history(capacity)
        self._captured = False  # a graph knows the addresses of our buffers
        self._deferred: tuple[torch.Tensor, torch.Tensor] | None = None  # log-probs and lengths

    def takes(self, lengths: object) -> bool:
        return (
            isinstance(lengths, torch.Tensor)
            and lengths.device == self.device
            and lengths.ndim == 1
            and lengths.dtype in (torch.int32, torch.int64)
        )

    def push(
        self, log_probs: torch.Tensor, lengths: np.ndarray | torch.Tensor, *, deferred: bool = False
    ) -> None:
        if len(self._setup) == 0:
            return
        capturing = _is_capturing(self.device)
        if capturing:
            self._check_capturable(log_probs, lengths)
        elif not self._captured:
            self._make_room(lengths, log_probs.shape[1])
        values = self._as_read(log_probs)
        counts = lengths if isinstance(lengths, torch.Tensor) else torch.from_numpy(lengths)
        counts = counts.to(self.device, torch.int64, non_blocking=True).contiguous()
        in_place = capturing or deferred
        beams, progress = self._beams, self._progress
        if not in_place:
            beams, progress = torch.empty_like(beams), torch.empty_like(progress)
        self._launch_advance(values, counts, beams, progress)
        if capturing:
            self._captured = True
        elif deferred:
            self._deferred = (values, counts)
        else:
            reached = progress.cpu().numpy().view(shapes.PROGRESS)[:, 0]
            self._raise_errors(reached, values, counts)
            self._beams, self._progress, self._frames = beams, progress, reached["frames"].copy()
            self._most_frames = int(self._frames.max())

    def results(self, n_best: int, *, final: bool) -> Found:
        setup, n = self._setup, len(self._setup)
        room = self._capacity if self._captured else self._most_frames
        results = DeviceResults(n, n_best, room, setup.config.alignments, self.device)
        if n:
            self._launch_finish(results, n_best, room, final)
        found, reached = results.to_host()
        self._raise_errors(reached, *(self._deferred or (None, None)))
        return found

    # ---------------------------------------------------------------------------------- launches

    def _launch_advance(
        self, values: torch.Tensor, lengths: torch.Tensor, beams: torch.Tensor, progress: torch.Tensor
    ) -> None:
        setup, config, place = self._setup, self._setup.config, runtime()
        n, frames, columns = values.shape
        shape = shapes.launch_shape(
            config.beam_size, columns, values.element_size(), place.shared_bytes(self.device)
        )
        defines: dict[str, int | str] = {
            **DEFINES,
            "LOG_PROB": shapes.LOG_PROB_TYPES[values.dtype],
            "PREFIX": int(setup.merge == MERGE_PREFIX),
        }
        place.load("search/flexctc_beam/kernel.cu", self.device, defines).launch(
            shapes.advance_signature(values.dtype),
            grid=n,
            block=shape.threads,
            shared_bytes=shape.shared_bytes(config.beam_size),
            log_probs=values,
            lengths=lengths,
            utterances=self._utterances,
            beams=self._beams,
            progress=self._progress,
            next_beams=beams,
            next_progress=progress,
            **self._history,
            lm_states=self._lm.states,
            lm_arcs=self._lm.arcs,
            boosting_states=self._boosting.states,
            boosting_arcs=self._boosting.arcs,
            frames=frames,
            columns=columns,
            capacity=self._capacity,
            beam_size=config.beam_size,
            blank_id=setup.blank_id,
            merge=setup.merge,
            beam_beta=config.beam_beta,
            threshold=config.beam_threshold,
            max_candidates=shape.candidates,
            max_labels=shape.labels,
            max_pairs=shape.pairs,
            row_bytes=shape.row_bytes,
        )

    def _launch_finish(self, results: DeviceResults, n_best: int, room: int, final: bool) -> None:
        setup, beam_size, place = self._setup, self._setup.config.beam_size, runtime()
        tile_frames, shared_bytes = shapes.finish_shape(beam_size, place.shared_bytes(self.device))
        place.load("search/flexctc_beam/finish.cu", self.device, DEFINES).launch(
            shapes.FINISH,
            grid=len(setup),
            block=shapes.FINISH_THREADS,
            shared_bytes=shared_bytes,
            utterances=self._utterances,
            beams=self._beams,
            progress=self._progress,
            **self._history,
            lm_states=self._lm.states,
            boosting_states=self._boosting.states,
            **results.arrays,
            capacity=self._capacity,
            beam_size=beam_size,
            n_best=n_best,
            room=room,
            blank_id=setup.blank_id,
            merge=setup.merge,
            final=final,
            tile_frames=tile_frames,
        )

    # ----------------------------------------------------------------------------------- buffers

    def _as_read(self, log_probs: torch.Tensor) -> torch.Tensor:
        """The log-probs in a form that the kernel reads; as they are, if possible."""
        dtype = log_probs.dtype if log_probs.dtype in shapes.LOG_PROB_TYPES else torch.float32
        return log_probs.detach().to(self.device, dtype, non_blocking=True).contiguous()

    def _make_room(self, lengths: np.ndarray | torch.Tensor, frames: int) -> None:
        """Let the history hold what this chunk may bring, without waiting for the device."""
        if isinstance(lengths, torch.Tensor):
            self._most_frames += frames
        else:
            self._most_frames = max(self._most_frames, int((self._frames + lengths).max()))
        if self._most_frames > self._capacity:
            self._grow_history(max(self._most_frames, 2 * self._capacity))

    def _grow_history(self, capacity: int) -> None:
        n, beam_size, old = len(self._setup), self._setup.config.beam_size, self._history
        self._history = {
            "history_labels": self._empty(n, capacity, beam_size, dtype=torch.int32),
            "history_parents": self._empty(n, capacity, beam_size, dtype=torch.int16),
            "history_log_probs": self._empty(n, capacity, beam_size, dtype=torch.float32),
        }
        for name, values in old.items():
            self._history[name][:, : self._capacity] = values
        self._capacity = capacity

    def _empty(self, *shape: int, dtype: torch.dtype) -> torch.Tensor:
        return torch.empty(shape, dtype=dtype, device=self.device)

    # ------------------------------------------------------------------------------------ errors

    def _check_capturable(self, log_probs: torch.Tensor, lengths: np.ndarray | torch.Tensor) -> None:
        if not isinstance(lengths, torch.Tensor):
            raise ValueError(
                "lengths came from the host while a CUDA graph is captured, "
                f"expected an integer tensor on {self.device}"
            )
        if log_probs.device != self.device:
            raise ValueError(
                f"log_probs is on {log_probs.device} while a CUDA graph is captured, "
                f"expected {self.device}"
            )

    def _raise_errors(
        self, reached: np.ndarray, values: torch.Tensor | None, lengths: torch.Tensor | None
    ) -> None:
        """Raise what the first utterance with a status other than 0 met.

        `values` and `lengths`: of the push that met it, if it is known.
        """
        bad = np.flatnonzero(reached["status"])
        if len(bad) == 0:
            return
        b = int(bad[0])
        status, frame = int(reached["status"][b]), int(reached["frames"][b])
        if values is None or lengths is None or self._captured:
            raise ValueError(_met_in_a_graph(b, status, frame, self._capacity))
        if status == shapes.BAD_LENGTH:
            checked_lengths(lengths, len(reached), values.shape[1])
        raise_bad_frame(as_float32(values), b, frame - int(self._frames[b]))


def _met_in_a_graph(b: int, status: int, frame: int, capacity: int) -> str:
    """What is wrong with stream b, when its input is no longer there to be looked at."""
    return {
        shapes.BAD_INPUT: f"log_probs of stream {b} held NaN or +inf in frame {frame}, counted from the "
        "stream's first: valid frames must hold neither",
        shapes.NO_LABEL_POSSIBLE: f"log_probs of stream {b} left no label possible in frame {frame}, "
        "counted from the stream's first",
        shapes.BAD_LENGTH: f"lengths[{b}] was below 0 or beyond T of log_probs after frame {frame}",
        shapes.HISTORY_FULL: f"stream {b} got more than the {capacity} frames (capacity) it was opened "
        f"for, after frame {frame}",
    }[status]


def _utterances(setup: Setup) -> np.ndarray:
    records = np.zeros(len(setup), shapes.UTTERANCE)
    records["lm_start"] = setup.fusion.lm_starts
    records["boosting_start"] = setup.fusion.boosting_starts
    records["lm_weight"] = setup.fusion.lm_weights
    records["boosting_weight"] = setup.fusion.boosting_weights
    return records


def _trees_on_device(setup: Setup, device: torch.device) -> DeviceAutomaton:
    """One tree for all is uploaded once and for all; several are joined and uploaded for this batch."""
    if len(setup.fusion.trees) == 1:
        return on_device(setup.fusion.trees[0], device)
    return upload(setup.fusion.boosting, device)


def _is_capturing(device: torch.device) -> bool:
    return device.type == "cuda" and torch.cuda.is_current_stream_capturing()
