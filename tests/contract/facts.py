"""What is compared of results, exactly."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import fields
from typing import Any

import numpy as np

from nemo_gpu_decoding.search.result import NBest


def facts(nbest: NBest) -> list[Any]:
    """All of a result that can be compared exactly: every field of its paths, its frames and notes."""
    paths = [{field.name: _plain(getattr(path, field.name)) for field in fields(path)} for path in nbest]
    return [nbest.num_frames, nbest.notes, *paths]


def all_facts(results: Sequence[NBest]) -> list[list[Any]]:
    return [facts(nbest) for nbest in results]


def _plain(value: Any) -> Any:
    return value.tolist() if isinstance(value, np.ndarray) else value
