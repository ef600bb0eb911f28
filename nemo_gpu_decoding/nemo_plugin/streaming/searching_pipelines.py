"""Define NeMo's inference pipelines that decode with a beam search.

`hooks.py` puts these classes before NeMo's classes of pipelines (see `adapted`), so that `super()` is NeMo's class.

SearchingCTC          searches log-probs of buffers or chunks
BufferedTransducer    continues the search in each buffer (streaming.stateful: true), or decodes each buffer anew
CacheAwareTransducer  continues the search in each chunk
"""

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any, ClassVar, NamedTuple

import torch
from nemo.collections.asr.inference.pipelines.base_pipeline import BasePipeline
from nemo.collections.asr.inference.utils.pipeline_utils import adjust_vad_segments
from nemo.collections.asr.parts.context_biasing.biasing_multi_model import BiasingRequestItemConfig
from nemo.collections.asr.parts.utils.rnnt_utils import Hypothesis
from nemo.utils import logging
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from nemo_gpu_decoding.checks import fields_named, having
from nemo_gpu_decoding.fusion.fusion import Request
from nemo_gpu_decoding.live.endpointing import StreamProgress, find_endpoint, progress_of
from nemo_gpu_decoding.live.slots import Slots
from nemo_gpu_decoding.nemo_plugin.ctc import CTCInfer
from nemo_gpu_decoding.nemo_plugin.requests import biasing_request
from nemo_gpu_decoding.nemo_plugin.streaming.stream_state import shared_slots
from nemo_gpu_decoding.nemo_plugin.streaming.stream_texts import remove_joints, transcript, write_aliases
from nemo_gpu_decoding.nemo_plugin.transducer import TransducerInfer
from nemo_gpu_decoding.search.result import NBest, Path

MOST_AT_FIRST = 64  # largest number of slots that a pipeline allocates at first


@dataclass
class StreamRequest(BiasingRequestItemConfig):
    """A stream's request for NeMo's `ASRRequestOptions.biasing_cfg`; its phrases replace those in `request`."""

    request: Request | None = None

    def is_empty(self) -> bool:
        return self.request is None and super().is_empty()


class InSlots(BasePipeline):
    """A pipeline that decodes all utterances in one `Slots`, the attribute `slots`.

    A stream with an invalid frame (NaN) ends before this frame with its text so far. `error` in the step's output is
    then a ValueError that names the stream, else None. Later outputs of the stream are empty.

    Outputs also have `committed_transcript`, the beginning of `partial_transcript` that does not change, and `n_best`,
    the `NBest` of the utterance that ended in this step, or None. Aliases of phrases are replaced in all texts except
    `current_step_transcript`. Words that may become part of an alias are not committed.
    """

    search_type: ClassVar[Any] = TransducerInfer  # of its model

    @staticmethod
    def why_one_best(cfg: Any) -> str:
        """Return the reason why a pipeline with this config has no n-best lists, or "" if it has them."""
        return ""

    @classmethod
    def reads_tail(cls, cfg: Any) -> bool:
        """Return whether a pipeline with this config searches what lies beyond a chunk, or has no such tails."""
        return bool(cls.why_one_best(cfg))

    def create_state(self, options: Any) -> Any:
        state = super().create_state(options)
        state.slot = state.error = None
        wanted = getattr(state.options, "biasing_cfg", None)
        state.request = biasing_request(self.infer, wanted)
        state.aliases = self.slots.decoder.open(1, [state.request]).fusion.aliases_of(0)
        if wanted is not None:
            state.options.biasing_cfg = None  # cache-aware transducers of NeMo would warn that they ignore it
        state.committed = 0  # number of first tokens that do not change; None: unknown
        if self.rules is not None:
            state.options.stop_history_eou = -1
        return state

    def delete_state(self, stream_id: int) -> None:
        state = self.get_state(stream_id)
        if state is not None:
            self.release(state)
            self.gone[stream_id] = state
        super().delete_state(stream_id)

    def release(self, state: Any) -> None:
        """End the search of an utterance without a result."""
        if state.slot is not None:
            self.slots.abandon([state.slot])
        state.slot, state.committed = None, 0

    def reset_session(self) -> None:
        super().reset_session()
        self.slots = Slots(self.decoder(), first=min(int(self.batch_size), MOST_AT_FIRST))
        self.errors: dict[int, ValueError] = {}  # of this step, by stream
        self.ended: dict[int, NBest] = {}  # utterances that ended in this step, by stream
        self.gone: dict[int, Any] = {}  # states of streams that ended in this step

    def decoder(self) -> Any:
        """Return the search of the model, which returns `streaming.n_best` hypotheses per utterance."""
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
            remove_joints(output, self.get_sep())
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
        """Set `committed`, the number of tokens that will not change, in the states of running streams."""
        going = [state for state in states if state.slot is not None]
        for state, nbest in zip(going, self.slots.partial([state.slot for state in going]), strict=True):
            state.committed = nbest.committed

    def ends(self, progress: StreamProgress) -> bool:
        """Return whether a rule in `endpointing.rules` ends the utterance after this step."""
        return self.rules is not None and find_endpoint(progress, self.rules) is not None

    def fail(self, stream_id: int, state: Any, error: ValueError) -> None:
        """End the stream because of an error that the search reports for it."""
        row = f" ({self.infer.decoder().input_name}[{error.row}] is this stream)" if hasattr(error, "row") else ""
        state.error = ValueError(f"stream {stream_id} ends here: {error}{row}")
        self.errors[stream_id] = state.error
        logging.error(str(state.error))


class PushedChunk(NamedTuple):
    """The frames of one CTC stream that a step passes to the search."""

    stream_id: int
    state: Any
    frames: Tensor  # [T, V + 1] log-probs
    known: int  # tokens of this step before
    is_end: bool  # the utterance ends with it

    @property
    def is_read(self) -> bool:
        return self.state.error is None


class SearchingCTC(InSlots):
    """A CTC pipeline whose transcripts come from the search in the model's decoding config."""

    search_type = CTCInfer

    def decode_log_probs(
        self, requests: list[Any], log_probs: Tensor, tail_log_probs: None, ready_state_ids: set[int]
    ) -> None:
        """Decode one step of cache-aware streams from log-probs."""
        for turn in turns(requests):
            ready_state_ids.update(self.search([requests[i] for i in turn], [(log_probs[i],) for i in turn]))

    def shared_transcribe_step(self, requests: list[Any], log_probs: Tensor) -> None:
        """Decode one step of buffered streams from their audio buffers."""
        size = log_probs.shape[1]
        rows = [row[:n] for row, n in zip(log_probs.cpu(), self.lengths, strict=True)]
        for turn in turns(requests):
            requests_of_turn = [requests[i] for i in turn]
            cuts = [self.get_cut_off_range(size, request.is_last) for request in requests_of_turn]
            inputs = [(rows[i], start, min(end, len(rows[i]))) for i, (start, end) in zip(turn, cuts, strict=True)]
            ready = self.search(requests_of_turn, inputs)
            if ready:
                self.text_processor.process(self.get_states(ready))
        self.update_partial_transcript(requests, self.tokenizer, self.leading_regex_pattern)

    def search(self, requests: list[Any], inputs: list[tuple[Any, ...]]) -> list[int]:
        """Pass the frames of a step of different streams to the search in one push.

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
            no_cost = 0.0 if nbest.relative_cost is None else None  # without final costs, the relative cost is 0
            if self.ends(progress_of(nbest, self.model_stride_in_secs, no_cost)):
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
        """Return a stream's frames that NeMo reads in a step, and whether NeMo ends the utterance in it."""
        state = self.get_state(request.stream_id)
        offset, known = state.global_offset, len(state.current_step_tokens)
        is_end = self.run_greedy_decoder(state, request, log_probs, *clip)
        begin, end = 0, len(log_probs)
        # Buffers overlap, and NeMo's clips overlap, too, if the chunk is no multiple of the stride. Frames before
        # the beginning or after the end of the stream are padding, in which models may output words.
        if hasattr(self, "get_cut_off_range"):
            begin, end = max(state.decoder_start_idx, round(-offset)), min(state.decoder_end_idx, end)
            begin = max(begin, round(getattr(state, "frames_read", begin + offset) - offset))
            state.frames_read = offset + end
        if state.slot is None and state.error is None:
            state.slot, state.begin = self.slots.begin(state.request), offset + begin
            state.frame_confidences, state.frames_before = [], 0
        return PushedChunk(request.stream_id, state, log_probs[begin:end], known, is_end)

    def push(self, chunks: list[PushedChunk]) -> None:
        """Pass the frames of these streams to the search, and store their confidences; end streams with errors."""
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
        """Set `lengths`, the number of valid frames in each buffer, from the model's output within this block.
        `paddings` are the frames before the audio if NeMo rolls buffers."""
        before = paddings if self.right_padding else [0] * len(paddings)

        def note(model: Any, inputs: Any, output: tuple[Tensor, ...]) -> None:
            self.lengths = [n + padding for n, padding in zip(output[1].tolist(), before, strict=True)]

        hook = self.asr_model.asr_model.register_forward_hook(note)
        try:
            yield
        finally:
            hook.remove()


def turns(requests: list[Any]) -> list[list[int]]:
    """Divide request indices into consecutive steps with at most one request per stream."""
    turns: list[list[int]] = []
    count: dict[int, int] = {}
    for i, request in enumerate(requests):
        turn = count[request.stream_id] = count.get(request.stream_id, -1) + 1
        if turn == len(turns):
            turns.append([])
        turns[turn].append(i)
    return turns


def _show(chunk: PushedChunk, path: Path | None) -> None:
    """Replace NeMo's labels of an utterance by the tokens of a path; a path of None removes the labels."""
    state = chunk.state
    frames = [] if path is None else path.frames.tolist()
    tokens = [] if path is None else path.tokens.tolist()
    show(state, chunk.known, tokens, frames, state.frames_before if frames else 0)
    state.confidences = [state.frame_confidences[frame] for frame in frames]


def show(state: Any, known: int, tokens: list[int], frames: list[int], before: int) -> None:
    """Replace the tokens and times of an utterance in NeMo's stream state.

    Args:
        known: number of tokens of this step that belong to earlier utterances.
        frames: frames of the tokens, counted from the beginning of the utterance.
        before: number of these frames that were read in earlier steps.
    """
    state.tokens = tokens
    state.timesteps = [state.begin + frame for frame in frames]
    state.current_step_tokens[known:] = tokens[sum(frame < before for frame in frames) :]


class BufferedTransducer(InSlots):
    """A transducer pipeline that continues the search in each buffer until the utterance ends.

    With `streaming.stateful: false`, the pipeline decodes each buffer from scratch, with its stream's phrases."""

    @staticmethod
    def why_one_best(cfg: Any) -> str:
        return (
            "" if cfg.streaming.stateful else "every buffer is decoded anew, and only the tokens of a chunk are taken"
        )

    def init_decoding_computer(self) -> None:
        self.decoding_computer = None  # NeMo's is greedy

    def decode(
        self, encs: Tensor, enc_lens: Tensor, states: list[Any], offsets: list[float]
    ) -> tuple[list[Any], list[int]]:
        """Decode frames from frame `offset` of the stream on; return hypotheses and numbers of skipped frames.
        Frames below 0 are skipped: they are padding, in which models may output words.
        """
        paddings = [max(0, round(-offset)) for offset in offsets]
        ends = [max(n, padding) for n, padding in zip(enc_lens.tolist(), paddings, strict=True)]
        frames = [enc[:, begin:end].T for enc, begin, end in zip(encs, paddings, ends, strict=True)]
        lengths = torch.tensor([len(rows) for rows in frames])
        before = [state.hyp_decoding_state for state in states]
        with having(shared_slots, self.slots):
            return self.asr_model.decode(pad_sequence(frames, True).transpose(1, 2), lengths, before), paddings

    def find_committed(self, states: list[Any]) -> None:
        if self.stateful:
            super().find_committed(states)
            return
        for state in states:
            state.committed = len(state.tokens)  # NeMo keeps the tokens of earlier steps

    def stateful_transcribe_step(
        self, requests: list[Any], encs: Tensor, enc_lens_chunk: Tensor, enc_lens: Tensor, ready_state_ids: set[int]
    ) -> None:
        """Decode the chunks of this step; frames to the right of a chunk are only context of the encoder."""
        for turn in turns(requests):
            rows = [i for i in turn if self.get_state(requests[i].stream_id).error is None]
            states = [self.get_state(requests[i].stream_id) for i in rows]
            offsets = [state.global_offset + state.timestamp_offset for state in states]
            for state, offset in zip(states, offsets, strict=True):
                if state.hyp_decoding_state is None:
                    state.hyp_decoding_state = _beginning(state.request)
                    state.begin, state.frames_read = max(0, offset), 0
            if rows:
                hypotheses, _ = self.decode(encs[rows], enc_lens_chunk[rows], states, offsets)
                for i, state, hypothesis in zip(rows, states, hypotheses, strict=True):
                    self.take(requests[i], state, hypothesis)
            for i in turn:
                state = self.get_state(requests[i].stream_id)
                state.timestamp_offset += self.tokens_per_frame_float
                if self.is_over(requests[i], state):
                    self.bpe_decoder.decode_bpe_tokens(state)
                    state.cleanup_after_eou()
                    ready_state_ids.add(requests[i].stream_id)
                    if state.slot is not None:
                        self.ended[requests[i].stream_id] = state.nbest
                    self.release(state)
                    state.hyp_decoding_state = None

    def take(self, request: Any, state: Any, hypothesis: Any) -> None:
        """Replace the hypothesis of an utterance in NeMo's state by the current best hypothesis."""
        state.slot, state.nbest = hypothesis.dec_state.slot, None
        if hypothesis.dec_state.error is not None:
            self.fail(request.stream_id, state, hypothesis.dec_state.error)
            return
        state.hyp_decoding_state, state.nbest = hypothesis, hypothesis.dec_state.nbest
        _show_hypothesis(state, hypothesis, len(state.current_step_tokens))

    def is_over(self, request: Any, state: Any) -> bool:
        """Return whether the endpointing rules or NeMo end the utterance here. NeMo uses the silence since the
        last token or, if the request has them, segments of speech."""
        if request.is_last or state.error is not None:
            return request.is_last or request.stream_id in self.errors
        hypothesis = state.hyp_decoding_state
        if self.rules is not None:
            return self.ends(_since(_last_frame(hypothesis), state.frames_read, self.model_stride_in_secs))
        stop = state.options.stop_history_eou
        speech = request.vad_segments
        if speech is not None and len(speech):
            speech = adjust_vad_segments(speech, self.left_padding_size)
        if speech is not None and len(speech):
            return bool(speech[-1][1] == 0) or self.endpointer.detect_eou_vad(speech, stop_history_eou=stop)[0]
        last = torch.tensor(hypothesis.token_frames[-1:])
        return self.endpointer.detect_eou_given_timestamps(last, last, state.frames_read, stop)[0]

    def stateless_transcribe_step(self, requests, encs: Tensor, enc_lens: Tensor, ready_state_ids: set) -> None:
        states = [self.get_state(request.stream_id) for request in requests]
        for state in states:
            state.hyp_decoding_state = _beginning(state.request)
        offsets = [state.global_offset for state in states]
        hypotheses, paddings = self.decode(encs, enc_lens, states, offsets)
        self.slots.abandon([hypothesis.dec_state.slot for hypothesis in hypotheses])
        for request, state, hypothesis, padding in zip(requests, states, hypotheses, paddings, strict=True):
            hypothesis.timestamp = torch.as_tensor(hypothesis.timestamp) + padding
            hypothesis.non_blank_step_confidence_precomputed = hypothesis.step_confidence or None
            error = hypothesis.dec_state.error
            if error is not None and state.error is None:
                self.fail(request.stream_id, state, error)
        ready_state_ids.update(self.decode_step(hypotheses, requests, states))

    def run_greedy_decoder(self, state: Any, request: Any, **output: Any) -> bool:
        """Let NeMo take over the tokens of this step's frames and decide whether the utterance ends here."""
        if state.error is not None:
            return request.is_last or request.stream_id in self.errors
        offset = state.global_offset
        is_end = super().run_greedy_decoder(state, request, **output)
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


class CacheAwareTransducer(InSlots):
    """A transducer pipeline that continues the search in each chunk until the utterance ends."""

    @classmethod
    def reads_tail(cls, cfg: Any) -> bool:
        return True  # NeMo's has none

    def create_state(self, options: Any) -> Any:
        state = super().create_state(options)
        self._begin(state, 0)
        return state

    def cache_aware_transcribe_step(self, *args: Any, **kwargs: Any) -> None:
        with having(shared_slots, self.slots):
            super().cache_aware_transcribe_step(*args, **kwargs)

    def run_greedy_decoder(self, state: Any, request: Any, hyp: Any) -> bool:
        """Store the best hypothesis so far; return whether NeMo ends the utterance after this step's frames."""
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
        state.begin = state.global_offset
        _show_hypothesis(state, hyp, known)
        is_end = is_end or self.ends(_since(_last_frame(hyp), state.frames_read, self.model_stride_in_secs))
        if is_end:
            self.ended[request.stream_id] = hyp.dec_state.nbest
            self._begin(state, state.global_offset + state.frames_read)
        return is_end

    def _begin(self, state: Any, frame: int) -> None:
        """Begin an utterance at this frame of its stream."""
        self.release(state)
        state.frames_read = 0
        state.set_offset(0)
        state.set_global_offset(frame)
        state.set_previous_hypothesis(_beginning(state.request))


def _show_hypothesis(state: Any, hypothesis: Any, known: int) -> None:
    """Replace the tokens and times of a transducer's running utterance in NeMo's state; `known` is as in `show`."""
    show(state, known, hypothesis.y_sequence.tolist(), hypothesis.token_frames, state.frames_read)
    state.confidences = list(hypothesis.step_confidence) or [0.0] * len(state.tokens)
    state.frames_read = int(hypothesis.length)


def _last_frame(hypothesis: Any) -> int:
    """Return the frame in which the last token of a hypothesis ends, or 0 without tokens."""
    return hypothesis.token_frames[-1] + hypothesis.token_repeats[-1] if len(hypothesis.token_frames) else 0


def _since(last: float, frames: float, frame_seconds: float) -> StreamProgress:
    """Return the inputs of the endpointing rules for a transducer's utterance, whose last token ends in frame `last`
    (0: no token). Transducers have no final costs, so that the relative cost is 0."""
    frames = max(frames, last)
    return StreamProgress(frames * frame_seconds, (frames - last) * frame_seconds, 0.0)


def _beginning(request: Request | None) -> Hypothesis | None:
    """Return an empty partial hypothesis, which begins an utterance with the request of its stream."""
    return None if request is None else Hypothesis.empty_with_biasing_cfg(StreamRequest(request=request))
