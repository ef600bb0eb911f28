"""End live utterances by Kaldi's five rules [Kaldi, online2/online-endpoint.h].

An utterance ends as soon as one rule of `EndpointConfig` holds; a rule holds if all of its conditions do. The rules
apply to the partial results of any strategy, after each chunk:

    decoder.push(streams, log_probs, lengths)
    for i, partial in enumerate(decoder.partial(streams)):
        if find_endpoint(progress_of(partial, frame_seconds=0.08)):
            ...  # close the stream, and open another one

Kaldi detects silence by silence phones, which CTC models lack. Here, trailing silence is the time since the last
frame of the last token: after this frame, the best hypothesis has only blanks.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, fields, replace
from typing import Any

from nemo_gpu_decoding.checks import FieldError, fields_named
from nemo_gpu_decoding.schema import checked_options, option
from nemo_gpu_decoding.search.result import NBest


@checked_options
@dataclass(frozen=True)
class StreamProgress:
    """The inputs of the endpointing rules for one stream. Times are in seconds.

    Raises:
        ValueError: a number is negative or NaN, or the silence is longer than the utterance.
    """

    utterance_length: float = option(low=0, infinite=True)  # since the stream was opened
    # since the last token; all of the utterance if there is none
    trailing_silence: float = option(low=0, infinite=True)
    # Score of the best hypothesis minus that of the best hypothesis that may end here, natural log. 0 if any
    # hypothesis may end; inf if none may, or if it is unknown.
    relative_cost: float = option(math.inf, low=0, infinite=True)

    def check_rules(self) -> None:
        if self.trailing_silence > self.utterance_length:
            expected = f"at most {self.utterance_length} (utterance_length)"
            raise FieldError("trailing_silence", self.trailing_silence, expected)

    @property
    def contains_speech(self) -> bool:
        return self.trailing_silence < self.utterance_length


@checked_options
@dataclass(frozen=True)
class EndpointRule:
    """An endpointing rule, which holds if all of its conditions hold.

    Raises:
        ValueError: a number is negative or NaN.
    """

    # The best hypothesis has at least one token.
    must_contain_speech: bool
    # Minimum seconds of silence at the end, >= 0; 0: no condition.
    min_trailing_silence: float = option(0.0, low=0, infinite=True)
    # Maximum of `StreamProgress.relative_cost`, >= 0; inf: no condition.
    max_relative_cost: float = option(math.inf, low=0, infinite=True)
    # Minimum seconds since the stream was opened, >= 0; 0: no condition.
    min_utterance_length: float = option(0.0, low=0, infinite=True)

    def holds(self, progress: StreamProgress) -> bool:
        return (
            (progress.contains_speech or not self.must_contain_speech)
            and progress.trailing_silence >= self.min_trailing_silence
            and progress.relative_cost <= self.max_relative_cost
            and progress.utterance_length >= self.min_utterance_length
        )


@dataclass(frozen=True)
class EndpointConfig:
    """Kaldi's five rules for the end of an utterance, with Kaldi's defaults; a rule that is None is off."""

    rule1: EndpointRule | None = EndpointRule(False, min_trailing_silence=5.0)  # no speech
    rule2: EndpointRule | None = EndpointRule(True, min_trailing_silence=0.5, max_relative_cost=2.0)  # likely ended
    rule3: EndpointRule | None = EndpointRule(True, min_trailing_silence=1.0, max_relative_cost=8.0)  # perhaps ended
    rule4: EndpointRule | None = EndpointRule(True, min_trailing_silence=2.0)  # a sentence that breaks off
    rule5: EndpointRule | None = EndpointRule(False, min_utterance_length=20.0)  # a long utterance without a pause

    def rules(self) -> Iterator[tuple[str, EndpointRule]]:
        """Yield the name and the conditions of each rule that is on."""
        for field in fields(self):
            rule = getattr(self, field.name)
            if rule is not None:
                yield field.name, rule


KALDI_RULES = EndpointConfig()


def read_rules(options: Any, name: str = "rules") -> EndpointConfig:
    """Build endpointing rules from the options of a config file.

    Args:
        options: "kaldi", or values by rule and condition, {"rule2": {"min_trailing_silence": 0.8}, "rule1": None};
            None turns a rule off. Missing values are Kaldi's.
        name: name of the options in messages.

    Raises:
        FieldError: a rule or condition does not exist, or its value is wrong.
    """
    if options == "kaldi":
        return KALDI_RULES
    if not isinstance(options, Mapping):
        raise FieldError(name, options, "kaldi, or conditions of rule1 .. rule5")
    _check_keys(name, options, KALDI_RULES)
    rules = {}
    for rule, conditions in options.items():
        default = getattr(KALDI_RULES, rule)
        if conditions is not None:
            if not isinstance(conditions, Mapping):
                raise FieldError(f"{name}.{rule}", conditions, "conditions, or null")
            _check_keys(f"{name}.{rule}", conditions, default)
            with fields_named(f"{name}.{rule}.{{}}"):
                default = replace(default, **conditions)
        rules[rule] = None if conditions is None else default
    return replace(KALDI_RULES, **rules)


def _check_keys(name: str, options: Mapping[str, Any], known: Any) -> None:
    names = [field.name for field in fields(known)]
    for key in options:
        if key not in names:
            raise FieldError(f"{name}.{key}", options[key], f"a key of {', '.join(names)}")


def find_endpoint(progress: StreamProgress, config: EndpointConfig = KALDI_RULES) -> str | None:
    """Return the name of the first rule that holds, such as "rule2", or None if the utterance continues."""
    return next((name for name, rule in config.rules() if rule.holds(progress)), None)


def progress_of(partial: NBest, frame_seconds: float, relative_cost: float | None = None) -> StreamProgress:
    """Return the `StreamProgress` of a partial result.

    Args:
        partial: result of one stream, from a decoder's `partial`.
        frame_seconds: seconds from one frame of log-probs to the next.
        relative_cost: see `StreamProgress`. Results of word graphs contain it. With other strategies, rules 2 and 3
            hold only if a value is given: 0 for flexctc_beam without an LM, where every hypothesis may end.

    Raises:
        ValueError: frame_seconds is not above 0, or relative_cost is negative.
    """
    if not 0 < frame_seconds < math.inf:
        raise ValueError(f"frame_seconds is {frame_seconds}, expected a finite number > 0")
    cost = next(cost for cost in (relative_cost, partial.relative_cost, math.inf) if cost is not None)
    silent = trailing_blank_frames(partial)
    return StreamProgress(partial.num_frames * frame_seconds, silent * frame_seconds, cost)


def trailing_blank_frames(partial: NBest) -> int:
    """Return the number of frames after the last token of the best hypothesis, or of all frames without a token."""
    best = partial.best
    if not len(best):
        return partial.num_frames
    return max(0, partial.num_frames - int(best.frames[-1] + best.repeats[-1]))
