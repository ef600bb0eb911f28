"""alsd_pp on the CPU keeps the contract of all transducer decoders."""

from nemo_gpu_decoding.search.alsd_pp.config import ALSDConfig
from nemo_gpu_decoding.search.alsd_pp.decoder import ALSDPlusPlus
from nemo_gpu_decoding.search.protocol import Decoder
from tests.contract.transducer_decoder import TransducerDecoderContract


class TestALSDPlusPlusOnCPU(TransducerDecoderContract):
    def make(self, networks, fusion=None, **options):
        return ALSDPlusPlus(networks, ALSDConfig(backend="cpu", **options), fusion)

    def test_has_the_verbs_of_the_protocol(self, decoder):
        assert isinstance(decoder, Decoder)
