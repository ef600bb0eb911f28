"""Check the values of options, and raise a `FieldError` that names the option with an invalid value."""

from __future__ import annotations

import difflib
import logging
import math
from collections.abc import Collection, Iterable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from functools import lru_cache
from numbers import Integral, Real
from typing import Any, TypeVar

logger = logging.getLogger("nemo_gpu_decoding")
K = TypeVar("K")

MOST_FAULTS = 3  # listed in a message
_MOST_SHOWN = 200  # characters of a value in a message
MOST_NUMBER, LEAST_FACTOR = 1e9, 1e-9  # beyond these limits, float32 sums overflow or factors become 0


class FieldError(ValueError):
    """A ValueError about the value of one field: "beam is 0.0, expected a finite number > 0".

    A caller with another name for the value (a config key, a command's option) raises `error.named("wfst.beam_width")`
    instead, so that no code has to parse the message.

    Args:
        field: name of the field.
        value: the value seen.
        expected: the expected value, as text after "expected".
        note: text after the value, such as "with merge='prefix'".
    """

    def __init__(self, field: str, value: Any, expected: str, note: str = "") -> None:
        space = " " if note and not note.startswith(",") else ""
        shown = repr(value)
        shown = shown if len(shown) <= _MOST_SHOWN else f"{shown[:_MOST_SHOWN]}..."
        super().__init__(f"{field} is {shown}{space}{note}, expected {expected}")
        self.field, self.value, self.expected, self.note = field, value, expected, note

    def __reduce__(self) -> tuple[Any, ...]:
        return FieldError, (self.field, self.value, self.expected, self.note)

    def named(self, field: str) -> FieldError:
        """Return a copy of this `FieldError` with another name for the field."""
        return FieldError(field, self.value, self.expected, self.note)


@contextmanager
def fields_named(form: str) -> Iterator[None]:
    """Catch a FieldError of the `with` block, and raise it with the field name `form.format(name of the field)`."""
    try:
        yield
    except FieldError as error:
        raise error.named(form.format(error.field)) from None


@contextmanager
def having(variable: ContextVar[Any], value: Any) -> Iterator[None]:
    """Set a context variable to a value within the `with` block, and restore the old value at the end."""
    token = variable.set(value)
    try:
        yield
    finally:
        variable.reset(token)


@lru_cache(4096)
def warn_once(message: str) -> None:
    """Log a warning, unless the same message has been logged before in this process."""
    logger.warning("%s", message)


def check_int(field: str, value: Any, low: int, high: int | None = None) -> None:
    """Raise a FieldError unless `value` is an integer in low .. high."""
    most = math.inf if high is None else high
    if isinstance(value, bool) or not isinstance(value, (int, Integral)) or not low <= int(value) <= most:
        raise FieldError(field, value, f"an integer >= {low}" if high is None else f"an integer {low} .. {high}")


def check_number(
    field: str, value: Any, *, above_zero: bool = False, negative: bool = False, infinite: bool = False
) -> None:
    """Raise a FieldError unless `value` is a finite number >= 0 (with `above_zero` > 0, with `negative` any number).

    The value's magnitude is at most MOST_NUMBER; with `above_zero` at least LEAST_FACTOR. `infinite` allows inf.
    """
    is_finite = isinstance(value, int) or (isinstance(value, (float, Real)) and math.isfinite(value))
    is_number = (is_finite or (infinite and value == math.inf)) and not isinstance(value, bool)
    if not is_number or (value <= 0 and above_zero) or (value < 0 and not negative):
        sign = " > 0" if above_zero else "" if negative else " >= 0"
        raise FieldError(field, value, f"a number{sign} (or inf)" if infinite else f"a finite number{sign}")
    if not infinite and (abs(value) > MOST_NUMBER or (above_zero and value < LEAST_FACTOR)):
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


def check_indices(name: str, values: Any, size: int) -> None:
    """Raise a ValueError unless all values of an array are in 0 .. size-1."""
    if len(values) and (values.min() < 0 or values.max() >= size):
        bad = values.min() if values.min() < 0 else values.max()
        raise ValueError(f"{name} holds {bad}, expected 0 .. {size - 1}")


def check_kind(field: str, value: Any, kind: Any, made_by: str = "") -> None:
    """Raise a FieldError unless `value` is of class `kind`; `made_by` tells the user how to make such an object."""
    if not isinstance(value, kind):
        raise FieldError(field, value, f"a {getattr(kind, '__name__', kind)}{made_by}")


def given_or_default(field: str, value: K | None, kind: type[K]) -> K:
    """Return `value`, or `kind()` for None; raise a FieldError unless the value is of class `kind`."""
    value = kind() if value is None else value
    check_kind(field, value, kind)
    return value


class NothingLeftError(ValueError):
    """A ValueError that says why all items of a list were left out."""


def leave_out(name: str, faults: Sequence[str], kept: int, what: str = "phrases") -> None:
    """Log one warning that lists the items, such as phrases, that are left out because they have faults.

    Raises:
        NothingLeftError: no items are kept.
    """
    if not faults:
        return
    shown = "; ".join(faults[:MOST_FAULTS]) + (f"; and {len(faults) - MOST_FAULTS} more" * (len(faults) > MOST_FAULTS))
    if not kept:
        raise NothingLeftError(f"{name}: {shown}")
    logger.warning("%s: %d of %d %s left out: %s", name, len(faults), len(faults) + kept, what, shown)


def did_you_mean(name: str, valid: Iterable[str], form: str = " (did you mean '{}'?)", cutoff: float = 0.6) -> str:
    """Return " (did you mean 'beam_size'?)", or "" if no valid name is similar."""
    close = difflib.get_close_matches(name, list(valid), 1, cutoff)
    return form.replace("{}", close[0], 1) if close else ""
