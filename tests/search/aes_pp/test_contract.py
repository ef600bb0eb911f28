"""aes_pp keeps the contract of all transducer decoders."""

import pytest

from nemo_gpu_decoding.search.aes_pp.config import AESConfig
from nemo_gpu_decoding.search.aes_pp.decoder import AESPlusPlus
from tests.contract.transducer_decoder import TransducerDecoderContract


class TestAESPlusPlusOnCPU(TransducerDecoderContract):
    def make(self, networks, fusion=None, **options):
        return AESPlusPlus(networks, AESConfig(backend="cpu", **options), fusion)


@pytest.mark.usefixtures("emulated_runtime", "small_blocks")
class TestAESPlusPlusOnCUDA(TestAESPlusPlusOnCPU):
    variants = ("rnnt",)  # the emulator takes its time, and test_kernels.py has both
    test_threads_do_not_matter = None  # of the CPU

    def make(self, networks, fusion=None, **options):
        return AESPlusPlus(networks, AESConfig(backend="cuda", **options), fusion)
