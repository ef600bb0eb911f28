"""flexctc_beam keeps the contract of all CTC decoders, on the CPU and with its CUDA kernels."""

import pytest

from tests.contract.ctc_decoder import CTCDecoderContract
from tests.search.flexctc_beam.both import on_cpu, on_cuda


class TestFlexCTCBeamOnCPU(CTCDecoderContract):
    def make(self, vocab_size, blank_id, fusion=None, **options):
        return on_cpu(vocab_size, blank_id, fusion, **options)


@pytest.mark.usefixtures("emulated_runtime", "small_blocks")
class TestFlexCTCBeamOnEmulatedCUDA(CTCDecoderContract):
    def make(self, vocab_size, blank_id, fusion=None, **options):
        return on_cuda(vocab_size, blank_id, fusion, **options)
