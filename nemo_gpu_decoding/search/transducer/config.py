"""Options that all transducer searches share. Names and defaults are those of NeMo's `beam` section."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass

from nemo_gpu_decoding.fusion.blank_scoring import BLANK_LM_SCORE_MODES

MAX_BEAM_SIZE = 1024
PRUNING_MODES = ("late", "early")
BACKENDS = ("auto", "cuda", "cpu")


@dataclass(frozen=True)
class TransducerConfig:
    """Options of `ALSDPlusPlus` and `AESPlusPlus`.

    Raises:
        ValueError: a value is out of range; the message names the field.
    """

    # Number of hypotheses kept.
    beam_size: int = 4
    # Rank the hypotheses by score / (number of tokens + 1) at the end; scores are reported as they are.
    score_norm: bool = True
    # The joint's logits are divided by this before the softmax, > 0. > 1 flattens the distribution.
    softmax_temperature: float = 1.0
    # How a blank is scored where an LM or boosting is fused [ALSD++/AES++, eq. 2 and 3]:
    #   lm_weighted_full  the LM gives the blank the joint's own probability: an LM deletes no words
    #   no_score          the LM says nothing about the blank
    blank_lm_score_mode: str = "lm_weighted_full"
    # When the labels of a hypothesis are narrowed down to the best: with LM and boosting scores added
    # (late), or by the joint alone (early).
    pruning_mode: str = "late"
    # Number of hypotheses returned per utterance, at most beam_size; their texts differ.
    n_best: int = 1
    # Keep every label of the way through the frames, blanks included, in `TransducerPath.alignment`.
    alignments: bool = False
    # auto: cuda for tensors on a GPU when kernels can be had, else cpu. The networks run where they are.
    backend: str = "auto"
    # Run the steps of a search on the GPU as a CUDA graph where that works, see cuda_graphs.py.
    allow_cuda_graphs: bool = True
    # CPU threads of the search (not of the networks); 0 = torch.get_num_threads().
    threads: int = 0

    def __post_init__(self) -> None:
        check_int("beam_size", self.beam_size, 1, MAX_BEAM_SIZE)
        check_int("n_best", self.n_best, 1, self.beam_size)
        check_int("threads", self.threads, 0, 4096)
        if not (math.isfinite(self.softmax_temperature) and self.softmax_temperature > 0):
            raise ValueError(
                f"softmax_temperature is {self.softmax_temperature}, expected a finite number > 0"
            )
        if not isinstance(self.allow_cuda_graphs, bool):
            raise ValueError(f"allow_cuda_graphs is {self.allow_cuda_graphs!r}, expected True or False")
        check_choice("blank_lm_score_mode", self.blank_lm_score_mode, BLANK_LM_SCORE_MODES)
        check_choice("pruning_mode", self.pruning_mode, PRUNING_MODES)
        check_choice("backend", self.backend, BACKENDS)


def check_int(name: str, value: int, low: int, high: int) -> None:
    if isinstance(value, bool) or not isinstance(value, int) or not low <= value <= high:
        raise ValueError(f"{name} is {value!r}, expected an integer {low} .. {high}")


def check_choice(name: str, value: str, choices: Iterable[str]) -> None:
    if value not in choices:
        raise ValueError(f"{name} is {value!r}, expected one of {', '.join(choices)}")
