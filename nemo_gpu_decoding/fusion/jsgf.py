"""Read a grammar in a subset of the Java Speech Grammar Format (JSGF 1.0).

    #JSGF V1.0;
    grammar lights;                                        // optional
    <room> = kitchen | bath room;
    public <command> = turn (on | off) the light [in the <room>] | stop+ | "fade out";

Supported: words, quoted texts, groups, [optional parts], alternatives, repetition by * (any number) and + (at least
one), rules, <NULL>, <VOID> and comments. An utterance is a sentence of one of the public rules. Weights, tags, imports
and recursive rules are errors.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from typing import NamedTuple

HEADER = "#JSGF"
_UNSUPPORTED = {"/": "weights", "{": "tags", "}": "tags"}
_LEXEME = re.compile(
    r"""(?P<skip>\s+|//[^\n]*|/\*.*?\*/) | "(?P<quoted>[^"]*)" | (?P<rule><[^<>\s]+>)
        | (?P<special>[=;|()\[\]*+/{}]) | (?P<word>[^\s=;|()\[\]*+/{}<>"]+)""",
    re.VERBOSE | re.DOTALL,
)


class Sequence(NamedTuple):
    """Expansions one after the other; () is the empty text."""

    parts: tuple[Expansion, ...]


class Choice(NamedTuple):
    """One of several expansions; () is no text at all."""

    options: tuple[Expansion, ...]


class Repeat(NamedTuple):
    """An expansion once or more."""

    part: Expansion


class Rule(NamedTuple):
    """A reference; `read_jsgf` replaces it by the rule's expansion."""

    name: str


Expansion = str | Sequence | Choice | Repeat | Rule  # str: a word
NOTHING = Sequence(())
_PREDEFINED: dict[str, Expansion] = {"<NULL>": NOTHING, "<VOID>": Choice(())}


def read_jsgf(text: str) -> Expansion:
    """The sentences of a grammar's public rules.

    Raises:
        ValueError: the text is no grammar, or has a part that is not supported; the message names the line.
    """
    try:
        return _Reader(text).grammar()
    except RecursionError:
        raise ValueError("grammar is nested too deeply, expected fewer brackets within brackets") from None


class _Reader:
    def __init__(self, text: str) -> None:
        head, _, body = text.partition(";")
        if not head.startswith(HEADER) or "\n" in head.strip():
            raise ValueError(f"grammar begins with {text[:20]!r}, expected '{HEADER} V1.0;'")
        self._text, self._offset = body, head.count("\n")
        self._lexemes = list(self._split())
        self._next = 0

    def _split(self) -> Iterator[tuple[str, str, int]]:
        """Kind, text and position of each lexeme; the last one is the end."""
        at = 0
        while at < len(self._text):
            found = _LEXEME.match(self._text, at)
            if found is None:
                raise self._error(at, f"has {self._text[at]!r}, which belongs to no word, rule or quoted text")
            kind = str(found.lastgroup)
            if found[0] in _UNSUPPORTED:
                raise self._error(at, f"has {_UNSUPPORTED[found[0]]}, which have no effect here; remove them")
            if kind != "skip":
                yield kind, found[kind], at
            at = found.end()
        yield "end", "the end", at

    def _error(self, at: int, what: str) -> ValueError:
        return ValueError(f"grammar, line {1 + self._offset + self._text.count(chr(10), 0, at)}: {what}")

    def _take(self, expected: str = "") -> str:
        """The next lexeme, which must be `expected` if given."""
        kind, text, at = self._lexemes[self._next]
        if expected and (kind == "quoted" or text != expected):
            raise self._error(at, f"has {text!r}, expected {expected!r}")
        self._next += kind != "end"
        return text

    def _is_next(self, text: str) -> bool:
        return self._lexemes[self._next][0] != "quoted" and self._lexemes[self._next][1] == text

    def grammar(self) -> Expansion:
        if self._is_next("grammar"):
            while self._take() != ";":
                if self._is_next("the end"):
                    break
        rules, public = dict(_PREDEFINED), []
        while self._lexemes[self._next][0] != "end":
            is_public = self._is_next("public")
            if is_public:
                self._take()
            kind, name, at = self._lexemes[self._next]
            if kind != "rule" or name in rules:
                expected = "a rule, <NAME> = ...;" if kind != "rule" else "one rule of this name"
                raise self._error(at, f"has {name!r}, expected {expected}")
            self._take()
            self._take("=")
            rules[name] = self._choice()
            self._take(";")
            public += [name] if is_public else []
        if not public:
            raise ValueError("grammar has no public rule, expected at least one: public <NAME> = ...;")
        return Choice(tuple(map(_Resolver(rules), map(Rule, public))))

    def _choice(self) -> Expansion:
        options = [self._sequence()]
        while self._is_next("|"):
            self._take()
            options.append(self._sequence())
        return options[0] if len(options) == 1 else Choice(tuple(options))

    def _sequence(self) -> Expansion:
        parts = [self._repeated()]
        while self._begins_part():
            parts.append(self._repeated())
        return parts[0] if len(parts) == 1 else Sequence(tuple(parts))

    def _begins_part(self) -> bool:
        kind, text, _ = self._lexemes[self._next]
        return kind in ("word", "quoted", "rule") or (kind == "special" and text in "([")

    def _repeated(self) -> Expansion:
        part = self._part()
        while self._is_next("*") or self._is_next("+"):
            part = Repeat(part) if self._take() == "+" else Choice((NOTHING, Repeat(part)))
        return part

    def _part(self) -> Expansion:
        kind, text, at = self._lexemes[self._next]
        if not self._begins_part():
            raise self._error(at, f"has {text!r}, expected a word, a rule, '(' or '['")
        self._take()
        if kind == "rule":
            return Rule(text)
        if kind in ("word", "quoted"):
            return Sequence(tuple(text.split()))
        inner = self._choice()
        self._take(")" if text == "(" else "]")
        return inner if text == "(" else Choice((NOTHING, inner))


class _Resolver:
    """Replaces references by the rules' expansions, each of which is resolved once."""

    def __init__(self, rules: Mapping[str, Expansion]) -> None:
        self._rules = rules
        self._done: dict[str, Expansion] = {}
        self._open: set[str] = set()  # rules that are being resolved

    def __call__(self, node: Expansion) -> Expansion:
        if isinstance(node, Rule):
            return self._of_rule(node.name)
        if isinstance(node, Sequence):
            # without empty parts: rules of nothing but such parts would multiply them
            return Sequence(tuple(part for part in map(self, node.parts) if part != NOTHING))
        if isinstance(node, Choice):
            return Choice(tuple(map(self, node.options)))
        return Repeat(self(node.part)) if isinstance(node, Repeat) else node

    def _of_rule(self, name: str) -> Expansion:
        if name not in self._rules:
            raise ValueError(f"grammar has no rule {name}, but uses it")
        if name in self._open:
            raise ValueError(f"grammar rule {name} contains itself, expected no recursive rules; use * or +")
        if name not in self._done:
            self._open.add(name)
            self._done[name] = self(self._rules[name])
            self._open.remove(name)
        return self._done[name]
