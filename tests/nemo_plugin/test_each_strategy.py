"""Each strategy behind NeMo's interface gives what its plain decoder gives; test_all_strategies.py has the rest."""

import pytest
import torch

from nemo_gpu_decoding.nemo_plugin.register import STRATEGIES
from nemo_gpu_decoding.search.flexctc_beam.decoder import FlexCTCBeam
from nemo_gpu_decoding.search.transducer.aes import AESPlusPlus
from nemo_gpu_decoding.search.transducer.alsd import ALSDPlusPlus
from nemo_gpu_decoding.search.word_graph.decoder import CudaWFST, PagedBigLM
from tests.nemo_plugin.usage import CASES, EVERY_CASE

DECODERS = {
    "flexctc_beam": FlexCTCBeam, "alsd_pp": ALSDPlusPlus, "aes_pp": AESPlusPlus,
    "cuda_wfst": CudaWFST, "paged_biglm": PagedBigLM,
}  # fmt: skip


def test_cases_cover_every_strategy():
    for names in (CASES, EVERY_CASE, DECODERS):
        assert {name.partition("-")[0] for name in names} == set(STRATEGIES)


@pytest.mark.parametrize("case", EVERY_CASE, indirect=True)
def test_hypotheses_are_those_of_the_plain_decoder(case):
    hypotheses = case.decode(**case.lm)
    decoder = case.infer.decoder()
    assert type(decoder) is DECODERS[case.strategy]
    values, lengths = case.inputs
    results = decoder.decode(values.transpose(1, 2) if case.is_transducer else values, lengths)
    for hypothesis, nbest, length in zip(hypotheses, results, lengths.tolist(), strict=True):
        best = nbest.best
        assert hypothesis.y_sequence.dtype == torch.int64
        assert hypothesis.y_sequence.tolist() == best.tokens.tolist()
        assert hypothesis.timestamp == best.frames.tolist()
        assert (hypothesis.score, hypothesis.score_parts) == (best.score, best.parts)
        assert hypothesis.length == length
        if case.has_words:
            assert (hypothesis.text, hypothesis.words) == (best.text, best.words)
        else:
            assert hypothesis.text == case.model.tokenizer.ids_to_text(best.tokens.tolist())
