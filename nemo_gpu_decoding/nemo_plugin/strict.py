"""Reading config sections so that nothing is silently ignored."""

from __future__ import annotations

import difflib
from collections.abc import Collection, Mapping, Sequence
from enum import Enum
from typing import Any


def check_keys(section: str, given: Collection[str], valid: Collection[str]) -> None:
    """Raise a ValueError for the first key of `section` that does not exist.

    The message names the key, suggests the closest valid one and lists all valid ones.
    """
    for key in given:
        if key not in valid:
            close = difflib.get_close_matches(str(key), valid, n=1)
            hint = f" (did you mean '{close[0]}'?)" if close else ""
            listed = ", ".join(sorted(valid))
            raise ValueError(f"unknown key '{section}.{key}'{hint}; valid keys: {listed}")


def check_untouched(
    section: str, given: Mapping[str, Any] | None, defaults: Mapping[str, Any], reason: str
) -> None:
    """Raise a ValueError for the first key of `section` that has been set to something.

    NeMo's structured configs carry the options of all its strategies: at their default they say nothing.
    """
    check_keys(section, given or (), defaults)
    for key, value in (given or {}).items():
        if value != defaults[key]:
            raise ValueError(
                f"'{section}.{key}' is {value!r}, which {reason}; remove it (default {defaults[key]!r})"
            )


def read_bool(key: str, value: Any) -> bool:
    if not isinstance(value, bool):
        raise ValueError(f"{key} is {value!r}, expected true or false")
    return value


def read_number(key: str, value: Any) -> float:
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        raise ValueError(f"{key} is {value!r}, expected a number")
    return float(value)


def read_count(key: str, value: Any) -> int:
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise ValueError(f"{key} is {value!r}, expected an integer >= 1")
    return value


def read_choice(key: str, value: Any, choices: Sequence[str]) -> str:
    """One of `choices`, given as a string in any case or as an enum member.

    A config that went through a saved `.nemo` holds the NAMES of enum members ("MAX") where the user
    had written values ("max"), hence any case.
    """
    spellings = (value.value, value.name) if isinstance(value, Enum) else (value,)
    for spelling in spellings:
        if str(spelling).lower() in choices:
            return str(spelling).lower()
    raise ValueError(f"{key} is {value!r}, expected one of {', '.join(choices)}")
