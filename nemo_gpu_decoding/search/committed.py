"""Commit tokens: find the tokens with which all live hypotheses of a running stream begin.

A stream keeps committed tokens once, in arrays that only grow. A partial result traces back only later tokens, so the
time to make it does not grow with the stream. `joined` appends the later tokens to the committed ones.
"""

from collections.abc import Mapping
from dataclasses import fields
from functools import cached_property, lru_cache
from typing import Any, TypeVar

import numpy as np

from nemo_gpu_decoding.jit import compiled
from nemo_gpu_decoding.search.numerics import TEXT_SCORES
from nemo_gpu_decoding.search.result import Path, new_frozen

P = TypeVar("P", bound=Path)
Head = Mapping[str, np.ndarray]  # fields of a `Path` up to some token; these arrays are never changed

MIN_COMMIT = 128  # frames or back-pointers; a commit has a fixed cost


def worth_committing(count: int) -> bool:
    """Return whether a stream commits after `count` new frames or back-pointers."""
    return count >= MIN_COMMIT


@compiled
def common_ancestor(parents, ends):
    """Return the newest node that is on all paths from `ends` back to the root, or the roots' parent if there is none.

    The back-pointers of live hypotheses form a tree in which older nodes have lower numbers. The time depends only on
    the number of nodes after the common ancestor.

    Args:
        parents: [nodes] number of the previous node, lower than the node's own number.
        ends: [n] the last nodes of the hypotheses.
    """
    ends, newest = ends.copy(), ends.max()
    while newest != ends.min():
        for i in range(len(ends)):
            if ends[i] == newest:
                ends[i] = parents[newest]
        newest = ends.max()
    return newest


class GrowingColumns:
    """Arrays that only grow at their ends. A `head` keeps its values when the arrays grow."""

    def __init__(self) -> None:
        self._values: dict[str, np.ndarray] = {}
        self._counts: dict[str, int] = {}

    def extend(self, columns: Mapping[str, Any]) -> None:
        """Append arrays, or lists of objects, to the columns of these names."""
        for name, new in columns.items():
            is_array = isinstance(new, np.ndarray)
            values = self._values.get(name, np.empty(0, new.dtype if is_array else object))
            begin = self._counts.get(name, 0)
            end = begin + len(new)
            if end > len(values):
                larger = np.empty(2 * end, values.dtype)
                larger[:begin] = values[:begin]
                values = larger
            if is_array:
                values[begin:end] = new
            for n, value in enumerate(() if is_array else new):  # one by one: numpy would unpack tuples
                values[begin + n] = value
            self._values[name], self._counts[name] = values, end

    def head(self) -> Head | None:
        """Return a mapping from column names to all values so far, or None if there are none."""
        return {name: values[: self._counts[name]] for name, values in self._values.items()} or None


class CommittedTokens(GrowingColumns):
    """The tokens that a stream has committed, as fields of `Path`, with their LM and boosting scores."""

    frames = 0  # frames up to the end of these tokens, in searches with back-pointers per frame

    @cached_property  # most utterances commit nothing
    def scores(self) -> np.ndarray:
        return np.zeros(1, TEXT_SCORES)

    def __len__(self) -> int:
        return self._counts.get("tokens", 0)


def joined(head: Head | None, tail: P) -> P:
    """Return a path of the tail's type with the tokens of `head`, followed by those of `tail`.

    Arrays are concatenated when they are first read, for example by `after`. So partial results take no time for
    committed tokens.
    """
    if head is None:
        return tail
    kind: Any = type(tail)
    kept = {field.name: getattr(tail, field.name) for field in fields(tail) if field.name not in head}
    return new_frozen(_joined_type(kind), **kept, _head=head, _tail=tail)


@lru_cache
def _joined_type(path_type: Any) -> Any:
    names = [field.name for field in fields(path_type)]

    def array(name: str) -> cached_property[Any]:
        def both(path: Any) -> Any:
            head, tail = path._head[name], getattr(path._tail, name)
            return (*head.tolist(), *tail) if isinstance(tail, tuple) else np.concatenate((head, tail))

        return cached_property(both)

    def length(path: Any) -> int:  # a path from `replace` has no `_head`; it has all arrays
        return len(path._head["tokens"]) + len(path._tail) if "_head" in vars(path) else len(path.tokens)

    def as_plain(path: Any) -> Any:  # copies and pickles hold no arrays of the stream
        return path_type, tuple(getattr(path, name) for name in names)

    members = {name: array(name) for name in names}
    return type(f"Joined{path_type.__name__}", (path_type,), {**members, "__len__": length, "__reduce__": as_plain})
