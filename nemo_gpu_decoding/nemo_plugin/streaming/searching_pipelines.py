"""Subclasses of NeMo's CTC pipelines of `nemo.collections.asr.inference` that search.

`hooks.py` maps NeMo's pipelines to these classes; `searching_transducers.py` has those of transducers.
"""

from __future__ import annotations

import contextlib
import re
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

from nemo.collections.asr.inference.utils.pipeline_utils import ids_to_text_without_stripping
from nemo.collections.asr.parts.context_biasing.biasing_multi_model import BiasingRequestItemConfig
from nemo.utils import logging
from torch import Tensor

from nemo_gpu_decoding.checks import fields_named
from nemo_gpu_decoding.fusion.fusion import Request
from nemo_gpu_decoding.fusion.phrases import Aliases
from nemo_gpu_decoding.live.endpointing import StreamProgress, find_endpoint, progress_of
from nemo_gpu_decoding.live.slots import Slots
from nemo_gpu_decoding.nemo_plugin.requests import biasing_request
from nemo_gpu_decoding.search.result import NBest, Path

MOST_AT_FIRST = 64  # largest number of slots that a pipeline allocates at first


@dataclass
class StreamRequest(BiasingRequestItemConfig):
    """The request of a stream, for NeMo's `ASRRequestOptions.biasing_cfg`; phrases here replace the request's."""

    request: Request | None = None

    def is_empty(self) -> bool:
        return self.request is None and super().is_empty()


# Functions create these classes with one base each, because Python changes an object's class only between
# equal memory layouts.


def in_slots(base: Any) -> type:
    """A pipeline that searches its utterances in one `Slots`, its attribute `slots`.

    If a stream has an invalid frame (NaN), it ends there with its text so far. The `error` of this step's output is
    a ValueError that names the stream; else it is None. Later outputs of the stream are empty.

    Outputs also have `committed_transcript`, the beginning of `partial_transcript` that does not change. Their
    `n_best` is the `NBest` of the utterance that ended in this step, or None. Aliases of phrases are replaced in all
    of them but `current_step_transcript`. Words that may become an alias are not committed.
    """

    class InSlots(base):
        def create_state(self, options: Any) -> Any:
            state = super().create_state(options)
            state.slot = state.error = None
            state.aliases = self.aliases_of(state.options)
            state.committed = 0  # number of first tokens that do not change; None: unknown
            if self.rules is not None:
                state.options.stop_history_eou = -1
            return state

        def delete_state(self, stream_id: int) -> None:
            state = self.get_state(stream_id)
            if state is not None and state.slot is not None:
                self.slots.abandon([state.slot])
            if state is not None:
                self.gone[stream_id] = state
            super().delete_state(stream_id)

        def reset_session(self) -> None:
            super().reset_session()
            self.slots = Slots(self.decoder(), first=min(int(self.batch_size), MOST_AT_FIRST))
            self.errors: dict[int, ValueError] = {}  # of this step, by stream
            self.ended: dict[int, NBest] = {}  # utterances that ended in this step, by stream
            self.gone: dict[int, Any] = {}  # states of streams that ended in this step

        def aliases_of(self, options: Any) -> Aliases | None:
            """The aliases of a stream's phrases."""
            request = biasing_request(self.infer, getattr(options, "biasing_cfg", None))
            return self.slots.decoder.open(1, [request]).fusion.aliases_of(0)

        def decoder(self) -> Any:
            """The search of the model, with `streaming.n_best` hypotheses per utterance."""
            decoder = self.infer.decoder()
            if self.n_best == 1:
                return decoder
            with fields_named("streaming.{}"):
                n_best = self.infer.candidates(self.n_best)
                return decoder.with_options(replace(decoder.config, n_best=n_best), decoder.fusion)

        def transcribe_step(self, requests: list[Any]) -> list[Any]:
            self.errors, self.ended, self.gone = {}, {}, {}
            outputs = super().transcribe_step(requests)
            states = [self.get_state(output.stream_id) for output in outputs]
            self.find_committed([state for state in states if state is not None])
            for output, state in zip(outputs, states, strict=True):
                output.error = self.errors.get(output.stream_id)
                ended = self.ended.get(output.stream_id)
                output.n_best = ended and ended.distinct(self.infer.text_of, self.n_best)
                known = [] if state is None else state.tokens[: state.committed or 0]
                output.committed_transcript = transcript(self, known).rstrip()
                aliases = (self.gone[output.stream_id] if state is None else state).aliases
                if aliases is not None:
                    write_aliases(output, aliases, self.bpe_decoder)
            return outputs

        def find_committed(self, states: list[Any]) -> None:
            """Set `committed` of running streams."""
            going = [state for state in states if state.slot is not None]
            for state, nbest in zip(going, self.slots.partial([state.slot for state in going]), strict=True):
                state.committed = nbest.committed

        def ends(self, progress: StreamProgress) -> bool:
            """Whether an utterance ends here by the rules of `endpointing.rules`."""
            return self.rules is not None and find_endpoint(progress, self.rules) is not None

        def fail(self, stream_id: int, state: Any, error: ValueError) -> None:
            """End the stream with an error of the search."""
            row = f" ({self.infer.decoder().input_name}[{error.row}] is this stream)" if hasattr(error, "row") else ""
            state.error = ValueError(f"stream {stream_id} ends here: {error}{row}")
            self.errors[stream_id] = state.error
            logging.error(str(state.error))

    return InSlots


def write_aliases(output: Any, aliases: Aliases, bpe_decoder: Any) -> None:
    """Replace the aliases of phrases in an output of a pipeline."""
    output.final_transcript = aliases.written(output.final_transcript)
    output.partial_transcript = aliases.written(output.partial_transcript)
    output.committed_transcript = aliases.committed(output.committed_transcript)
    output.final_segments = written_segments(output.final_segments or [], aliases, bpe_decoder)


def written_segments(segments: list[Any], aliases: Aliases, bpe_decoder: Any) -> list[Any]:
    """NeMo's segments (words) with the aliases of phrases replaced."""
    written = []
    for first, end, text in aliases.words([segment.text for segment in segments]):
        segment = segments[first].copy()
        segment.text, segment.end = text, segments[end - 1].end
        if end > first + 1:
            segment.conf = bpe_decoder.confidence_aggregator([part.conf for part in segments[first:end]])
        written.append(segment)
    return written


def transcript(pipeline: Any, tokens: list[int]) -> str:
    """The text of tokens, in the form of NeMo's partial transcripts."""
    text = ids_to_text_without_stripping(tokens, pipeline.tokenizer, pipeline.get_sep())
    return re.sub(pipeline.leading_regex_pattern, r"\1", text) if pipeline.leading_regex_pattern else text


class PushedChunk(NamedTuple):
    """The input of a step of a CTC stream."""

    stream_id: int
    state: Any
    frames: Tensor  # [T, V + 1] log-probs
    known: int  # tokens of this step before
    is_end: bool  # the utterance ends with it

    @property
    def is_read(self) -> bool:
        return self.state.error is None


def searching_ctc(base: Any) -> type:
    """A CTC pipeline with transcripts from the search of the model's decoding config."""

    is_buffered = hasattr(base, "get_cut_off_range")

    class SearchingCTC(in_slots(base)):  # type: ignore[misc]
        def decode_log_probs(
            self, requests: list[Any], log_probs: Tensor, tail_log_probs: None, ready_state_ids: set[int]
        ) -> None:
            """Decode a step of cache-aware streams."""
            for turn in turns(requests):
                ready_state_ids.update(self.search([requests[i] for i in turn], [(log_probs[i],) for i in turn]))

        def shared_transcribe_step(self, requests: list[Any], log_probs: Tensor) -> None:
            """Decode a step of buffered streams."""
            size = log_probs.shape[1]
            rows = [row[:n] for row, n in zip(log_probs.cpu(), self.lengths, strict=True)]
            for turn in turns(requests):
                requests_of_turn = [requests[i] for i in turn]
                clips = [self.get_cut_off_range(size, request.is_last) for request in requests_of_turn]
                inputs = [
                    (rows[i], start, min(end, len(rows[i]))) for i, (start, end) in zip(turn, clips, strict=True)
                ]
                ready = self.search(requests_of_turn, inputs)
                if ready:
                    self.text_processor.process(self.get_states(ready))
            self.update_partial_transcript(requests, self.tokenizer, self.leading_regex_pattern)

        def search(self, requests: list[Any], inputs: list[tuple[Any, ...]]) -> list[int]:
            """Read a step of different streams in one push.

            Args:
                requests: one per stream.
                inputs: arguments of `run_greedy_decoder` after the request: log-probs [T, V + 1] and, for buffers,
                    the position of NeMo's clip.

            Returns:
                The streams at the end of an utterance.
            """
            chunks = [self.read(request, *arguments) for request, arguments in zip(requests, inputs, strict=True)]
            self.push([chunk for chunk in chunks if chunk.is_read and len(chunk.frames)])
            over = [chunk for chunk in chunks if chunk.is_end or not chunk.is_read]
            going = [chunk for chunk in chunks if chunk.is_read and not chunk.is_end]
            for chunk, nbest in zip(going, self.slots.partial([c.state.slot for c in going]), strict=True):
                if self.ends(_progress(nbest, self.model_stride_in_secs)):
                    over.append(chunk)
                else:
                    _show(chunk, nbest.best)
                    chunk.state.committed = None if self.infer.why_one_best else nbest.committed
            ended = [chunk for chunk in over if chunk.state.slot is not None]
            for chunk, nbest in zip(ended, self.slots.end([c.state.slot for c in ended]), strict=True):
                for note in nbest.notes:
                    logging.warning(note)
                chunk.state.slot, chunk.state.committed = None, 0
                self.ended[chunk.stream_id] = nbest
                _show(chunk, self.infer.chosen(nbest)[0])
            for chunk in over:
                if chunk not in ended:
                    _show(chunk, None)
                self.bpe_decoder.decode_bpe_tokens(chunk.state)
                chunk.state.cleanup_after_eou()
            return [chunk.stream_id for chunk in over]

        def find_committed(self, states: list[Any]) -> None:
            pass  # `search` has set it

        def read(self, request: Any, log_probs: Tensor, *clip: int) -> PushedChunk:
            """The frames that NeMo reads in this step; NeMo decides whether the utterance ends with them."""
            state = self.get_state(request.stream_id)
            offset, known = state.global_offset, len(state.current_step_tokens)
            is_end = self.run_greedy_decoder(state, request, log_probs, *clip)
            begin, end = 0, len(log_probs)
            # Buffers overlap, and NeMo's clips overlap, too, if the chunk is no multiple of the stride. Frames before
            # the beginning or after the end of the stream are padding, in which models may output words.
            if is_buffered:
                begin, end = max(state.decoder_start_idx, round(-offset)), min(state.decoder_end_idx, end)
                begin = max(begin, round(getattr(state, "frames_read", begin + offset) - offset))
                state.frames_read = offset + end
            if state.slot is None and state.error is None:
                phrases = biasing_request(self.infer, getattr(state.options, "biasing_cfg", None))
                state.slot, state.begin = self.slots.begin(phrases), offset + begin
                state.frame_confidences, state.frames_before = [], 0
            return PushedChunk(request.stream_id, state, log_probs[begin:end], known, is_end)

        def push(self, chunks: list[PushedChunk]) -> None:
            """Pass the frames of these streams to the search."""
            errors = self.slots.push({chunk.state.slot: chunk.frames for chunk in chunks})
            for chunk in chunks:
                state, frames = chunk.state, chunk.frames
                state.frames_before = len(state.frame_confidences)
                if state.slot in errors:
                    self.fail(chunk.stream_id, state, errors[state.slot])
                else:
                    state.frame_confidences += self.conf_func(frames, v=frames.shape[1]).tolist()

        def get_logprobs_given_raw_signals(self, frames: Any, signals: Any, left_paddings: list[int]) -> Tensor:
            samples = self.sample_rate * self.model_stride_in_secs
            paddings = [int(padding / samples) for padding in left_paddings]
            with self._noting_lengths(paddings):
                return super().get_logprobs_given_raw_signals(frames, signals, left_paddings)

        def get_logprobs_given_processed_signals(self, fbuffers: Any, signals: Any) -> Tensor:
            with self._noting_lengths([int(buffer.roll_size / self.subsampling_factor) for buffer in fbuffers]):
                return super().get_logprobs_given_processed_signals(fbuffers, signals)

        @contextlib.contextmanager
        def _noting_lengths(self, paddings: list[int]) -> Iterator[None]:
            """Set `lengths`, the frames of each buffer up to the end of the audio, from the model's output;
            `paddings` are the frames before the audio if NeMo rolls buffers."""
            before = paddings if self.right_padding else [0] * len(paddings)

            def note(model: Any, inputs: Any, output: tuple[Tensor, ...]) -> None:
                self.lengths = [n + padding for n, padding in zip(output[1].tolist(), before, strict=True)]

            hook = self.asr_model.asr_model.register_forward_hook(note)
            try:
                yield
            finally:
                hook.remove()

    return SearchingCTC


def _progress(partial: NBest, frame_seconds: float) -> StreamProgress:
    """The inputs of the endpointing rules. If the search has no final costs, all hypotheses may end at cost 0."""
    return progress_of(partial, frame_seconds, 0.0 if partial.relative_cost is None else None)


def turns(requests: list[Any]) -> list[list[int]]:
    """Split request numbers into turns with at most one request per stream."""
    turns: list[list[int]] = []
    count: dict[int, int] = {}
    for i, request in enumerate(requests):
        turn = count[request.stream_id] = count.get(request.stream_id, -1) + 1
        if turn == len(turns):
            turns.append([])
        turns[turn].append(i)
    return turns


def _show(chunk: PushedChunk, path: Path | None) -> None:
    """Replace NeMo's labels of an utterance by a path; None: by nothing, because the stream has ended."""
    state = chunk.state
    frames = [] if path is None else path.frames.tolist()
    tokens = [] if path is None else path.tokens.tolist()
    show(state, chunk.known, tokens, frames, state.frames_before if frames else 0)
    state.confidences = [state.frame_confidences[frame] for frame in frames]


def show(state: Any, known: int, tokens: list[int], frames: list[int], before: int) -> None:
    """Replace the tokens of an utterance.

    Args:
        known: number of tokens of this step that belong to earlier utterances.
        frames: of the tokens, from the beginning of the utterance.
        before: number of these frames that were read in earlier steps.
    """
    state.tokens = tokens
    state.timesteps = [state.begin + frame for frame in frames]
    state.current_step_tokens[known:] = tokens[sum(frame < before for frame in frames) :]
