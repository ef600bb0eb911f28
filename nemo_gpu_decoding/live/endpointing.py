"""When a live utterance has ended: Kaldi's five rules [Kaldi, online2/online-endpoint.h].

An utterance ends as soon as one rule holds, that is, if all conditions of the rule are met:

    rule   anything said   trailing silence   relative cost   length     what it is for
    1      -               5 s                -               -          nobody speaks
    2      yes             0.5 s              2               -          a sentence that is surely over
    3      yes             1 s                8               -          one that may be over
    4      yes             2 s                -               -          one that breaks off
    5      -               -                  -               20 s       a speaker who does not stop

They work on the partial results of any strategy, after each chunk:

    decoder.push(streams, log_probs, lengths)
    for i, partial in enumerate(decoder.partial(streams)):
        if find_endpoint(progress_of(partial, frame_seconds=0.08)):
            ...  # close the stream, and open another one

Silence is what Kaldi tells by its silence phones. A CTC model has none: here it is the time since the
last frame of the last token, all of which the best hypothesis calls blank.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, fields, replace
from typing import Any

from nemo_gpu_decoding.checks import FieldError, check_bool
from nemo_gpu_decoding.search.result import NBest


def _check_not_negative(name: str, value: float) -> None:
    if not value >= 0:  # NaN is not
        raise ValueError(f"{name} is {value}, expected a number >= 0")


@dataclass(frozen=True)
class StreamProgress:
    """What the rules ask of a stream. Times in seconds.

    Raises:
        ValueError: a number is negative or NaN, or the silence is longer than the utterance.
    """

    utterance_length: float  # since the stream was opened
    trailing_silence: float  # since the last token; all of the utterance if there is none
    # What the best hypothesis that may end here costs above the best of all, natural log, in units of
    # the search's scores. 0 where any hypothesis may end; inf where none may, or where it is not known.
    relative_cost: float = math.inf

    def __post_init__(self) -> None:
        for field in fields(self):
            _check_not_negative(field.name, getattr(self, field.name))
        if self.trailing_silence > self.utterance_length:
            raise ValueError(
                f"trailing_silence is {self.trailing_silence}, expected at most "
                f"{self.utterance_length} (utterance_length)"
            )

    @property
    def contains_speech(self) -> bool:
        return self.trailing_silence < self.utterance_length


@dataclass(frozen=True)
class EndpointRule:
    """Holds if all of its conditions do.

    Raises:
        ValueError: a number is negative or NaN.
    """

    # The best hypothesis has at least one token.
    must_contain_speech: bool
    # Seconds of silence at the end, at least; 0 asks for nothing.
    min_trailing_silence: float = 0.0
    # `StreamProgress.relative_cost` at most; inf asks for nothing.
    max_relative_cost: float = math.inf
    # Seconds since the stream was opened, at least; 0 asks for nothing.
    min_utterance_length: float = 0.0

    def __post_init__(self) -> None:
        for field in fields(self)[1:]:
            _check_not_negative(field.name, getattr(self, field.name))

    def holds(self, progress: StreamProgress) -> bool:
        return (
            (progress.contains_speech or not self.must_contain_speech)
            and progress.trailing_silence >= self.min_trailing_silence
            and progress.relative_cost <= self.max_relative_cost
            and progress.utterance_length >= self.min_utterance_length
        )


@dataclass(frozen=True)
class EndpointConfig:
    """Kaldi's rules with its defaults; a rule that is None is off."""

    rule1: EndpointRule | None = EndpointRule(False, min_trailing_silence=5.0)
    rule2: EndpointRule | None = EndpointRule(True, min_trailing_silence=0.5, max_relative_cost=2.0)
    rule3: EndpointRule | None = EndpointRule(True, min_trailing_silence=1.0, max_relative_cost=8.0)
    rule4: EndpointRule | None = EndpointRule(True, min_trailing_silence=2.0)
    rule5: EndpointRule | None = EndpointRule(False, min_utterance_length=20.0)

    def rules(self) -> Iterator[tuple[str, EndpointRule]]:
        """Name and rule of those that are on."""
        for field in fields(self):
            rule = getattr(self, field.name)
            if rule is not None:
                yield field.name, rule


KALDI_RULES = EndpointConfig()


def read_rules(options: Any, name: str = "rules") -> EndpointConfig:
    """Rules as a config file has them.

    Args:
        options: "kaldi", or values by rule and condition, {"rule2": {"min_trailing_silence": 0.8}, "rule1": None};
            None turns a rule off, and what is left out is Kaldi's.
        name: of the options, for messages.

    Raises:
        FieldError: names the rule or condition that there is not, or whose value is wrong.
    """
    if options == "kaldi":
        return KALDI_RULES
    if not isinstance(options, Mapping):
        raise FieldError(name, options, "kaldi, or conditions of rule1 .. rule5")
    _check_keys(name, options, KALDI_RULES)
    rules = {}
    for rule, own in options.items():
        default = getattr(KALDI_RULES, rule)
        if own is not None:
            if not isinstance(own, Mapping):
                raise FieldError(f"{name}.{rule}", own, "conditions, or null")
            _check_keys(f"{name}.{rule}", own, default)
            for condition, value in own.items():
                if condition == "must_contain_speech":
                    check_bool(f"{name}.{rule}.{condition}", value)
                elif isinstance(value, bool) or not isinstance(value, (int, float)) or not value >= 0:
                    raise FieldError(f"{name}.{rule}.{condition}", value, "a number >= 0")
            default = replace(default, **own)
        rules[rule] = None if own is None else default
    return replace(KALDI_RULES, **rules)


def _check_keys(name: str, options: Mapping[str, Any], known: Any) -> None:
    names = [field.name for field in fields(known)]
    for key in options:
        if key not in names:
            raise FieldError(f"{name}.{key}", options[key], f"a key of {', '.join(names)}")


def find_endpoint(progress: StreamProgress, config: EndpointConfig = KALDI_RULES) -> str | None:
    """The name of the first rule that says that the utterance has ended, None if none does."""
    return next((name for name, rule in config.rules() if rule.holds(progress)), None)


def progress_of(partial: NBest, frame_seconds: float, relative_cost: float | None = None) -> StreamProgress:
    """What the rules ask, from a partial result.

    Args:
        partial: of one stream, from a decoder's `partial`.
        frame_seconds: seconds from one frame of log-probs to the next.
        relative_cost: see `StreamProgress`. Word-graph results know it themselves. For others rules 2
            and 3 can only hold where it is given: 0 for flexctc_beam without an LM, whose hypotheses
            may all end.

    Raises:
        ValueError: frame_seconds is not above 0, or relative_cost is negative.
    """
    if not 0 < frame_seconds < math.inf:
        raise ValueError(f"frame_seconds is {frame_seconds}, expected a finite number > 0")
    if relative_cost is None:
        known = partial.relative_cost
        relative_cost = math.inf if known is None else known
    silent = trailing_blank_frames(partial)
    return StreamProgress(partial.num_frames * frame_seconds, silent * frame_seconds, relative_cost)


def trailing_blank_frames(partial: NBest) -> int:
    """Frames since the last one of the last token of the best hypothesis; all frames without tokens. 0 where a TDT
    token lasts longer than what was read."""
    best = partial.best
    if not len(best):
        return partial.num_frames
    return max(0, partial.num_frames - int(best.frames[-1] + best.repeats[-1]))
