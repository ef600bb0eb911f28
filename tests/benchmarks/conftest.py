import pytest

from benchmarks import sources
from benchmarks.options import BenchOptions
from benchmarks.sources import make_tasks, speech_text
from benchmarks.tasks import Task
from nemo_gpu_decoding.jit import CACHE_VARIABLE, cache_folder


@pytest.fixture(scope="session", autouse=True)
def own_cache(tmp_path_factory):
    """The cache is a folder of the tests. LMs are estimated from a tenth of the text: NeMo and Kaldi read slowly."""
    compiled = str(cache_folder().parent.parent)  # nothing is compiled anew
    few = sources.speech_text()[:1200]
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_CACHE_HOME", str(tmp_path_factory.mktemp("bench-cache")))
        patch.setenv(CACHE_VARIABLE, compiled)
        patch.setattr(sources, "speech_text", lambda: few)
        yield


@pytest.fixture
def whole_speech_text(monkeypatch, tmp_path):
    """All of the speech's text, and LMs that are estimated from it."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(sources, "speech_text", speech_text)


@pytest.fixture(scope="session")
def tiny_options() -> BenchOptions:
    """B=2, T about 30, V=32, a token trigram."""
    return BenchOptions(
        tasks=["peaked"], peers=[], beams=[4], repeats=1, vocab_size=32, utterances=2, min_frames=20,
        max_frames=40, sentences=200, lm_order=3, phrases=4, many_phrases=0,
    )  # fmt: skip


@pytest.fixture(scope="session")
def tiny_task(own_cache, tiny_options) -> Task:
    return make_tasks(tiny_options)[0]
