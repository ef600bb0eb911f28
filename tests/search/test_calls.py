"""A call of `decode` with a short utterance makes few calls of Python functions, which take longer than its search."""

import sys

import pytest

from tests.contract.subjects import TABLE

# strategy -> most calls of functions of this package
MOST_CALLS = {"flexctc_beam": 75, "alsd_pp lstm": 195, "aes_pp lstm": 186, "cuda_wfst": 120, "paged_biglm": 128}
SUBJECTS = {name: kind for name, kind, _ in TABLE}


@pytest.mark.parametrize("name", MOST_CALLS)
def test_a_call_makes_few_calls_of_functions(name):
    subject, calls = SUBJECTS[name](), []
    decoder, inputs = subject.bare(subject.variants[0], n_best=1), subject.random_inputs(1, 8, seed=3)
    decoder.decode(inputs)  # compiles

    def note(frame, event, _):
        if event == "call" and frame.f_globals.get("__name__", "").startswith("nemo_gpu_decoding"):
            calls.append(frame.f_code.co_name)

    sys.setprofile(note)
    try:
        decoder.decode(inputs)
    finally:
        sys.setprofile(None)
    assert 10 < len(calls) <= MOST_CALLS[name], calls
