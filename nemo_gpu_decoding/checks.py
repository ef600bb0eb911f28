"""Checks of single values, and the error that names the field at fault."""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable
from typing import Any


class FieldError(ValueError):
    """A ValueError about one field: "beam is 0.0, expected a finite number > 0".

    Who reads the value under another name (a key of a config, an option of a command) raises
    `error.named("wfst.beam_width")` in its place; nobody takes the message apart.

    Args:
        field: name of the field.
        value: what was seen.
        expected: what was expected, as it continues "expected ...".
        note: what else there is to know about the value, behind it: "with merge='prefix'".
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
    if isinstance(value, bool) or not isinstance(value, int) or not low <= value <= high:
        raise FieldError(field, value, f"an integer {low} .. {high}")


def check_number(field: str, value: Any, *, above_zero: bool = False, negative: bool = False) -> None:
    """Raise a FieldError unless `value` is a finite number, >= 0, or > 0, or `negative`: any."""
    is_number = isinstance(value, (int, float)) and not isinstance(value, bool)
    if not is_number or not math.isfinite(value) or (value <= 0 and above_zero):
        raise FieldError(field, value, f"a finite number{_range(above_zero, negative)}")
    if value < 0 and not negative:
        raise FieldError(field, value, f"a finite number{_range(above_zero, negative)}")


def _range(above_zero: bool, negative: bool) -> str:
    return " > 0" if above_zero else "" if negative else " >= 0"


def check_choice(field: str, value: Any, choices: Iterable[str]) -> None:
    """Raise a FieldError unless `value` is one of `choices`."""
    names = choices if isinstance(choices, Collection) else list(choices)
    if value not in names:
        raise FieldError(field, value, f"one of {', '.join(names)}")


def check_bool(field: str, value: Any) -> None:
    """Raise a FieldError unless `value` is True or False."""
    if not isinstance(value, bool):
        raise FieldError(field, value, "True or False")
