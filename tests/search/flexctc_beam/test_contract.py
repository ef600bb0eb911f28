"""flexctc_beam on the CPU keeps the contract of all CTC decoders."""

from nemo_gpu_decoding.search.flexctc_beam.config import FlexCTCConfig
from nemo_gpu_decoding.search.flexctc_beam.decoder import FlexCTCBeam
from nemo_gpu_decoding.search.protocol import Decoder
from tests.contract.ctc_decoder import CTCDecoderContract


class TestFlexCTCBeamOnCPU(CTCDecoderContract):
    def make(self, vocab_size, blank_id, fusion=None, **options):
        return FlexCTCBeam(vocab_size, blank_id, FlexCTCConfig(backend="cpu", **options), fusion)

    def test_has_the_verbs_of_the_protocol(self, decoder):
        assert isinstance(decoder, Decoder)
