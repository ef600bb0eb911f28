"""NeMo's CTC decoding object for results whose words come from a word graph.

NeMo joins tokens to text and finds words in that again. Here the graph's words are the text, and the
search knows the frames of each. Of NeMo's stays what it does to any text: no space before punctuation
marks that the model knows, `word_seperator` between words, segments, confidence by `confidence_cfg`.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Any

from nemo.collections.asr.parts.utils.timestamp_utils import get_segment_offsets

from nemo_gpu_decoding.nemo_plugin.hypotheses import WordHypothesis
from nemo_gpu_decoding.search.cuda_wfst.result import Word

Offset = dict[str, Any]  # {"word": text, "start_offset": frame, "end_offset": one past the last frame}


@dataclass(frozen=True)
class WrittenWord:
    """What is written without a space in between: a word, and punctuation that follows it."""

    text: str
    start_frame: int
    end_frame: int
    first_token: int
    end_token: int


def written_words(words: Sequence[Word], punctuation: Collection[str]) -> list[WrittenWord]:
    """Words as NeMo writes them; a mark of punctuation does not make the word before it last longer."""
    written: list[WrittenWord] = []
    for word in words:
        if written and word.text[0] in punctuation:
            last = written.pop()
            text, start, end, first = last.text, last.start_frame, last.end_frame, last.first_token
            written.append(WrittenWord(text + word.text, start, end, first, word.end_token))
        else:
            written.append(WrittenWord(word.text, *word[2:6]))
    return written


def adapted_to_words(base: Any) -> type:
    """The subclass of our adapted CTC decoding class that knows what to do with word hypotheses."""

    class Adapted(base):
        """Text, times and confidence of the words of a graph. Other hypotheses are as in `base`: NeMo's
        cache-aware streaming passes on labels, in which no graph has been searched."""

        def decode_hypothesis(self, hypotheses_list: list[Any], fold_consecutive: bool) -> list:
            for hypothesis in hypotheses_list:
                if isinstance(hypothesis, WordHypothesis) and self.compute_timestamps is not True:
                    hypothesis.text = self._text_of(hypothesis)
                else:  # where times are wanted, what NeMo's code up to `compute_ctc_timestamps` reads
                    super().decode_hypothesis([hypothesis], fold_consecutive)
            return hypotheses_list

        def compute_ctc_timestamps(self, hypothesis: Any, timestamp_type: str = "all") -> Any:
            """`timestamp` as NeMo's, with the frames in which the search found tokens and words."""
            if not isinstance(hypothesis, WordHypothesis):
                return super().compute_ctc_timestamps(hypothesis, timestamp_type)
            if len(hypothesis.text) == 3 and self.preserve_token_confidence:  # n-best lists
                self.compute_confidence([hypothesis])
            stamps: dict[str, list] = {"timestep": list(hypothesis.token_frames)}
            words = self._word_offsets(hypothesis)
            if timestamp_type in ("char", "all"):
                stamps["char"] = self._token_offsets(hypothesis)
            if timestamp_type in ("word", "all"):
                stamps["word"] = words
            if timestamp_type in ("segment", "all"):
                stamps["segment"] = get_segment_offsets(
                    words,
                    segment_delimiter_tokens=self.segment_seperators,
                    supported_punctuation=self.supported_punctuation,
                    segment_gap_threshold=self.segment_gap_threshold,
                )
            hypothesis.timestamp = stamps
            hypothesis.text = self._text_of(hypothesis)
            return hypothesis

        def _aggregate_token_confidence(self, hypothesis: Any) -> list[float]:
            """Confidence of the written words from that of their tokens."""
            if not isinstance(hypothesis, WordHypothesis):
                return super()._aggregate_token_confidence(hypothesis)
            confidence = hypothesis.token_confidence
            return [
                self._aggregate_confidence(confidence[word.first_token : word.end_token])
                for word in self._written(hypothesis)
            ]

        def _written(self, hypothesis: WordHypothesis) -> list[WrittenWord]:
            return written_words(hypothesis.words, self.supported_punctuation or ())

        def _text_of(self, hypothesis: WordHypothesis) -> str:
            return self.word_seperator.join(word.text for word in self._written(hypothesis))

        def _word_offsets(self, hypothesis: WordHypothesis) -> list[Offset]:
            return [
                {"word": word.text, "start_offset": word.start_frame, "end_offset": word.end_frame}
                for word in self._written(hypothesis)
            ]

        def _token_offsets(self, hypothesis: WordHypothesis) -> list[Offset]:
            ids = hypothesis.y_sequence.tolist()
            texts = [self.decode_tokens_to_str(self.decode_ids_to_tokens([token])) for token in ids]
            spans = zip(texts, hypothesis.token_frames, hypothesis.token_repeats, strict=True)
            return [
                {"char": text, "start_offset": start, "end_offset": start + repeats}
                for text, start, repeats in spans
            ]

    return Adapted
