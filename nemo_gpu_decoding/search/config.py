"""Declare the options that all searches share."""

from __future__ import annotations

from dataclasses import dataclass

from nemo_gpu_decoding.schema import checked_options, option

BACKENDS = ("auto", "cuda", "cpu")


@checked_options
@dataclass(frozen=True)
class SearchConfig:
    """The options that every decoder has.

    Raises:
        FieldError: a value is out of range; the message names the field.
    """

    # Number of hypotheses returned per utterance, >= 1, with different tokens (word graphs: different words). NeMo's
    # interfaces return hypotheses with different texts.
    n_best: int = option(1, low=1, high="max_n_best")
    # auto: cuda for tensors on a GPU if the kernels can run there, else cpu.
    backend: str = option("auto", choices=BACKENDS)
    # CPU threads of the search in one call; 0 = torch.get_num_threads().
    threads: int = option(0, low=0, high=4096)

    @property
    def max_n_best(self) -> int:
        """Return the largest valid `n_best`: the beam size, if there is one."""
        return int(getattr(self, "beam_size", 10000))
