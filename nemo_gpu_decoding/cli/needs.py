"""Optional dependencies of each command with given options. They are checked before the command starts."""

from __future__ import annotations

from collections.abc import Callable
from operator import attrgetter
from pathlib import Path
from typing import Any


def needed(command: str, options: Any) -> list[str]:
    """The names that `require` takes: extras, or single modules."""
    return [name for name, is_needed in NEEDS.get(command, {}).items() if is_needed(options)]


def always(options: Any) -> bool:
    return True


def has_sentencepiece_model(options: Any) -> bool:
    return options.tokenizer is not None and options.tokenizer.endswith(".model")


def starts_ray(options: Any) -> bool:
    from nemo_gpu_decoding.cli.transcribe import workers_of

    return workers_of(options).address is not None


def builds_word_graph(options: Any) -> bool:
    """Whether a word graph is composed from an ARPA file. A ready-made graph needs no extra library."""
    if options.strategy is None and options.preset is None:
        return False  # the default strategies search no word graph
    from nemo_gpu_decoding.cli.decoding import decoding_config, with_decoding
    from nemo_gpu_decoding.nemo_plugin.register import find_strategy

    preset = decoding_config(options.strategy, options.preset, {"lm": options.lm})
    config = with_decoding(preset, options) if hasattr(options, "decoding") else preset
    strategy = find_strategy(config)
    if strategy is None or strategy.section != "wfst":
        return False
    ready_made = config.wfst.get("wfst_lm_path")
    return bool(config.wfst.get("arpa_lm_path")) and not (ready_made and Path(ready_made).expanduser().exists())


# command -> extra or module -> function of the options: is it needed? Other commands need none
NEEDS: dict[str, dict[str, Callable[[Any], Any]]] = {
    "transcribe": {"nemo": always, "kaldifst": builds_word_graph, "cluster": starts_ray},
    "serve": {"nemo": always, "serve": always, "kaldifst": builds_word_graph},
    "tune": {"nemo": always, "kaldifst": builds_word_graph, "plot": attrgetter("plot")},
    "aliases": {"nemo": always, "kaldifst": builds_word_graph},
    "build-graph": {"nemo": attrgetter("model"), "kaldifst": always, "sentencepiece": has_sentencepiece_model},
    "build-lm": {"nemo": attrgetter("model"), "sentencepiece": has_sentencepiece_model},
}
