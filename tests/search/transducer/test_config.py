"""Options out of range are named."""

import pytest

from nemo_gpu_decoding.search.transducer.config import AESConfig, ALSDConfig


@pytest.mark.parametrize("kind", [ALSDConfig, AESConfig])
@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"beam_size": 0}, "beam_size is 0, expected an integer 1 .."),
        ({"beam_size": 2.0}, "beam_size is 2.0"),
        ({"n_best": 5}, "n_best is 5, expected an integer 1 .. 4"),
        ({"threads": -1}, "threads is -1"),
        ({"softmax_temperature": 0.0}, "softmax_temperature is 0.0, expected a finite number > 0"),
        ({"softmax_temperature": float("nan")}, "softmax_temperature is nan"),
        ({"blank_lm_score_mode": "full"}, "blank_lm_score_mode is 'full', expected one of no_score"),
        ({"pruning_mode": "LATE"}, "pruning_mode is 'LATE', expected one of late, early"),
        ({"backend": "tpu"}, "backend is 'tpu'"),
    ],
)
def test_shared_options(kind, options, message):
    with pytest.raises(ValueError, match=message):
        kind(**options)


@pytest.mark.parametrize("value", [0, -3, 1.5, True, None])
def test_max_symbols(value):
    with pytest.raises(ValueError, match=f"max_symbols is {value}, expected an integer 1"):
        ALSDConfig(max_symbols=value)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"maes_num_steps": 0}, "maes_num_steps is 0"),
        ({"maes_expansion_beta": -1}, "maes_expansion_beta is -1"),
        ({"maes_expansion_gamma": 0.0}, "maes_expansion_gamma is 0.0, expected a number > 0"),
        ({"maes_expansion_gamma": float("nan")}, "maes_expansion_gamma is nan"),
    ],
)
def test_expansion_limits(options, message):
    with pytest.raises(ValueError, match=message):
        AESConfig(**options)
