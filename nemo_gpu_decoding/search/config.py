"""Options that all searches share."""

from __future__ import annotations

from dataclasses import dataclass

from nemo_gpu_decoding.checks import check_choice, check_int, checked_options

BACKENDS = ("auto", "cuda", "cpu")


@checked_options
@dataclass(frozen=True)
class SearchConfig:
    """Options of every decoder.

    Raises:
        FieldError: a value is out of range; the message names the field.
    """

    # Number of hypotheses returned per utterance, >= 1, with different tokens (word graphs: different words). NeMo's
    # interfaces return hypotheses with different texts.
    n_best: int = 1
    # auto: cuda for tensors on a GPU if the kernels can run there, else cpu.
    backend: str = "auto"
    # CPU threads of the search in one call; 0 = torch.get_num_threads().
    threads: int = 0

    def __post_init__(self) -> None:
        check_int("n_best", self.n_best, 1, self.max_n_best)
        check_choice("backend", self.backend, BACKENDS)
        check_int("threads", self.threads, 0, 4096)

    @property
    def max_n_best(self) -> int:
        """The largest valid `n_best`."""
        return 10000
