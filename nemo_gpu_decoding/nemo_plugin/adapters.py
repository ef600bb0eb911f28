"""Small subclasses of NeMo's decoding classes, for what our decoders return and NeMo's do not.

NeMo makes the object; `constructors.py` then moves it to the subclass. It is made within a function
and has one base, since Python lets an object change its class only where the memory layouts agree.
Methods that are not named here are NeMo's.
"""

from __future__ import annotations

from functools import cache
from typing import Any

import numpy as np

from nemo_gpu_decoding.nemo_plugin.hypotheses import (
    BeamHypothesis,
    NBestList,
    TimedNBestList,
    TransducerHypothesis,
)
from nemo_gpu_decoding.nemo_plugin.wfst_adapter import adapted_to_words


@cache
def adapted(cls: Any, family: str, section: str = "beam") -> type:
    """The subclass of a decoding class, NeMo's or a user's own; the same one every time.

    `family` and `section` are those of a `StrategySpec`.
    """
    subclass = {"ctc": _adapted_ctc, "rnnt": _adapted_rnnt}[family](cls)
    if section == "wfst":
        subclass = adapted_to_words(subclass)
    subclass.__name__, subclass.__qualname__ = cls.__name__, cls.__qualname__
    return subclass


def _adapted_ctc(base: Any) -> type:
    class Adapted(base):
        """Our CTC decoders return tokens, not frame labels: there is nothing left to collapse."""

        def decode_hypothesis(self, hypotheses_list: list[Any], fold_consecutive: bool) -> list:
            """Set `text`: a string, or where times are wanted what `compute_ctc_timestamps` reads, which
            is (token ids, differences of the start frames, frames per token)."""
            for hypothesis in hypotheses_list:
                ids = hypothesis.y_sequence.tolist()
                if self.compute_timestamps is True:
                    lengths = np.diff(hypothesis.token_frames, prepend=0).tolist()
                    hypothesis.text = (ids, lengths, hypothesis.token_repeats)
                else:
                    hypothesis.text = self.decode_tokens_to_str_with_strip_punctuation(ids)
            return hypotheses_list

        def compute_ctc_timestamps(self, hypothesis: BeamHypothesis, timestamp_type: str = "all") -> Any:
            """Accept the triple that NeMo's n-best branch leaves in `text`, and add the confidence that
            this branch forgets."""
            if len(hypothesis.text) == 3:
                if self.preserve_token_confidence:
                    self.compute_confidence([hypothesis])
                hypothesis.text = hypothesis.text[:2]
            return super().compute_ctc_timestamps(hypothesis, timestamp_type)

        def ctc_decoder_predictions_tensor(self, *args: Any, **kwargs: Any) -> list:
            results = super().ctc_decoder_predictions_tensor(*args, **kwargs)
            list_type = TimedNBestList if self.compute_timestamps is True else NBestList
            return [list_type(result) if isinstance(result, list) else result for result in results]

    return Adapted


def _adapted_rnnt(base: Any) -> type:
    class Adapted(base):
        """Our transducer decoders may return n-best lists with times and confidence."""

        def rnnt_decoder_predictions_tensor(
            self,
            encoder_output: Any,
            encoded_lengths: Any,
            return_hypotheses: bool = False,
            partial_hypotheses: list[Any] | None = None,
        ) -> list:
            """As NeMo's, but n-best lists look like a hypothesis where NeMo reads their text, and have
            the confidence that NeMo gives to single hypotheses only."""
            results = super().rnnt_decoder_predictions_tensor(
                encoder_output, encoded_lengths, return_hypotheses, partial_hypotheses
            )
            timed = self.compute_timestamps is True and return_hypotheses
            list_type = TimedNBestList if timed else NBestList
            for result in results:
                if return_hypotheses and isinstance(result, list) and self.preserve_token_confidence:
                    self.compute_confidence(result)
            return [list_type(result) if isinstance(result, list) else result for result in results]

        def compute_confidence(self, hypotheses_list: list[Any]) -> list:
            """NeMo wants the start frames in `timestamp`, where the times in words and segments are by
            then: lend it the frames."""
            stamps = [hypothesis.timestamp for hypothesis in hypotheses_list]
            for hypothesis in hypotheses_list:
                if isinstance(hypothesis, TransducerHypothesis):
                    hypothesis.timestamp = hypothesis.token_frames
            try:
                return super().compute_confidence(hypotheses_list)
            finally:
                for hypothesis, stamp in zip(hypotheses_list, stamps, strict=True):
                    hypothesis.timestamp = stamp

    return Adapted
