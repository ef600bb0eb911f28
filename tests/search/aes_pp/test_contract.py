"""aes_pp keeps the contract of all transducer decoders."""

import pytest

from nemo_gpu_decoding.search.aes_pp.config import AESConfig
from nemo_gpu_decoding.search.aes_pp.decoder import AESPlusPlus
from nemo_gpu_decoding.search.protocol import Decoder
from tests.contract.transducer_decoder import VOCAB, TransducerDecoderContract
from tests.search.transducer.table_networks import TableNetworks


class TestAESPlusPlusOnCPU(TransducerDecoderContract):
    def make(self, networks, fusion=None, **options):
        return AESPlusPlus(networks, AESConfig(backend="cpu", **options), fusion)

    def test_has_the_verbs_of_the_protocol(self, decoder):
        assert isinstance(decoder, Decoder)


@pytest.mark.usefixtures("emulated_runtime", "small_blocks")
class TestAESPlusPlusOnCUDA(TestAESPlusPlusOnCPU):
    test_threads_do_not_matter = None  # of the CPU

    @pytest.fixture
    def networks(self):
        """One kind of model: the emulator takes its time, and test_kernels.py has both."""
        return TableNetworks(VOCAB, (), seed=4)

    def make(self, networks, fusion=None, **options):
        return AESPlusPlus(networks, AESConfig(backend="cuda", **options), fusion)
