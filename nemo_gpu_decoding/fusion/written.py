"""The request of an utterance in texts and numbers, as manifests and clients of the server write it."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any

from nemo_gpu_decoding.checks import FieldError, check_number
from nemo_gpu_decoding.fusion.phrases import Phrase, as_phrase

MOST_SHOWN, MOST_LISTED = 80, 3  # characters and sentences of a value in a message


@dataclass(frozen=True)
class WrittenRequest:
    """Phrases, LM, language lock and grammar of one utterance, with the keys of `beam`; None: the decoding config's.

    A grammar is a list of sentences, never a file. A price alone replaces the price of the decoding config.

    Raises:
        FieldError: a value has a wrong type or is out of range, or there are phrases beside a grammar.
    """

    phrases: tuple[Any, ...] | None = None  # texts, `Phrase`s, or objects with the keys of `key_phrase_items_list`
    lm: str | None = None  # a name in `lm_pool`
    allowed_scripts: tuple[str, ...] | None = None
    allowed_tokens: tuple[str, ...] | None = None
    allowed_price: float | None = None
    grammar: tuple[str, ...] | None = None
    grammar_price: float | None = None

    def __post_init__(self) -> None:
        if not isinstance(self.lm, str | None):
            raise FieldError("lm", self.lm, "the name of an LM")
        is_list = isinstance(self.phrases, list | tuple)
        if self.phrases is not None and not (is_list and all(map(_is_phrase, self.phrases))):
            known = "a list of texts, or of objects with phrase, and optionally weight, lang and aliases"
            raise FieldError("phrases", self.phrases, known)
        for item in self.phrases or ():
            as_phrase(item)
        for name in ("allowed_scripts", "allowed_tokens"):
            self._check_texts(name, "a list of texts that are not blank")
        self._check_texts("grammar", "a list of sentences")
        for name in ("allowed_price", "grammar_price"):
            price = getattr(self, name)
            if price == "inf":  # JSON has no other form
                object.__setattr__(self, name, math.inf)
            elif price is not None and price != math.inf:
                check_number(name, price, above_zero=name == "grammar_price")
        if self.phrases and self.grammar is not None:
            raise FieldError("phrases", list(self.phrases), "none with a grammar, which has all sentences")

    def _check_texts(self, name: str, expected: str) -> None:
        texts = getattr(self, name)
        if texts is None:
            return
        is_list = isinstance(texts, list | tuple) and len(texts) > 0
        if not (is_list and all(isinstance(text, str) and text.strip() for text in texts)):
            raise FieldError(name, texts, expected)
        object.__setattr__(self, name, tuple(texts))

    @property
    def given(self) -> dict[str, Any]:
        """The values that are not the decoding config's."""
        return {field.name: value for field in fields(self) if (value := getattr(self, field.name)) is not None}

    @property
    def shown(self) -> dict[str, Any]:
        """The same for messages, which have the numbers of items in place of long lists and texts."""
        return {key: _shown(value) for key, value in self.given.items()}


KEYS = tuple(field.name for field in fields(WrittenRequest))


def written_request(row: Mapping[str, Any]) -> WrittenRequest | None:
    """The request in a row of a manifest; None if the row has none.

    Raises:
        FieldError: names the wrong key.
    """
    given = {key: row[key] for key in KEYS if row.get(key) is not None}
    if isinstance(given.get("phrases"), list):
        given["phrases"] = tuple(given["phrases"])
    return WrittenRequest(**given) if given else None


def _shown(value: Any) -> Any:
    if len(repr(value)) <= MOST_SHOWN:
        return list(value) if isinstance(value, tuple) else value
    return f"{value[:MOST_SHOWN]}..." if isinstance(value, str) else f"a list of {len(value)}"


def _is_phrase(item: Any) -> bool:
    if isinstance(item, dict):
        return isinstance(item.get("phrase"), str) and item.keys() <= {"phrase", "weight", "lang", "aliases"}
    return isinstance(item, str | Phrase)
