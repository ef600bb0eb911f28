"""The fewest word errors of a path through word alternatives, against all paths."""

from itertools import product

import numpy as np
import pytest

from benchmarks.alternatives import fewest_errors
from nemo_gpu_decoding.metrics import word_errors
from nemo_gpu_decoding.search.result import Place, WordOption


@pytest.mark.parametrize("seed", range(30))
def test_fewest_errors_are_those_of_the_best_choice(seed):
    rng = np.random.default_rng(seed)
    sets = [rng.choice(["", "a", "b", "c", "d"], size=rng.integers(1, 4), replace=False).tolist() for _ in range(5)]
    slots = [Place(n, 0, 0, tuple(WordOption(word, 0.5) for word in words)) for n, words in enumerate(sets)]
    reference = " ".join(rng.choice(["a", "b", "c", "d", "e"], size=rng.integers(0, 7)).tolist())
    texts = [" ".join(word for word in path if word) for path in product(*sets)]
    assert fewest_errors(reference, slots) == min(word_errors([reference], [text]).total for text in texts)
