"""alsd_pp keeps the contract of all transducer decoders."""

import pytest

from nemo_gpu_decoding.search.alsd_pp.config import ALSDConfig
from nemo_gpu_decoding.search.alsd_pp.decoder import ALSDPlusPlus
from nemo_gpu_decoding.search.protocol import Decoder
from tests.contract.transducer_decoder import VOCAB, TransducerDecoderContract
from tests.search.transducer.table_networks import TableNetworks


class TestALSDPlusPlusOnCPU(TransducerDecoderContract):
    def make(self, networks, fusion=None, **options):
        return ALSDPlusPlus(networks, ALSDConfig(backend="cpu", **options), fusion)

    def test_has_the_verbs_of_the_protocol(self, decoder):
        assert isinstance(decoder, Decoder)


@pytest.mark.usefixtures("emulated_runtime", "small_blocks")
class TestALSDPlusPlusOnCUDA(TestALSDPlusPlusOnCPU):
    test_threads_do_not_matter = None  # of the CPU

    @pytest.fixture
    def networks(self):
        """One kind of model: the emulator takes its time, and test_kernels.py has both."""
        return TableNetworks(VOCAB, (0, 1, 2, 4), seed=4)

    def make(self, networks, fusion=None, **options):
        return ALSDPlusPlus(networks, ALSDConfig(backend="cuda", **options), fusion)
