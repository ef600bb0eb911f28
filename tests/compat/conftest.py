"""Shipped checkpoints and speech, and what NeMo's networks give for them."""

import json

import pytest
import torch

from nemo_gpu_decoding import AESConfig, AESPlusPlus, ALSDConfig, ALSDPlusPlus
from nemo_gpu_decoding.compat.features import log_mel
from tests.assets import ASSETS

DURATIONS = {"rnnt": (), "tdt": (0, 1, 2, 3, 4)}
SEARCHES = {"alsd": (ALSDPlusPlus, ALSDConfig), "aes": (AESPlusPlus, AESConfig)}


@pytest.fixture(scope="session")
def speech():
    """(samples, text) of the 100 shipped utterances."""
    import soundfile

    manifests = [(ASSETS / "speech" / f"{part}.json").read_text(encoding="utf-8") for part in ("dev", "test")]
    rows = [json.loads(line) for manifest in manifests for line in manifest.splitlines()]
    files = [ASSETS / "speech" / row["audio_filepath"] for row in rows]
    return [(soundfile.read(file, dtype="float32")[0], row["text"]) for file, row in zip(files, rows, strict=True)]


@pytest.fixture(scope="session")
def features(speech):
    return [log_mel(samples) for samples, _ in speech]


class Checkpoint:
    """A shipped transducer with a CTC head, in NeMo."""

    def __init__(self, kind):
        from nemo.collections.asr.models import ASRModel

        self.kind, self.durations = kind, DURATIONS[kind]
        self.model = ASRModel.restore_from(str(ASSETS / "models" / f"self_hybrid_{kind}.nemo"), map_location="cpu")
        self.model.eval()

    def encoded(self, features):
        with torch.inference_mode():
            return [self.model.encoder(audio_signal=one[None], length=torch.tensor([one.shape[1]]))[0][0].T
                    for one in features]  # fmt: skip

    def ctc_log_probs(self, features):
        with torch.inference_mode():
            return [self.model.ctc_decoder(encoder_output=one.T[None])[0] for one in self.encoded(features)]

    def networks(self):
        from nemo_gpu_decoding.nemo_plugin.transducer import networks_of

        return networks_of(self.model.decoder, self.model.joint, self.durations)


@pytest.fixture(scope="session", params=DURATIONS)
def checkpoint(request):
    pytest.importorskip("nemo")
    return Checkpoint(request.param)


def searched(networks, *inputs):
    """Tokens of utterances by each search of transducers."""
    return {
        name: tokens(search(networks, config(beam_size=4, backend="cpu")).decode(*inputs))
        for name, (search, config) in SEARCHES.items()
    }


def tokens(results):
    return [nbest.best.tokens.tolist() for nbest in results]


@pytest.fixture(scope="session")
def found(checkpoint, features):
    """Tokens of the 100 utterances by NeMo's networks."""
    return searched(checkpoint.networks(), checkpoint.encoded(features))
