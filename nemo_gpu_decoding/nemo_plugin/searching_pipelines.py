"""The subclasses that stand in for NeMo's pipelines of `nemo.collections.asr.inference`: what they search, and when.

`pipelines.py` says which of NeMo's becomes which of these.
"""

from __future__ import annotations

import re
from dataclasses import replace
from typing import Any, NamedTuple

from nemo.collections.asr.inference.utils.pipeline_utils import ids_to_text_without_stripping
from nemo.collections.asr.parts.utils.rnnt_utils import Hypothesis
from nemo.utils import logging
from torch import Tensor

from nemo_gpu_decoding.checks import FieldError
from nemo_gpu_decoding.live.endpointing import StreamProgress, find_endpoint, progress_of
from nemo_gpu_decoding.live.slots import Slots
from nemo_gpu_decoding.nemo_plugin.continuation import using_slots
from nemo_gpu_decoding.nemo_plugin.requests import biasing_request
from nemo_gpu_decoding.search.result import NBest, Path

MOST_AT_FIRST = 64  # utterances that a pipeline makes room for at once, if its batches are as large

# They are made within functions and have one base each, since Python lets an object change its class only
# where the memory layouts agree.


def in_slots(base: Any) -> type:
    """A pipeline whose utterances are searched in one `Slots`, which is its `slots`.

    A stream whose frames cannot be read (NaN) ends there, with the text that it has. The `error` of this step's
    output is a ValueError that names the stream, it is None in all others; and what follows of the stream is empty.

    Outputs have `committed_transcript` too, the beginning of `partial_transcript` that will not change, and `n_best`,
    the `NBest` of the utterance that ended in this step, or None.
    """

    class InSlots(base):
        def create_state(self, options: Any) -> Any:
            state = super().create_state(options)
            state.slot = state.error = None
            state.committed = 0  # tokens at the beginning of the utterance that will not change; None: not known
            if self.rules is not None:
                state.options.stop_history_eou = -1
            return state

        def delete_state(self, stream_id: int) -> None:
            state = self.get_state(stream_id)
            if state is not None and state.slot is not None:
                self.slots.abandon([state.slot])
            super().delete_state(stream_id)

        def reset_session(self) -> None:
            super().reset_session()
            self.slots = Slots(self.decoder(), first=min(int(self.batch_size), MOST_AT_FIRST))
            self.errors: dict[int, ValueError] = {}  # of this step, by stream
            self.ended: dict[int, NBest] = {}  # utterances that ended in this step, by stream

        def decoder(self) -> Any:
            """The model's, with as many hypotheses of an utterance as the pipeline's `streaming.n_best` says."""
            decoder = self.infer.decoder()
            if self.n_best == 1:
                return decoder
            try:
                return decoder.with_options(replace(decoder.config, n_best=self.n_best), decoder.fusion)
            except FieldError as error:
                raise error.named(f"streaming.{error.field}") from None

        def transcribe_step(self, requests: list[Any]) -> list[Any]:
            self.errors, self.ended = {}, {}
            outputs = super().transcribe_step(requests)
            states = [self.get_state(output.stream_id) for output in outputs]
            self.find_committed([state for state in states if state is not None])
            for output, state in zip(outputs, states, strict=True):
                output.error = self.errors.get(output.stream_id)
                output.n_best = self.ended.get(output.stream_id)
                known = [] if state is None else state.tokens[: state.committed or 0]
                output.committed_transcript = transcript(self, known).rstrip()
            return outputs

        def find_committed(self, states: list[Any]) -> None:
            """Set `committed` of streams that go on, where the search has not done so."""

        def ends(self, progress: StreamProgress) -> bool:
            """Whether an utterance ends here by the rules of `endpointing.rules`."""
            return self.rules is not None and find_endpoint(progress, self.rules) is not None

        def fail(self, stream_id: int, state: Any, error: ValueError) -> None:
            """Note that the stream ends by an error of the search."""
            row = f" ({self.infer.decoder().input_name}[{error.row}] is this stream)" if hasattr(error, "row") else ""
            state.error = ValueError(f"stream {stream_id} ends here: {error}{row}")
            self.errors[stream_id] = state.error
            logging.error(str(state.error))

    return InSlots


def transcript(pipeline: Any, tokens: list[int]) -> str:
    """The text of tokens, as NeMo's partial transcripts have it."""
    text = ids_to_text_without_stripping(tokens, pipeline.tokenizer, pipeline.get_sep())
    return re.sub(pipeline.leading_regex_pattern, r"\1", text) if pipeline.leading_regex_pattern else text


class Chunk(NamedTuple):
    """What a step of a CTC stream reads."""

    stream_id: int
    state: Any
    frames: Tensor  # [T, V + 1] log-probs
    known: int  # tokens of this step before
    is_end: bool  # the utterance ends with it

    @property
    def is_read(self) -> bool:
        return self.state.error is None


def searching_ctc(base: Any) -> type:
    """A CTC pipeline whose transcripts come from the search of the model's decoding config."""
    is_buffered = hasattr(base, "get_cut_off_range")

    class Adapted(in_slots(base)):  # type: ignore[misc]
        def decode_log_probs(
            self, requests: list[Any], log_probs: Tensor, tail_log_probs: None, ready_state_ids: set[int]
        ) -> None:
            """Of cache-aware streams."""
            for turn in _turns(requests):
                ready_state_ids.update(self.search([requests[i] for i in turn], [(log_probs[i],) for i in turn]))

        def shared_transcribe_step(self, requests: list[Any], log_probs: Tensor) -> None:
            """Of buffered streams."""
            rows = log_probs.cpu()
            for turn in _turns(requests):
                own = [requests[i] for i in turn]
                clips = [self.get_cut_off_range(rows.shape[1], request.is_last) for request in own]
                ready = self.search(own, [(rows[i], *clip) for i, clip in zip(turn, clips, strict=True)])
                if ready:
                    self.text_processor.process(self.get_states(ready))
            self.update_partial_transcript(requests, self.tokenizer, self.leading_regex_pattern)

        def search(self, requests: list[Any], inputs: list[tuple[Any, ...]]) -> list[int]:
            """Read a step of different streams, all in one push.

            Args:
                requests: one of each stream.
                inputs: what `run_greedy_decoder` takes after the request: log-probs [T, V + 1], and of buffers
                    where NeMo clips them.

            Returns:
                The streams that are at the end of an utterance.
            """
            chunks = [self.read(request, *own) for request, own in zip(requests, inputs, strict=True)]
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
                    _clear(chunk)
                self.bpe_decoder.decode_bpe_tokens(chunk.state)
                chunk.state.cleanup_after_eou()
            return [chunk.stream_id for chunk in over]

        def read(self, request: Any, log_probs: Tensor, *clip: int) -> Chunk:
            """The frames that NeMo reads in this step; it decides whether the utterance ends with them."""
            state = self.get_state(request.stream_id)
            offset, known = state.global_offset, len(state.current_step_tokens)
            is_end = self.run_greedy_decoder(state, request, log_probs, *clip)
            begin, end = 0, len(log_probs)
            if is_buffered:  # buffers overlap; where strides do not divide chunks, so do NeMo's clips
                begin, end = state.decoder_start_idx, state.decoder_end_idx
                begin = max(begin, round(getattr(state, "frames_read", begin + offset) - offset))
                state.frames_read = offset + end
            if state.slot is None and state.error is None:
                phrases = biasing_request(self.infer, getattr(state.options, "biasing_cfg", None))
                state.slot, state.begin = self.slots.begin(phrases), offset + begin
                state.frame_confidences, state.frames_before = [], 0
            return Chunk(request.stream_id, state, log_probs[begin:end], known, is_end)

        def push(self, chunks: list[Chunk]) -> None:
            """Let the search read the frames of these streams."""
            errors = self.slots.push({chunk.state.slot: chunk.frames for chunk in chunks})
            for chunk in chunks:
                state, frames = chunk.state, chunk.frames
                state.frames_before = len(state.frame_confidences)
                if state.slot in errors:
                    self.fail(chunk.stream_id, state, errors[state.slot])
                else:
                    state.frame_confidences += self.conf_func(frames, v=frames.shape[1]).tolist()

    return Adapted


def _progress(partial: NBest, frame_seconds: float) -> StreamProgress:
    """What the rules ask. Where the search cannot tell what an end costs, any hypothesis may end at no cost."""
    return progress_of(partial, frame_seconds, 0.0 if partial.relative_cost is None else None)


def _turns(requests: list[Any]) -> list[list[int]]:
    """Numbers of the requests, in turns in which no stream has two."""
    turns: list[list[int]] = []
    count: dict[int, int] = {}
    for i, request in enumerate(requests):
        turn = count[request.stream_id] = count.get(request.stream_id, -1) + 1
        if turn == len(turns):
            turns.append([])
        turns[turn].append(i)
    return turns


def _show(chunk: Chunk, path: Path) -> None:
    """Put a hypothesis in place of the labels that NeMo has found in an utterance."""
    state, frames = chunk.state, path.frames.tolist()
    state.tokens = path.tokens.tolist()
    state.timesteps = [state.begin + frame for frame in frames]
    state.confidences = [state.frame_confidences[frame] for frame in frames]
    new = sum(frame < state.frames_before for frame in frames)
    state.current_step_tokens[chunk.known :] = state.tokens[new:]


def _clear(chunk: Chunk) -> None:
    """Leave out what NeMo finds in a stream that has ended."""
    chunk.state.tokens, chunk.state.timesteps, chunk.state.confidences = [], [], []
    chunk.state.current_step_tokens[chunk.known :] = []


def buffered_transducer(base: Any) -> type:
    """A transducer pipeline that decodes every buffer anew, with the phrases of its stream."""

    class Adapted(in_slots(base)):  # type: ignore[misc]
        def stateless_transcribe_step(
            self, requests: list[Any], encs: Tensor, enc_lens: Tensor, ready_state_ids: set[int]
        ) -> None:
            states = [self.get_state(request.stream_id) for request in requests]
            begin = [_beginning(getattr(state.options, "biasing_cfg", None)) for state in states]
            with using_slots(self.slots):
                hypotheses = self.asr_model.decode(encs, enc_lens, partial_hypotheses=begin)
            self.slots.abandon([hypothesis.dec_state.slot for hypothesis in hypotheses])
            for request, state, hypothesis in zip(requests, states, hypotheses, strict=True):
                error = hypothesis.dec_state.error
                if error is not None and state.error is None:
                    self.fail(request.stream_id, state, error)
            ready_state_ids.update(self.decode_step(hypotheses, requests, states))

        def run_greedy_decoder(self, state: Any, request: Any, **found: Any) -> bool:
            """NeMo takes the tokens of this step's frames, and decides whether the utterance ends here."""
            if state.error is not None:
                return request.is_last or request.stream_id in self.errors
            offset = state.global_offset
            is_end = super().run_greedy_decoder(state, request, **found)
            if self.rules is None or is_end:
                state.begin = offset + state.decoder_end_idx
                return is_end
            state.begin = getattr(state, "begin", offset + state.decoder_start_idx)
            last = state.timesteps[-1] + 1 - state.begin if state.timesteps else 0
            frames = offset + state.decoder_end_idx - state.begin
            is_end = self.ends(_since(last, frames, self.model_stride_in_secs))
            if is_end:
                state.eou_detected_before, state.begin = True, offset + state.decoder_end_idx
            return is_end

        def find_committed(self, states: list[Any]) -> None:
            for state in states:
                state.committed = len(state.tokens)  # NeMo takes tokens of this step's frames, and keeps them

    return Adapted


def cache_aware_transducer(base: Any) -> type:
    """A transducer pipeline that lets the search go on from chunk to chunk until the utterance ends."""

    class Adapted(in_slots(base)):  # type: ignore[misc]
        def create_state(self, options: Any) -> Any:
            state = super().create_state(options)
            state.phrases = getattr(state.options, "biasing_cfg", None)
            if state.phrases is not None:
                state.options.biasing_cfg = None  # or else NeMo would say that they are left out
            self._begin(state, 0)
            return state

        def cache_aware_transcribe_step(self, *args: Any, **kwargs: Any) -> None:
            with using_slots(self.slots):
                super().cache_aware_transcribe_step(*args, **kwargs)

        def run_greedy_decoder(self, state: Any, request: Any, hyp: Any) -> bool:
            """Let NeMo see the tokens of this step's frames, and put the best hypothesis in place of what earlier
            steps took for it; NeMo decides whether the utterance ends here."""
            state.slot = hyp.dec_state.slot
            if state.error is None and hyp.dec_state.error is not None:
                self.fail(request.stream_id, state, hyp.dec_state.error)
                self._begin(state, state.global_offset + state.frames_read)
                return True
            if state.error is not None:
                self._begin(state, state.global_offset)
                return bool(request.is_last)
            known = len(state.current_step_tokens)
            old = sum(frame < state.frames_read for frame in hyp.token_frames)
            state.set_offset(old)
            is_end = super().run_greedy_decoder(state, request, hyp)
            state.tokens = hyp.y_sequence.tolist()
            state.timesteps = [state.global_offset + frame for frame in hyp.token_frames]
            state.confidences = list(hyp.step_confidence) or [0.0] * len(state.tokens)
            state.current_step_tokens[known:] = state.tokens[old:]
            state.frames_read = int(hyp.length)
            last = hyp.token_frames[-1] + hyp.token_repeats[-1] if len(hyp.token_frames) else 0
            is_end = is_end or self.ends(_since(last, state.frames_read, self.model_stride_in_secs))
            if is_end:
                self.ended[request.stream_id] = hyp.dec_state.nbest
                self._begin(state, state.global_offset + state.frames_read)
            return is_end

        def find_committed(self, states: list[Any]) -> None:
            going = [state for state in states if state.slot is not None]
            for state, nbest in zip(going, self.slots.partial([state.slot for state in going]), strict=True):
                state.committed = nbest.committed

        def _begin(self, state: Any, frame: int) -> None:
            """Begin an utterance at a frame of the stream."""
            if state.slot is not None:
                self.slots.abandon([state.slot])
            state.slot, state.frames_read, state.committed = None, 0, 0
            state.set_offset(0)
            state.set_global_offset(frame)
            state.set_previous_hypothesis(_beginning(state.phrases))

    return Adapted


def _since(last: float, frames: float, frame_seconds: float) -> StreamProgress:
    """What the rules ask of a transducer's utterance of so many frames, whose last token ends in frame `last` (0: it
    has none). Its hypotheses may all end, at no cost."""
    frames = max(frames, last)
    return StreamProgress(frames * frame_seconds, (frames - last) * frame_seconds, 0.0)


def _beginning(phrases: Any) -> Hypothesis | None:
    """The partial hypothesis that begins an utterance with the phrases of its stream."""
    if phrases is None or phrases.is_empty():
        return None
    return Hypothesis.empty_with_biasing_cfg(phrases)
