"""Phrases of one utterance that the model cannot spell: they cost themselves only."""

import logging
from types import SimpleNamespace

import pytest

from nemo_gpu_decoding.fusion.boosting import BoostingConfig, load_boosting_tree
from nemo_gpu_decoding.fusion.fusion import Request
from nemo_gpu_decoding.nemo_plugin.infer import FusedInfer
from nemo_gpu_decoding.nemo_plugin.requests import _boosted
from nemo_gpu_decoding.vocabulary import Vocabulary

VOCABULARY = Vocabulary((" ", *"abc"), "char")


def decoder(has_phrases):
    fusion = SimpleNamespace(has_phrases=has_phrases, boosting_weight=None, boosting=BoostingConfig())
    return SimpleNamespace(
        options=SimpleNamespace(fusion=fusion),
        boosting_of=lambda config, weight, lm: load_boosting_tree(config, VOCABULARY),
    )


@pytest.mark.parametrize(
    ("phrases", "has_phrases", "boosted", "warned"),
    [
        (["你"], False, None, "你"),
        (["你"], True, [], "你"),  # not those of the config
        (["你", "x"], True, [], "x"),
        (["你", "ab"], True, ["ab"], "你"),
        (["ab"], False, ["ab"], ""),
        ([" "], True, [], "has no phrases"),
        ([], True, [], ""),
        ([], False, None, ""),
    ],
)
def test_phrases_that_cannot_be_spelled_cost_themselves_only(phrases, has_phrases, boosted, warned, caplog):
    caplog.set_level(logging.WARNING, "nemo_gpu_decoding")
    request = _boosted(decoder(has_phrases), BoostingConfig(key_phrases_list=phrases), None)
    if boosted is None:
        assert request is None
    elif boosted:
        assert list(request.boosting.table.texts) == boosted
    else:
        assert request == Request(boosting_weight=0.0)
    assert warned in caplog.text
    assert bool(caplog.text) == bool(warned)


def test_default_bonuses_come_from_the_lm_that_the_request_names(monkeypatch):
    monkeypatch.setattr("nemo_gpu_decoding.nemo_plugin.infer.load_boosting_tree", lambda config, vocabulary, lm: lm)
    fusion = SimpleNamespace(lm="own", lm_pool={"office": "other"})
    infer = SimpleNamespace(decoder=lambda: SimpleNamespace(fusion=fusion), vocabulary=lambda: VOCABULARY)
    wanted = [(None, None), (None, "office"), (None, "none"), (1.0, "office")]
    found = [FusedInfer.boosting_of(infer, BoostingConfig(), weight, lm) for weight, lm in wanted]
    assert found == ["own", "other", None, None]
