"""Launch `kernel.cu` and `finish.cu` with their buffers (`CUDAEngine`). A batch takes two kernel launches:

    advance   one block per utterance searches the frames of a chunk
    finish    one block per utterance computes its results: final weights, order, trace-back

Only results are copied to the host. `push` waits for the device once, to report a bad frame; `decode` waits only for
its results. torch's allocator reuses the memory of earlier batches. Work is queued on torch's
current stream; callers that push to the same streams from several CUDA streams must order the pushes.

**Inside a CUDA graph.** While torch captures, `push` must neither wait nor allocate memory from the driver. Therefore
open the streams with `capacity` and `device`, and give `lengths` as an integer tensor on that device, where it is
checked. Beams are advanced in place, so that every replay reads the next chunk. Errors are raised by `partial` or
`close`; a stream with an error stops until then. Before capturing, push once to other streams to compile the kernels:

    streams = decoder.open(8, capacity=2000, device="cuda")   # frames that a stream may have in total
    with torch.cuda.graph(graph):
        decoder.push(streams, log_probs, lengths)              # the caller fills both before a replay
"""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch

from nemo_gpu_decoding.cuda.launch import Signature, Tensor, as_records, runtime
from nemo_gpu_decoding.cuda.signature import FLOAT_TYPES
from nemo_gpu_decoding.cuda.upload import Exchange, outlive_kernels
from nemo_gpu_decoding.cuda.while_graph import is_capturing
from nemo_gpu_decoding.fusion.batch import BatchFusion, on_device, trees_on_device
from nemo_gpu_decoding.search import inputs
from nemo_gpu_decoding.search.engine import BadRow, Streams
from nemo_gpu_decoding.search.flexctc_beam import records
from nemo_gpu_decoding.search.flexctc_beam.backpointers import Traces
from nemo_gpu_decoding.search.flexctc_beam.config import FlexCTCConfig
from nemo_gpu_decoding.search.flexctc_beam.finish import FlexCTCEngine, FlexCTCNBest
from nemo_gpu_decoding.search.flexctc_beam.records import HYPOTHESIS, PROGRESS, ListSizes, SearchParams

THREADS = 256  # per block of `advance`
FINISH_THREADS = 128
MAX_LABELS = 4096  # columns that are scanned together; 4 bytes each
MAX_PAIRS = 1024  # (label, hypothesis) pairs that are tested together; 4 bytes each
TILE_BYTES = 16 * 1024  # of the back-pointers that `finish` walks through


def why_not(beam_size: int, columns: int, device: torch.device) -> str | None:
    """Return None if the kernels can search with this beam on `device`, else the reason in one line."""
    if 2 * beam_size * columns > 2**32:
        return f"2 x beam {beam_size} x {columns} columns exceed the 2^32 that kernels can number"
    most_shared = runtime().shared_bytes(device)
    return inputs.why_too_large(beam_size, list_sizes(beam_size, columns, 2, most_shared)[2], most_shared)


def list_sizes(beam_size: int, columns: int, item_bytes: int, most_shared: int) -> tuple[ListSizes, int, int]:
    """Return list sizes for rows of `columns` numbers (`item_bytes` each) in `most_shared` bytes of shared memory.

    Returns:
        The sizes; the number of rows in shared memory, 0 if rows stay in global memory; all bytes of shared memory.
    """
    sizes = ListSizes(2 * beam_size + THREADS, min(columns, MAX_LABELS), MAX_PAIRS)
    fixed = shared_bytes(beam_size, sizes)
    rows, in_rows = inputs.rows_in_shared_memory(columns, item_bytes, most_shared - fixed)
    return sizes, rows, fixed + in_rows


def shared_bytes(beam_size: int, sizes: ListSizes) -> int:
    """Return a block's bytes of dynamic shared memory in `advance`, without rows, as `Workspace` in frame.cuh."""
    key = 8
    lists = (sizes.candidates + beam_size) * (records.CANDIDATE_ITEM.itemsize + key)
    beams = beam_size * (2 * HYPOTHESIS.itemsize + records.KEPT_TEXT.itemsize)
    numbers = 4 * (sizes.labels + sizes.pairs + 3 * beam_size)
    return -(-(records.COUNTERS.itemsize + lists + beams + numbers) // 16) * 16


def finish_sizes(beam_size: int, most_shared: int) -> tuple[int, int]:
    """Return the frames of a tile and the bytes of shared memory for a launch of `finish`."""
    per_frame = beam_size * (4 + 4 + 2)
    hypotheses = beam_size * (HYPOTHESIS.itemsize + 3 * 4)
    tile_frames = max(1, min(TILE_BYTES, most_shared - hypotheses) // per_frame)
    return tile_frames, hypotheses + tile_frames * per_frame


class CUDAEngine(FlexCTCEngine):
    """An engine that searches on one GPU, see `engine.Engine`. Inputs may be on any device.

    Args:
        config, params: options of all streams.
        streams: the fusion and the buffers' capacity in frames. Buffers grow, except inside CUDA graphs.
        device: device of the first log-probs; for the CPU, the current GPU is used.
    """

    def __init__(self, config: FlexCTCConfig, params: SearchParams, streams: Streams, device: torch.device) -> None:
        n, beam_size = len(streams), config.beam_size
        self.device = runtime().device_for(device)
        if is_capturing(self.device):
            raise ValueError(
                "streams were opened without device, expected open(n, capacity=..., device=...) for "
                "streams that are pushed to while a CUDA graph is captured"
            )
        super().__init__(config, params, streams.fusion)
        self._n = n
        self._lm = on_device(streams.fusion.lm, self.device)
        self._boosting = trees_on_device(streams.fusion, self.device)
        self._utterances = as_records(streams.fusion.arrays.utterances).to(self.device, non_blocking=True)
        self._beams = self._empty(n, beam_size, HYPOTHESIS.itemsize, dtype=torch.uint8)
        self._progress = torch.zeros(n, PROGRESS.itemsize, dtype=torch.uint8, device=self.device)
        # what the next push writes; a push that fails leaves the streams unchanged
        self._spare: tuple[torch.Tensor, torch.Tensor] | None = None
        self._frames = np.zeros(n, np.int64)  # frames read, as of the last `push` that waited
        self._most_frames = 0  # upper bound of the frames read by any utterance
        self._capacity = 0
        self._back_pointers: dict[str, torch.Tensor] = {}
        self._grow(streams.capacity)
        self._captured = False  # a graph contains the addresses of the buffers
        self._deferred: tuple[torch.Tensor, torch.Tensor] | None = None  # log-probs and lengths

    def accepts_device_lengths(self, lengths: torch.Tensor) -> bool:
        is_integer = lengths.dtype in (torch.int32, torch.int64)
        return lengths.device == self.device and lengths.ndim == 1 and is_integer

    @torch.inference_mode()  # the buffers of streams that were opened in it may not be changed outside
    def push(self, log_probs: torch.Tensor, lengths: np.ndarray | torch.Tensor, *, deferred: bool = False) -> None:
        capturing = is_capturing(self.device)
        if capturing:
            self._check_capturable(log_probs, lengths)
        elif not self._captured:
            self._grow_for(lengths, log_probs.shape[1])
        values = inputs.for_kernels(log_probs, self.device)
        counts = lengths if isinstance(lengths, torch.Tensor) else torch.from_numpy(lengths)
        counts = counts.to(self.device, torch.int64, non_blocking=True).contiguous()
        in_place = capturing or deferred
        beams, progress = self._beams, self._progress
        if not in_place:
            beams, progress = self._spare or (torch.empty_like(beams), torch.empty_like(progress))
        beam_size, most_shared = self._config.beam_size, runtime().shared_bytes(self.device)
        sizes, shared_rows, needed = list_sizes(beam_size, values.shape[2], values.element_size(), most_shared)
        self._launch(
            "kernel",
            records.ADVANCE,
            {"LOG_PROB": FLOAT_TYPES[values.dtype], "PREFIX": int(self._params.merge == records.MERGE_PREFIX)},
            grid=self._n,
            block=THREADS,
            shared_bytes=needed,
            log_probs=values,
            lengths=counts,
            next_beams=beams,
            next_progress=progress,
            sizes=sizes,
            frames=values.shape[1],
            shared_rows=shared_rows,
        )
        if in_place:  # the host does not wait for the kernel
            outlive_kernels((*self._lm, *self._boosting))
        if capturing:
            self._captured = True
        elif deferred:
            self._deferred = (values, counts)
        else:
            reached = progress.cpu().numpy().view(PROGRESS)[:, 0]
            self._raise_errors(range(self._n), reached, values, counts)
            self._spare = self._beams, self._progress
            self._beams, self._progress, self._frames = beams, progress, reached["frames"].copy()
            self._most_frames = int(self._frames.max())

    def results(self, rows: Sequence[int], n_best: int, *, final: bool) -> FlexCTCNBest:
        numbers = np.array(rows, np.int64)
        committed, dropped = [self._committed[b] for b in rows], self._dropped[numbers]
        first = np.array([tokens.frames for tokens in committed], np.int64)
        most = self._capacity if self._captured else self._most_frames
        if self._deferred is None and not self._captured:
            most = int((self._frames[numbers] + dropped - first).max(initial=0))
        sizes = {"R": len(rows), "N": n_best, "T": most}
        arrays = {
            name: (np.dtype(tensor.dtype), tuple(sizes[str(axis)] for axis in tensor.shape))
            for name, tensor in _RESULTS.items()
            if not tensor.optional or self._config.alignments
        }
        results = Exchange(arrays, self.device, torch.empty)
        tile_frames, needed = finish_sizes(self._config.beam_size, runtime().shared_bytes(self.device))
        self._launch(
            "finish",
            records.FINISH,
            grid=len(rows),
            block=FINISH_THREADS,
            shared_bytes=needed,
            rows=torch.from_numpy(numbers.astype(np.int32)).to(self.device),
            first=torch.from_numpy(first - dropped).to(self.device),
            **dict.fromkeys(_RESULTS.keys() - arrays.keys()),
            **results.on_device,
            n_best=n_best,
            max_tokens=most,
            final=final,
            tile_frames=tile_frames,
        )
        results.fetch()  # waits for the device
        got = results.on_host
        reached = got["reached"]
        self._raise_errors(rows, reached, *(self._deferred or (None, None)))
        got["frames"] += dropped[:, None, None].astype(np.int32)
        got["scores"] += reached["offset"][:, None].astype(np.float32)
        return FlexCTCNBest(
            numbers,
            reached["frames"] + dropped,  # the device does not count the frames that were dropped
            got["order"],
            got["scores"],
            got["without_final"].astype(bool),
            Traces(*(got.get(name, got["tokens"][..., :0]) for name in Traces._fields)),  # no alignments: T = 0
            got["shared"] + dropped,
            committed,
        )

    def commit(self, rows: Sequence[int]) -> None:
        if not self._captured:  # a graph contains the addresses and sizes of the buffers
            super().commit(rows)

    @torch.inference_mode()
    def restart(self, rows: Sequence[int], fusion: BatchFusion) -> None:
        if self._captured and fusion.trees != self._fusion.trees:
            raise ValueError(
                "requests have other boosting trees than the CUDA graph that was captured knows, expected "
                "the same trees in the same streams"
            )
        # in place, because a graph contains the addresses of these buffers
        moved = self._fusion.moved_states(fusion)
        if moved.any():
            beams = self._beams.cpu().numpy().view(HYPOTHESIS)[..., 0]
            beams["boosting_state"] += moved[:, None]
            self._beams.copy_(as_records(beams))
        self._utterances.copy_(as_records(fusion.arrays.utterances))
        self._progress[list(rows)] = 0
        if fusion.trees != self._fusion.trees:
            self._boosting = trees_on_device(fusion, self.device)
        super().restart(rows, fusion)
        self._frames[rows] = 0
        self._most_frames = int(self._frames.max())

    # ---------------------------------------------------------------------------------- launches

    def _launch(
        self, source: str, signature: Signature, defines: Mapping[str, Any] | None = None, **others: Any
    ) -> None:
        """Launch a kernel; `others` are its arguments besides the state of the streams, and options of the launch."""
        arguments = {
            "utterances": self._utterances,
            "beams": self._beams,
            "progress": self._progress,
            **self._back_pointers,
            **{f"lm_{name}": table for name, table in self._lm._asdict().items()},
            **{f"boosting_{name}": table for name, table in self._boosting._asdict().items()},
            "params": self._params,
            "capacity": self._capacity,
            "beam_size": self._config.beam_size,
        }
        arguments = {name: value for name, value in arguments.items() if name in signature.parameters}
        kernels = runtime().load(f"search/flexctc_beam/{source}.cu", self.device, defines)
        kernels.launch(signature, **arguments, **others)

    # ----------------------------------------------------------------------------------- buffers

    def _grow_for(self, lengths: np.ndarray | torch.Tensor, frames: int) -> None:
        """Grow the back-pointers for the frames of this chunk, without waiting for the device."""
        if isinstance(lengths, torch.Tensor):
            self._most_frames += frames
        else:
            self._most_frames = max(self._most_frames, int((self._frames + lengths).max()))
            self._most_frames = self._frames_needed(self._most_frames, self._capacity, lengths)
        if self._most_frames > self._capacity:
            self._grow(max(self._most_frames, 2 * self._capacity))

    def _drop(self, dropped: np.ndarray) -> np.ndarray:
        for b in np.flatnonzero(dropped).tolist():
            for values in self._back_pointers.values():
                values[b, : self._frames[b] - dropped[b]] = values[b, dropped[b] : self._frames[b]].clone()
        progress = self._progress.cpu().numpy().view(PROGRESS)
        progress["frames"] -= dropped[:, None]
        self._progress.copy_(as_records(progress[:, 0]))
        self._frames = self._frames - dropped
        return self._frames

    def _grow(self, capacity: int) -> None:
        old = self._back_pointers
        self._back_pointers = {
            name: self._empty(self._n, capacity, self._config.beam_size, dtype=tensor.layout.dtypes[0])
            for name, tensor in records.BACK_POINTER_ARRAYS.items()
        }
        for name, values in old.items():
            self._back_pointers[name][:, : self._capacity] = values
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
                f"log_probs is on {log_probs.device} while a CUDA graph is captured, expected {self.device}"
            )

    def _raise_errors(
        self, rows: Sequence[int], reached: np.ndarray, values: torch.Tensor | None, lengths: torch.Tensor | None
    ) -> None:
        """Raise the error of the first utterance whose status is not 0.

        Args:
            reached: PROGRESS of the utterances `rows`.
            values, lengths: arguments of the push in which the error occurred, if known.
        """
        bad = np.flatnonzero(reached["status"])
        if len(bad) == 0:
            return
        b, status = int(rows[bad[0]]), int(reached["status"][bad[0]])
        frame = int(reached["frames"][bad[0]])
        if values is None or lengths is None or self._captured:
            raise BadRow(b, _met_in_a_graph(b, status, frame + int(self._dropped[b]), self._capacity))
        if status == records.BAD_LENGTH:
            inputs.checked_lengths(lengths, self._n, values.shape[1])
        inputs.raise_bad_frame(inputs.as_float32(values), b, frame - int(self._frames[b]))


def _met_in_a_graph(b: int, status: int, frame: int, capacity: int) -> str:
    """Return the error message of stream b, whose input is no longer available."""
    return {
        records.BAD_INPUT: f"log_probs of stream {b} held NaN or a value above 0 in frame {frame}, counted "
        "from the stream's first, expected natural log-probabilities in every valid frame",
        records.NO_LABEL_POSSIBLE: f"log_probs of stream {b} left no label possible in frame {frame}, "
        "counted from the stream's first",
        records.BAD_LENGTH: f"lengths[{b}] was below 0 or beyond T of log_probs after frame {frame}",
        records.BACK_POINTERS_FULL: f"stream {b} got more than the {capacity} frames (capacity) it "
        f"was opened for, after frame {frame}",
    }[status]


# The outputs of `finish`
_RESULTS = {
    name: tensor
    for name, tensor in records.FINISH.parameters.items()
    if isinstance(tensor, Tensor) and tensor.shape[0] == "R" and tensor.written
}
