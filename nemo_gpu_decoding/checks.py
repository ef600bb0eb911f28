"""Checks of single values, and `FieldError`, which names the invalid field."""

from __future__ import annotations

import dataclasses
import difflib
import logging
import math
from collections.abc import Collection, Iterable, Mapping, Sequence
from functools import wraps
from numbers import Integral, Real
from typing import Any, TypeVar

T = TypeVar("T")
logger = logging.getLogger("nemo_gpu_decoding")

MOST_FAULTS = 3  # listed in a message
MOST_NUMBER, LEAST_FACTOR = 1e9, 1e-9  # outside of these, float32 sums overflow or factors become 0


class FieldError(ValueError):
    """A ValueError about one field: "beam is 0.0, expected a finite number > 0".

    If the caller knows the value under another name (a key of a config, an option of a command), it raises
    `error.named("wfst.beam_width")` instead. So no code has to parse the message.

    Args:
        field: name of the field.
        value: the value seen.
        expected: the expected value, as text after "expected".
        note: text after the value, such as "with merge='prefix'".
    """

    def __init__(self, field: str, value: Any, expected: str, note: str = "") -> None:
        space = " " if note and not note.startswith(",") else ""
        super().__init__(f"{field} is {value!r}{space}{note}, expected {expected}")
        self.field, self.value, self.expected, self.note = field, value, expected, note

    def __reduce__(self) -> tuple[Any, ...]:
        return FieldError, (self.field, self.value, self.expected, self.note)

    def named(self, field: str) -> FieldError:
        """The same error about the field under another name."""
        return FieldError(field, self.value, self.expected, self.note)


def check_int(field: str, value: Any, low: int, high: int) -> None:
    """Raise a FieldError unless `value` is an integer in low .. high."""
    if isinstance(value, bool) or not isinstance(value, (int, Integral)) or not low <= int(value) <= high:
        raise FieldError(field, value, f"an integer {low} .. {high}")


def check_number(field: str, value: Any, *, above_zero: bool = False, negative: bool = False) -> None:
    """Raise a FieldError unless `value` is a finite number, >= 0, or > 0, or `negative`: any.

    Its size is at most MOST_NUMBER; numbers > 0 are at least LEAST_FACTOR.
    """
    is_finite = isinstance(value, int) or (isinstance(value, (float, Real)) and math.isfinite(value))
    is_number = is_finite and not isinstance(value, bool)
    if not is_number or (value <= 0 and above_zero) or (value < 0 and not negative):
        raise FieldError(field, value, "a finite number" + (" > 0" if above_zero else "" if negative else " >= 0"))
    if abs(value) > MOST_NUMBER or (above_zero and value < LEAST_FACTOR):
        least = LEAST_FACTOR if above_zero else -MOST_NUMBER if negative else 0
        raise FieldError(field, value, f"a number {least:g} .. {MOST_NUMBER:g}: scores are float32")


def check_choice(field: str, value: Any, choices: Iterable[str]) -> None:
    """Raise a FieldError unless `value` is one of `choices`."""
    names = choices if isinstance(choices, Collection) else list(choices)
    if not isinstance(value, str) or value not in names:
        raise FieldError(field, value, f"one of {', '.join(names)}")


def check_bool(field: str, value: Any) -> None:
    """Raise a FieldError unless `value` is True or False."""
    if not isinstance(value, bool):
        raise FieldError(field, value, "True or False")


_TYPES: Mapping[str, tuple[type, str]] = {  # annotation -> the type of values, and its name in messages
    "bool": (bool, "True or False"),
    "int": (Integral, "an integer"),
    "float": (Real, "a number"),
    "str": (str, "a string"),
}


def check_type(field: str, value: Any, annotation: str) -> None:
    """Raise a FieldError unless `value` suits "bool", "int", "float" or "str", or one of these "| None".

    An int is valid for "float"; a bool is not. Values with other annotations are not checked.
    """
    name, _, other = annotation.partition(" | ")
    if name not in _TYPES or (value is None and other == "None"):
        return
    kind, expected = _TYPES[name]
    if not isinstance(value, kind) or (isinstance(value, bool) and name != "bool"):
        raise FieldError(field, value, expected + (" or None" if other else ""))


def check_kind(field: str, value: Any, kind: Any, made_by: str = "") -> None:
    """Raise a FieldError unless `value` is of this class; `made_by` says what makes such objects."""
    if not isinstance(value, kind):
        raise FieldError(field, value, f"a {kind.__name__}{made_by}")


def leave_out(name: str, faults: Sequence[str], kept: int, what: str = "phrases") -> None:
    """One warning for the items of a list that are left out because of their faults.

    Raises:
        ValueError: no items are kept.
    """
    if not faults:
        return
    shown = "; ".join(faults[:MOST_FAULTS]) + (f"; and {len(faults) - MOST_FAULTS} more" * (len(faults) > MOST_FAULTS))
    if not kept:
        raise ValueError(f"{name}: {shown}")
    logger.warning("%s: %d of %d %s left out: %s", name, len(faults), len(faults) + kept, what, shown)


def did_you_mean(name: str, valid: Iterable[str], form: str = " (did you mean '{}'?)", cutoff: float = 0.6) -> str:
    """ " (did you mean 'beam_size'?)", or "" if no valid name is similar."""
    close = difflib.get_close_matches(name, list(valid), 1, cutoff)
    return form.replace("{}", close[0], 1) if close else ""


def checked_options(cls: type[T]) -> type[T]:
    """Decorator of a dataclass of options, whose errors name values of wrong types and unknown keywords.

    `__post_init__` checks ranges. Fields that it does not check are compared with their annotations.

    Raises:
        FieldError: by `cls(...)`, for a value of another type.
        TypeError: by `cls(...)`, for an unknown keyword; suggests the closest valid one and lists all.
    """
    create = cls.__init__
    annotations = {field.name: str(field.type) for field in dataclasses.fields(cls) if field.init}  # type: ignore[arg-type]

    @wraps(create)
    def checked(self: Any, *args: Any, **options: Any) -> None:
        for name in options:
            if name not in annotations:
                hint, listed = did_you_mean(name, annotations), ", ".join(annotations)
                raise TypeError(f"{cls.__name__}() has no option '{name}'{hint}; valid options: {listed}")
        given = {**dict(zip(annotations, args, strict=False)), **options}
        for name, value in given.items():
            if annotations[name] == "bool":  # before other code branches on the value
                check_type(name, value, "bool")
        try:
            create(self, *args, **options)
        except TypeError:  # a value that cannot be compared with numbers
            for name, value in given.items():
                check_type(name, value, annotations[name])
            raise
        for name, value in given.items():
            check_type(name, value, annotations[name])

    cls.__init__ = checked  # type: ignore[method-assign]
    return cls
