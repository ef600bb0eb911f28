"""aes_pp on the CPU keeps the contract of all transducer decoders."""

from nemo_gpu_decoding.search.aes_pp.config import AESConfig
from nemo_gpu_decoding.search.aes_pp.decoder import AESPlusPlus
from nemo_gpu_decoding.search.protocol import Decoder
from tests.contract.transducer_decoder import TransducerDecoderContract


class TestAESPlusPlusOnCPU(TransducerDecoderContract):
    def make(self, networks, fusion=None, **options):
        return AESPlusPlus(networks, AESConfig(backend="cpu", **options), fusion)

    def test_has_the_verbs_of_the_protocol(self, decoder):
        assert isinstance(decoder, Decoder)
