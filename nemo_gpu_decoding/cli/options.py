"""Read `key=value` arguments into a dataclass of options, and print the help text of these options.

A comment above or behind a dataclass field explains the option. `--help` and error messages show these comments. The
attribute `topic` of the dataclass is the heading of its options in `--help all`.
"""

from __future__ import annotations

import inspect
import os
import re
import textwrap
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass, fields, is_dataclass, make_dataclass
from datetime import date
from typing import Any, TypeVar, get_args, get_origin, get_type_hints

import yaml
from omegaconf import MISSING, DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from nemo_gpu_decoding.checks import did_you_mean
from nemo_gpu_decoding.schema import checked_options, key_of, option

T = TypeVar("T")
HELP_WIDTH = 100  # columns
FILES = ("audio", "manifest", "tarred_audio", "text")  # options for one file or several


class OptionError(ValueError):
    """An error about a command-line argument that is not `key=value`, or whose key is no option."""


@dataclass(frozen=True)
class Option:
    """One field of an options dataclass, as `--help` shows it."""

    name: str
    default: Any  # MISSING if the option is required
    comment: str
    topic: str

    @property
    def required(self) -> bool:
        return isinstance(self.default, str) and self.default == MISSING

    def describe(self, *, brief: bool = False) -> str:
        """Return `key=default` and the comment, or its first sentence, wrapped for a terminal."""
        head = f"  {self.name}={'(required)' if self.required else show_value(self.default)}"
        sentence = re.match(r".*?[^.\s]\.(?=\s|$)", self.comment) if brief else None
        body = textwrap.wrap(sentence[0] if sentence else self.comment, HELP_WIDTH - 6)
        return "\n".join([head, *(f"      {line}" for line in body)])


def show_value(value: Any) -> str:
    """Return the default of an option as text, in the form in which a user types it."""
    if value is None or value == "":
        return "null"
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, (list, tuple)):
        return "[" + ",".join(show_value(v) for v in value) + "]"
    return str(value)


def parse_options(options_class: type[T], arguments: Sequence[str], positional: str | None = None) -> T:
    """Build `options_class` from `["key=value", ...]`; append arguments without `=` to the list option `positional`.

    Values of text fields are used unchanged; others are read as YAML (`8`, `[4,8]`, `null`). A list may be a single
    value, and may omit its brackets (`4,8`), because some shells require quotes for brackets. Dotted keys set entries
    of mappings (`decoding.beam.beam_size=8`).

    Raises:
        OptionError: an argument is not `key=value`, or a key is unknown.
        ValueError: a required key is missing, or a value is out of range.
    """
    config = OmegaConf.structured(options_class)
    options = {option.name: option for option in options_of(options_class)}
    rest = [argument for argument in arguments if positional and "=" not in argument and not argument.startswith("-")]
    if positional and rest:
        _set(config, positional, rest, options[positional])
    for argument in [given for given in arguments if given not in rest]:
        key, value = _split(argument, options)
        top = key.split(".", 1)[0]
        if top not in options or (key != top and not isinstance(config._get_node(top), DictConfig)):
            hint = did_you_mean(key, options, "; did you mean {}?", cutoff=0.5)
            raise OptionError(f"unknown option {key!r}{hint}")
        _set(config, key, _read_value(options_class, key, value), options[top])
    missing = [name for name in options if OmegaConf.is_missing(config, name)]
    if missing:
        described = "\n".join(options[name].describe() for name in missing)
        raise ValueError(f"missing {', '.join(name + '=...' for name in missing)}\n{described}")
    try:
        return OmegaConf.to_object(config)  # type: ignore[return-value]
    except OmegaConfBaseException as error:
        raise ValueError(_first_line(error)) from error


def help_text(
    program: str, summary: str, cls: type, examples: Sequence[str], positional: str | None = None, first: Any = ()
) -> str:
    """Return the text of `PROGRAM --help`: options with default and meaning, and examples.

    Args:
        first: names of the options that most people need. The help explains each of these in a sentence, and lists
            other options by topic. (): it explains all by topic.
    """
    options = {shown.name: shown for shown in options_of(cls)}
    names = [shown.name for shown in options.values() if shown.required]
    required = [f"{name.upper()} ..." if name == positional else f"{name}=..." for name in names]
    lines = [f"{program}: {summary}\n\nusage: {' '.join([program, *required, '[key=value ...]'])}\n"]
    if first:
        lines += ["options that most people need, with their defaults:"]
        lines += [options.pop(name).describe(brief=True) for name in first]
        lines += [f"\nother options, which `{program} --help all` explains:"]
    for topic in dict.fromkeys(shown.topic for shown in options.values()):
        described = [shown for shown in options.values() if shown.topic == topic]
        if first:
            listed = f"{topic}: {', '.join(shown.name for shown in described)}"
            lines += [textwrap.fill(listed, HELP_WIDTH, initial_indent="  ", subsequent_indent="      ")]
        else:
            lines += [f"{topic}, with their defaults:", *(shown.describe() for shown in described), ""]
    calls = [f"  {program} {example}".rstrip() for example in (examples[:4] if first else examples)]
    return "\n".join([*lines, *[""] * bool(first), "examples:", *calls])


def options_of(cls: type) -> tuple[Option, ...]:
    """Return the options of a dataclass with their comments, in the order of definition."""
    if not is_dataclass(cls):
        raise TypeError(f"{cls.__name__} is no dataclass")
    comments = field_comments(cls)
    defaults = OmegaConf.to_container(OmegaConf.structured(cls), enum_to_str=True)
    assert isinstance(defaults, dict)
    topics: dict[str, str] = {}
    for base in cls.__mro__:  # the first class that declares a field gives its topic
        topics |= dict.fromkeys(inspect.get_annotations(base), getattr(base, "topic", "options"))
    return tuple(Option(f.name, defaults[f.name], comments.get(f.name, ""), topics[f.name]) for f in fields(cls))


def keys_for_commands(source: type, marks: Collection[Any] = (True, "tune")) -> dict[str, str]:
    """Return the fields of a search's config whose rule `cli` is in `marks`, with their keys in NeMo's section."""
    marked = [field for field in fields(source) if field.metadata.get("rule", {}).get("cli") in marks]
    return {field.name: str(key_of(field)) for field in marked}


def with_options_of(sources: Iterable[type], *, listed: bool = False) -> Callable[[type[T]], type[T]]:
    """Decorate a command's options: add the options that search configs declare with `cli`, with default null.

    An added option has the name of its key in NeMo's section. An option of the command with that name stays.

    Args:
        listed: whether values are lists, as in `tune`.
    """

    def add(cls: type[T]) -> type[T]:
        added: dict[str, Any] = {}
        comments: dict[str, str] = {}
        for source in sources:
            kinds, explained = get_type_hints(source), field_comments(source)
            for name, key in keys_for_commands(source, (True, "tune") if listed else (True,)).items():
                if key not in cls.__annotations__ and key not in added:
                    kind: Any = list[kinds[name]] if listed else kinds[name]  # type: ignore[valid-type]
                    added[key], comments[key] = (key, kind | None, option(None)), explained[name]
        namespace = {"__module__": cls.__module__, "__doc__": cls.__doc__, "added_comments": comments}
        return checked_options(make_dataclass(cls.__name__, added.values(), bases=(cls,), namespace=namespace))

    return add


def field_comments(options_class: type) -> dict[str, str]:
    """Map each field, inherited and added ones included, to the comments above and behind it."""
    comments = dict(getattr(options_class, "added_comments", {}))
    for base in reversed(options_class.__mro__[:-1]):
        comments.update(_own_comments(base))
    return comments


def _own_comments(options_class: type) -> dict[str, str]:
    try:
        source = textwrap.dedent(inspect.getsource(options_class))
    except (OSError, TypeError):
        return {}
    comments: dict[str, str] = {}
    above: list[str] = []
    for line in source.splitlines():
        if line.startswith("    # "):
            above.append(line[6:].strip())
            continue
        if field := re.match(r" {4}(\w+): .*?(  # (.*))?$", line):
            comments[field[1]] = " ".join([*above, field[3] or ""]).strip()
        above = []
    return comments


def _split(argument: str, options: dict[str, Option]) -> tuple[str, str]:
    """Split an argument at the first `=`; for forms such as `--beam-size`, raise an error with the correct form."""
    key, equals, value = argument.partition("=")
    if equals and key and not key.startswith("-"):
        return key.lstrip("+"), value
    spelled = key.lstrip("-").replace("-", "_")
    hint = did_you_mean(spelled, options, "; did you mean {}=" + (value or "...") + "?")
    raise OptionError(f"{argument!r} is not of the form key=value{hint}")


def _read_value(options_class: type, key: str, value: str) -> Any:
    """Return an option's value: text (`audio=*.wav`) unchanged, others read as YAML; lists may omit their brackets."""
    hint = get_type_hints(options_class).get(key)
    if hint in (str, str | None):
        return None if value == "null" and hint is not str else value
    if key in FILES or key.startswith("lms."):
        return _names(value)
    try:
        read = yaml.safe_load(value)
    except yaml.YAMLError:
        if hint is Any:
            return value
        problem = f"{key}={value} cannot be read: brackets or quotes do not match"
        raise ValueError(problem) from None
    if isinstance(read, str | date | None) and value[:1] not in ("", '"', "'") and value not in ("null", "~"):
        read = value  # YAML reads a part of it, a date or nothing: "a #1", "2024-11-28", "#1"
    is_list = any(get_origin(kind) is list for kind in (hint, *get_args(hint)))
    if not is_list or read is None or isinstance(read, list):
        return read
    return [yaml.safe_load(part) for part in read.split(",")] if isinstance(read, str) else [read]


def _names(value: str) -> Any:
    """Return a file name or pattern, or the list of names in brackets, where names with commas need quotes."""
    if value == "null":
        return None
    if not (value.startswith("[") and value.endswith("]")) or os.path.lexists(value):
        return value
    parts = re.findall(r"""\s*(?:"([^"]*)"|'([^']*)'|([^,]*?))\s*(?:,|$)""", value[1:-1])
    return [name for part in parts if (name := "".join(part))]


def _set(config: DictConfig, key: str, value: Any, option: Option) -> None:
    try:
        OmegaConf.update(config, key, _literal(value), merge=True, force_add="." in key)
    except (OmegaConfBaseException, ValueError, TypeError) as error:
        raise ValueError(f"{key}={value}: {_first_line(error)}\n{option.describe()}") from error


def _literal(value: Any) -> Any:
    """Escape `${` in a value, so that OmegaConf treats it as text and not as an interpolation."""
    if isinstance(value, list):
        return [_literal(item) for item in value]
    return re.sub(r"(\\*)\$\{", r"\1\1\\${", value) if isinstance(value, str) else value


def _first_line(error: Exception) -> str:
    return str(error).strip().splitlines()[0]
