"""Check options: a dataclass field declares type, default, range and choices; the comment above it is its help."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from functools import wraps
from numbers import Integral, Real
from typing import Any, TypeVar

from nemo_gpu_decoding.checks import FieldError, check_choice, check_int, check_number, did_you_mean

T = TypeVar("T")

_TYPES: Mapping[str, tuple[type, str]] = {  # annotation -> the type of values, and its name in messages
    "bool": (bool, "True or False"),
    "int": (Integral, "an integer"),
    "float": (Real, "a number"),
    "str": (str, "a string"),
}


def option(default: Any = dataclasses.MISSING, **rule: Any) -> Any:
    """Return a dataclass field with a rule that `checked_options` checks for the value, or for all items of a list.

    Args:
        low, high: least and greatest value; `high` may be the name of an attribute.
        above: 0 if values must be greater than 0. A float without `low` and `above` may be any finite number.
        infinite: whether inf is valid.
        choices: the valid texts.
        unused: why values other than the default have no effect; such values are invalid.
        needs: another option, in the form NAME=VALUE, without which other values than the default are invalid.
        nemo: the option's key in NeMo's section, if the key has another name; None means the section has no such key.
        cli: True: commands have this option of a search, see `with_options_of`; "tune": `tune` alone has it.
    """
    assert rule.keys() <= {"low", "high", "above", "infinite", "choices", "unused", "needs", "nemo", "cli"}, rule
    if isinstance(default, list | dict):
        return dataclasses.field(default_factory=default.copy, hash=False, metadata={"rule": rule})
    return dataclasses.field(default=default, metadata={"rule": rule})


def key_of(field: dataclasses.Field[Any]) -> str | None:
    """Return the key of an option in NeMo's `beam` or `wfst` section, or None if the option has no key there."""
    return field.metadata.get("rule", {}).get("nemo", field.name)


def defaults_of(*classes: Any) -> dict[str, Any]:
    """Return a mapping from keys of NeMo's section to the defaults of these dataclasses."""
    options = [field for cls in classes for field in dataclasses.fields(cls)]
    return {key: field.default for field in options if (key := key_of(field))}


def check_option(name: str, value: Any, annotation: str, rule: Mapping[str, Any] | None = None) -> None:
    """Raise a FieldError unless `value` agrees with an annotation such as "float | None" and with the rule.

    An int is valid for "float"; a bool is not. Values with other annotations are not checked.
    """
    kind, _, other = annotation.partition(" | ")
    least = None if rule is None else rule.get("low", rule.get("above"))
    if value is None and other == "None":
        return
    if kind.startswith("list["):
        for item in value:
            check_option(name, item, kind[5:-1], rule)
    elif rule and "choices" in rule:
        check_choice(name, value, rule["choices"])
    elif kind == "int" and rule and least is not None:
        check_int(name, value, least, rule.get("high"))
    elif kind == "float" and rule is not None and "unused" not in rule:
        check_number(name, value, above_zero="above" in rule, negative=least != 0, infinite="infinite" in rule)
        if not rule.get("low", value) <= value <= rule.get("high", value):
            most = rule.get("high")
            inside = f"a number <= {most}" if least is None else f"a number in [{least}, {most}]"
            raise FieldError(name, value, f"a number >= {least}" if most is None else inside)
    elif kind in _TYPES:
        known, expected = _TYPES[kind]
        if not isinstance(value, known) or (isinstance(value, bool) and kind != "bool"):
            raise FieldError(name, value, expected.replace(" or", ",") + " or None" if other else expected)


def checked_options(cls: type[T]) -> type[T]:
    """Decorate a dataclass of options, so that its constructor checks values and rejects unknown keywords.

    The method `check_rules` of the dataclass checks rules between options, after all single values.

    Raises:
        FieldError: by `cls(...)`, for an invalid value.
        TypeError: by `cls(...)`, for an unknown keyword; suggests the closest valid one and lists all.
    """
    create, fields = cls.__init__, dataclasses.fields(cls)  # type: ignore[arg-type]
    names = [field.name for field in fields if field.init]
    kinds = [field.type.__name__ if isinstance(field.type, type) else str(field.type) for field in fields]
    declared = [(field, kind, field.metadata.get("rule")) for field, kind in zip(fields, kinds, strict=True)]
    # ranges that depend on other options are checked last
    ordered = sorted(declared, key=lambda each: isinstance((each[2] or {}).get("high"), str))

    @wraps(create)
    def checked(self: Any, *args: Any, **options: Any) -> None:
        for name in options:
            if name not in names:
                hint, listed = did_you_mean(name, names), ", ".join(names)
                raise TypeError(f"{cls.__name__}() has no option '{name}'{hint}; valid options: {listed}")
        create(self, *args, **options)
        for field, kind, rule in ordered:
            value = getattr(self, field.name)
            if rule and isinstance(rule.get("high"), str):
                check_option(field.name, value, kind, {**rule, "high": getattr(self, rule["high"])})
            elif value is not field.default:
                check_option(field.name, value, kind, rule)
                if rule and "unused" in rule and value != field.default:
                    note = f", which has no effect here: {rule['unused']}"
                    raise FieldError(field.name, value, repr(field.default), note)
        if hasattr(self, "check_rules"):
            self.check_rules()
        for field, _, rule in declared:
            needs, value = (rule or {}).get("needs", ""), getattr(self, field.name)
            if needs and value != field.default and not getattr(self, needs.partition("=")[0]):
                raise ValueError(f"{field.name} is {value!r}, which needs {needs}")

    cls.__init__ = checked  # type: ignore[method-assign]
    return cls
