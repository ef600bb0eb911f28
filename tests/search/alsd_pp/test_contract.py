"""alsd_pp keeps the contract of all transducer decoders."""

import pytest

from nemo_gpu_decoding.search.alsd_pp.config import ALSDConfig
from nemo_gpu_decoding.search.alsd_pp.decoder import ALSDPlusPlus
from tests.contract.transducer_decoder import TransducerDecoderContract


class TestALSDPlusPlusOnCPU(TransducerDecoderContract):
    def make(self, networks, fusion=None, **options):
        return ALSDPlusPlus(networks, ALSDConfig(backend="cpu", **options), fusion)


@pytest.mark.usefixtures("emulated_runtime", "small_blocks")
class TestALSDPlusPlusOnCUDA(TestALSDPlusPlusOnCPU):
    variants = ("tdt",)  # the emulator takes its time, and test_kernels.py has both
    test_threads_do_not_matter = None  # of the CPU

    def make(self, networks, fusion=None, **options):
        return ALSDPlusPlus(networks, ALSDConfig(backend="cuda", **options), fusion)
