"""Committed tokens: those at the beginning of a running stream that all live hypotheses share and keep.

A stream keeps them once, in arrays that only grow, with all that is known of them. So a partial result traces back
what came after them only, and costs the same after hours as in the first minute: `joined` puts both together when
somebody looks.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import fields
from functools import cached_property, lru_cache
from typing import Any, TypeVar

import numpy as np

from nemo_gpu_decoding.jit import compiled
from nemo_gpu_decoding.search.result import Path

P = TypeVar("P", bound=Path)
Head = Mapping[str, np.ndarray]  # fields of a `Path` up to some token; arrays that nobody changes

FEWEST = 128  # frames or back-pointers that are committed at once, for what it costs


def is_worth(count: int) -> bool:
    """Whether it pays to commit so many frames, or back-pointers, of a stream."""
    return count >= FEWEST


@compiled
def common_ancestor(parents, ends):
    """The newest node that lies on the way back from all of `ends`, or what stands for no node if none does.

    The back-pointers of live hypotheses form a tree, in which older nodes have lower numbers. Looks at the nodes after
    the common ancestor only, however long the past is.

    Args:
        parents: [nodes] the node before each one, lower than its own number.
        ends: [n] nodes.
    """
    ends, newest = ends.copy(), ends.max()
    while newest != ends.min():
        for i in range(len(ends)):
            if ends[i] == newest:
                ends[i] = parents[newest]
        newest = ends.max()
    return newest


class GrowingColumns:
    """Arrays that values are appended to. What was seen of them before never changes.

    Args:
        types: of the values, by name; object for Python objects.
    """

    def __init__(self, types: Mapping[str, Any]) -> None:
        self._values = {name: np.empty(0, dtype) for name, dtype in types.items()}
        self._counts = dict.fromkeys(types, 0)

    def extend(self, **new: Any) -> None:
        """Append values to some of the columns."""
        for name, values in new.items():
            begin, end = self._counts[name], self._counts[name] + len(values)
            if end > len(self._values[name]):
                larger = np.empty(2 * end, self._values[name].dtype)
                larger[:begin] = self._values[name][:begin]
                self._values[name] = larger
            column = self._values[name]
            if column.dtype == object:
                for n, value in enumerate(values):  # one by one: numpy would take a tuple apart
                    column[begin + n] = value
            else:
                column[begin:end] = values
            self._counts[name] = end

    def head(self) -> Head:
        return {name: values[: self._counts[name]] for name, values in self._values.items()}


def joined(head: Head | None, tail: P) -> P:
    """The path that begins with `head`, whose tokens are those before the tail's; of the tail's type.

    Its arrays are put together when they are first looked at, so that asking for partial results and looking at
    `after(committed)` alone takes no time for what was there before.
    """
    if head is None:
        return tail
    kind: Any = type(tail)
    path: P = object.__new__(_joined_type(kind))
    kept = {field.name: getattr(tail, field.name) for field in fields(tail) if field.name not in head}
    path.__dict__.update(kept, _head=head, _tail=tail)
    return path


@lru_cache
def _joined_type(path_type: Any) -> Any:
    names = [field.name for field in fields(path_type)]

    def array(name: str) -> cached_property[Any]:
        def both(path: Any) -> Any:
            head, tail = path._head[name], getattr(path._tail, name)
            if isinstance(tail, tuple):
                return (*head.tolist(), *tail)
            return np.concatenate((head, tail))

        return cached_property(both)

    def length(path: Any) -> int:
        return len(path._head["tokens"]) + len(path._tail)

    def after(path: Any, n: int) -> Path:
        begin = n - len(path._head["tokens"])
        return path_type.after(path, n) if begin < 0 else path._tail._cut(begin, n)

    def as_plain(path: Any) -> Any:  # what is copied or sent to another process holds no arrays of the stream
        return path_type, tuple(getattr(path, name) for name in names)

    members = {name: array(name) for name in names}
    return type(f"Joined{path_type.__name__}", (path_type,), {**members, "__len__": length, "__reduce__": as_plain})
