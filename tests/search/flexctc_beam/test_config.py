import pytest

from nemo_gpu_decoding.search.flexctc_beam.config import FlexCTCConfig
from nemo_gpu_decoding.search.flexctc_beam.decoder import FlexCTCBeam


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"beam_size": 0}, r"beam_size is 0, expected an integer 1 \.\. 4096"),
        ({"beam_size": 8.0}, r"beam_size is 8\.0, expected an integer"),
        ({"beam_size": True}, "beam_size is True, expected an integer"),
        ({"beam_size": 4, "n_best": 5}, r"n_best is 5, expected an integer 1 \.\. 4"),
        ({"threads": -1}, "threads is -1"),
        ({"beam_beta": float("nan")}, "beam_beta is nan, expected a finite number"),
        ({"beam_threshold": 0.0}, r"beam_threshold is 0\.0, expected a number > 0"),
        ({"beam_threshold": float("nan")}, "beam_threshold is nan"),
        ({"merge": "avg"}, "merge is 'avg', expected one of max, sum, prefix"),
        ({"backend": "gpu"}, "backend is 'gpu', expected one of auto, cuda, cpu"),
    ],
)
def test_bad_options_are_named(options, message):
    with pytest.raises(ValueError, match=message):
        FlexCTCConfig(**options)


def test_prefix_search_has_no_alignments():
    with pytest.raises(ValueError, match="alignments is True with merge='prefix'"):
        FlexCTCBeam(3, 3, FlexCTCConfig(merge="prefix", alignments=True))


def test_an_empty_vocabulary_is_named():
    with pytest.raises(ValueError, match="vocab_size is 0, expected at least 1"):
        FlexCTCBeam(0, 0)
