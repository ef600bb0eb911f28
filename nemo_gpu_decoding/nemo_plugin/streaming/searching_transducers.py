"""Subclasses of NeMo's transducer pipelines that search.

buffered_transducer     continues the search in each buffer (streaming.stateful: true), or decodes each one anew
cache_aware_transducer  continues the search in each chunk
"""

from __future__ import annotations

from typing import Any

import torch
from nemo.collections.asr.inference.utils.pipeline_utils import adjust_vad_segments
from nemo.collections.asr.parts.utils.rnnt_utils import Hypothesis
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from nemo_gpu_decoding.live.endpointing import StreamProgress
from nemo_gpu_decoding.nemo_plugin.streaming.searching_pipelines import in_slots, show, turns
from nemo_gpu_decoding.nemo_plugin.streaming.stream_state import using_slots


def buffered_transducer(base: Any) -> type:
    """A transducer pipeline that continues the search in each buffer until the utterance ends.

    With `streaming.stateful: false`, it decodes each buffer from scratch, with the phrases of its stream."""

    class BufferedTransducer(in_slots(base)):  # type: ignore[misc]
        def init_decoding_computer(self) -> None:
            self.decoding_computer = None  # NeMo's is greedy

        def decode(
            self, encs: Tensor, enc_lens: Tensor, states: list[Any], offsets: list[float]
        ) -> tuple[list[Any], list[int]]:
            """Search frames; the first one is frame `offset` of its stream. Frames below 0 are padding, in which
            models may output words, and are skipped. Returns hypotheses and the number of skipped frames of each."""
            paddings = [max(0, round(-offset)) for offset in offsets]
            ends = [max(n, padding) for n, padding in zip(enc_lens.tolist(), paddings, strict=True)]
            frames = [enc[:, begin:end].T for enc, begin, end in zip(encs, paddings, ends, strict=True)]
            lengths = torch.tensor([len(rows) for rows in frames])
            before = [state.hyp_decoding_state for state in states]
            with using_slots(self.slots):
                return self.asr_model.decode(pad_sequence(frames, True).transpose(1, 2), lengths, before), paddings

        def find_committed(self, states: list[Any]) -> None:
            if self.stateful:
                super().find_committed(states)
                return
            for state in states:
                state.committed = len(state.tokens)  # NeMo keeps the tokens of earlier steps

        def stateful_transcribe_step(
            self,
            requests: list[Any],
            encs: Tensor,
            enc_lens_chunk: Tensor,
            enc_lens: Tensor,
            ready_state_ids: set[int],
        ) -> None:
            """Read the frames of this step's chunks. The frames to their right are context of the encoder and belong
            to the next chunk."""
            for turn in turns(requests):
                rows = [i for i in turn if self.get_state(requests[i].stream_id).error is None]
                states = [self.get_state(requests[i].stream_id) for i in rows]
                offsets = [state.global_offset + state.timestamp_offset for state in states]
                for state, offset in zip(states, offsets, strict=True):
                    if state.hyp_decoding_state is None:
                        state.hyp_decoding_state = _beginning(getattr(state.options, "biasing_cfg", None))
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
                            self.slots.abandon([state.slot])
                            self.ended[requests[i].stream_id] = state.nbest
                        state.slot = state.hyp_decoding_state = None
                        state.committed = 0

        def take(self, request: Any, state: Any, hypothesis: Any) -> None:
            """Replace the hypothesis of an utterance by the current best one."""
            state.slot, state.nbest = hypothesis.dec_state.slot, None
            if hypothesis.dec_state.error is not None:
                self.fail(request.stream_id, state, hypothesis.dec_state.error)
                return
            state.hyp_decoding_state, state.nbest = hypothesis, hypothesis.dec_state.nbest
            _show_hypothesis(state, hypothesis, len(state.current_step_tokens))

        def is_over(self, request: Any, state: Any) -> bool:
            """Whether the utterance ends here, by the rules or by NeMo's endpointing. NeMo uses the silence since the
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

        def stateless_transcribe_step(
            self, requests: list[Any], encs: Tensor, enc_lens: Tensor, ready_state_ids: set[int]
        ) -> None:
            states = [self.get_state(request.stream_id) for request in requests]
            for state in states:
                state.hyp_decoding_state = _beginning(getattr(state.options, "biasing_cfg", None))
            offsets = [state.global_offset for state in states]
            hypotheses, paddings = self.decode(encs, enc_lens, states, offsets)
            self.slots.abandon([hypothesis.dec_state.slot for hypothesis in hypotheses])
            for request, state, hypothesis, padding in zip(requests, states, hypotheses, paddings, strict=True):
                hypothesis.timestamp = torch.as_tensor(hypothesis.timestamp) + padding
                error = hypothesis.dec_state.error
                if error is not None and state.error is None:
                    self.fail(request.stream_id, state, error)
            ready_state_ids.update(self.decode_step(hypotheses, requests, states))

        def run_greedy_decoder(self, state: Any, request: Any, **output: Any) -> bool:
            """NeMo takes the tokens of this step's frames, and decides whether the utterance ends here."""
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

    return BufferedTransducer


def cache_aware_transducer(base: Any) -> type:
    """A transducer pipeline that continues the search in each chunk until the utterance ends."""

    class Adapted(in_slots(base)):  # type: ignore[misc]
        def create_state(self, options: Any) -> Any:
            state = super().create_state(options)
            state.phrases = getattr(state.options, "biasing_cfg", None)
            if state.phrases is not None:
                state.options.biasing_cfg = None  # NeMo would warn that it ignores them
            self._begin(state, 0)
            return state

        def cache_aware_transcribe_step(self, *args: Any, **kwargs: Any) -> None:
            with using_slots(self.slots):
                super().cache_aware_transcribe_step(*args, **kwargs)

        def run_greedy_decoder(self, state: Any, request: Any, hyp: Any) -> bool:
            """Replace the hypothesis of earlier steps by the current best one and return NeMo's decision, from the
            tokens of this step's frames, whether the utterance ends here."""
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
            """Begin an utterance at a frame of the stream."""
            if state.slot is not None:
                self.slots.abandon([state.slot])
            state.slot, state.frames_read, state.committed = None, 0, 0
            state.set_offset(0)
            state.set_global_offset(frame)
            state.set_previous_hypothesis(_beginning(state.phrases))

    return Adapted


def _show_hypothesis(state: Any, hypothesis: Any, known: int) -> None:
    """Replace a transducer's hypothesis of the running utterance; `known` is as in `show`."""
    show(state, known, hypothesis.y_sequence.tolist(), hypothesis.token_frames, state.frames_read)
    state.confidences = list(hypothesis.step_confidence) or [0.0] * len(state.tokens)
    state.frames_read = int(hypothesis.length)


def _last_frame(hypothesis: Any) -> int:
    """The frame in which a hypothesis' last token ends; 0 if it has none."""
    return hypothesis.token_frames[-1] + hypothesis.token_repeats[-1] if len(hypothesis.token_frames) else 0


def _since(last: float, frames: float, frame_seconds: float) -> StreamProgress:
    """The inputs of the endpointing rules for a transducer's utterance; its last token ends in frame `last` (0: no
    token). All hypotheses may end at cost 0."""
    frames = max(frames, last)
    return StreamProgress(frames * frame_seconds, (frames - last) * frame_seconds, 0.0)


def _beginning(phrases: Any) -> Hypothesis | None:
    """The partial hypothesis that begins an utterance with the phrases of its stream."""
    if phrases is None or phrases.is_empty():
        return None
    return Hypothesis.empty_with_biasing_cfg(phrases)
