"""Shared by the tests of the NeMo plugin: importing NeMo takes long, restoring a model a second."""

import functools
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path

import pytest

from tests.assets import ASSETS, speech
from tests.nemo_plugin.usage import CASES, Case, strategy_case, write_lower_orders

NUM_FILES = 6
MANY_FILES = 30
FOLDER = Path(__file__).parent
WITHOUT_NEMO = ("test_cutting.py", "test_installed.py", "test_log.py", "test_nemo_scripts.py")


def pytest_ignore_collect(collection_path: Path) -> bool | None:
    """Leave out files that need NeMo, or a part of it, where it is not installed."""
    if collection_path.suffix != ".py" or collection_path.name in WITHOUT_NEMO:
        return None
    nemo = find_spec("nemo")
    if nemo is None:
        return True
    pipelines = Path(nemo.submodule_search_locations[0]) / "collections" / "asr" / "inference"
    is_served = collection_path.name != "test_recognizer_faults.py" or find_spec("prometheus_client")
    return None if is_served and (pipelines.exists() or collection_path.parent.name != "streaming") else True


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if FOLDER in item.path.parents and item.path.name not in WITHOUT_NEMO:
            item.add_marker(pytest.mark.nemo)


@pytest.fixture(scope="session")
def many_utterances() -> list[dict]:
    """Test utterances enough to tell word error rates apart."""
    return speech()[:MANY_FILES]


@pytest.fixture(scope="session")
def utterances(many_utterances) -> list[dict]:
    return many_utterances[:NUM_FILES]


@pytest.fixture(scope="session")
def files(utterances) -> list[str]:
    return [utterance["audio_filepath"] for utterance in utterances]


@functools.cache
def restore(name: str):
    from nemo.collections.asr.models import ASRModel
    from nemo.utils import logging

    from nemo_gpu_decoding import register

    register()
    logging.setLevel(logging.ERROR)
    return ASRModel.restore_from(str(ASSETS / "models" / f"{name}.nemo"), map_location="cpu").eval()


def greedy(model, *heads):
    """The model with NeMo's greedy decoding in each of its heads; the last becomes the active one."""
    from nemo_gpu_decoding import register

    register()
    for kwargs in [{"decoder_type": head} for head in heads] or [{}]:
        model.change_decoding_strategy({"strategy": "greedy_batch"}, verbose=False, **kwargs)
    return model.eval()


@pytest.fixture(scope="session")
def shared_ctc_model():
    return restore("self_ctc")


@pytest.fixture
def ctc_model(shared_ctc_model):
    """A CTC model, greedy; what a test changes there is undone for the next."""
    return greedy(shared_ctc_model)


@pytest.fixture
def hybrid_model():
    """A hybrid RNN-T/CTC model, RNN-T active, both heads greedy."""
    return greedy(restore("self_hybrid_rnnt"), "ctc", "rnnt")


@pytest.fixture
def tdt_model():
    """As `hybrid_model`, but TDT/CTC."""
    return greedy(restore("self_hybrid_tdt"), "ctc", "rnnt")


@pytest.fixture(params=["rnnt", "tdt"])
def transducer(request):
    """A hybrid model with an RNN-T head, then one with a TDT head; all greedy."""
    return request.getfixturevalue({"rnnt": "hybrid_model", "tdt": "tdt_model"}[request.param])


@pytest.fixture(scope="session")
def encoded_by():
    """Encoder output ([B, D, T], lengths [B]) of utterances by a model, computed once."""
    known = {}

    def encode(model, utterances):
        key = id(model), len(utterances)
        if key not in known:
            known[key] = run_encoder(model, utterances)
        encoder_output, lengths = known[key]
        return encoder_output.clone(), lengths.clone()

    return encode


def run_encoder(model, utterances):
    import soundfile
    import torch

    read = [soundfile.read(u["audio_filepath"], dtype="float32")[0] for u in utterances]
    audio = [torch.from_numpy(samples) for samples in read]
    lengths = torch.tensor([len(samples) for samples in audio])
    signal = torch.nn.utils.rnn.pad_sequence(audio, batch_first=True)
    with torch.inference_mode():
        return model(input_signal=signal, input_signal_length=lengths)


@pytest.fixture(scope="session")
def emissions(shared_ctc_model, utterances):
    """(log_probs [B, T, V + 1], lengths [B]) of the test utterances."""
    return emissions_of(shared_ctc_model, utterances, batch_size=3)[:2]


def emissions_of(model, utterances, batch_size=15):
    """(log_probs [B, T, V + 1], lengths [B], greedy texts) of utterances."""
    import torch

    files = [utterance["audio_filepath"] for utterance in utterances]
    found = greedy(model).transcribe(files, batch_size=batch_size, return_hypotheses=True, verbose=False)
    rows = [hypothesis.y_sequence.clone() for hypothesis in found]
    lengths = torch.tensor([len(row) for row in rows])
    return torch.nn.utils.rnn.pad_sequence(rows, batch_first=True), lengths, [hypothesis.text for hypothesis in found]


@pytest.fixture
def pushed(monkeypatch):
    """Log-probs of all utterances, as they are pushed."""
    from nemo_gpu_decoding.live.slots import Slots

    utterances = {}
    push = Slots.push

    def recorded(self, chunks):
        for slot, log_probs in chunks.items():
            utterances.setdefault(slot, []).append(log_probs.clone())
        return push(self, chunks)

    monkeypatch.setattr(Slots, "push", recorded)
    return utterances


@pytest.fixture(scope="module", autouse=True)
def graph_cache(tmp_path_factory) -> Iterator[Path]:
    """Graphs of these tests are not left in the user's cache, nor found by another module's."""
    from nemo_gpu_decoding.graph import build

    with pytest.MonkeyPatch.context() as patch:
        folder = tmp_path_factory.mktemp("graphs")
        patch.setattr(build, "graph_cache_folder", lambda: folder)
        yield folder


@pytest.fixture(scope="session")
def word_lm() -> Path:
    return ASSETS / "lm" / "word3.arpa"


@pytest.fixture(scope="session")
def small_word_lm(word_lm, tmp_path_factory) -> Path:
    return write_lower_orders(word_lm, tmp_path_factory.mktemp("lm") / "word1.arpa", most=1)


@pytest.fixture(scope="session")
def packed_word_lm(word_lm, tmp_path_factory) -> Path:
    from nemo_gpu_decoding.lm.pack import pack_arpa

    path = tmp_path_factory.mktemp("lm") / "word3.packed"
    pack_arpa(word_lm, path)
    return path


@pytest.fixture(params=CASES)
def case(request) -> Case:
    """Each strategy on a model that it is for; or those that a test names, indirectly."""
    if request.param in ("cuda_wfst", "paged_biglm"):
        pytest.importorskip("kaldifst")
    return strategy_case(request.param, request)
