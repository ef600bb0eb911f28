"""The hook: which configs reach us, and that NeMo gets everything back."""

import re
import subprocess
import sys
import types

import pytest
import torch
import wrapt
from nemo.collections.asr.parts.submodules import ctc_decoding, rnnt_decoding
from nemo.collections.asr.parts.utils.rnnt_utils import NBestHypotheses
from omegaconf import OmegaConf

from nemo_gpu_decoding import register, unregister
from nemo_gpu_decoding.nemo_plugin.ctc import FlexCTCInfer
from nemo_gpu_decoding.nemo_plugin.hypotheses import NBestList
from nemo_gpu_decoding.nemo_plugin.register import NATIVE, STRATEGIES, StrategySpec, head_of

LETTERS = list("abc ")


def char_decoding(**cfg):
    return ctc_decoding.CTCDecoding(cfg, LETTERS)


@pytest.fixture(autouse=True)
def registered():
    register()
    yield
    register()


@pytest.mark.parametrize(
    ("section", "message"),
    [
        ({"beam": 5}, "beam is 5, expected a mapping of keys to values"),
        ({"beam": {"boosting_tree": 5}}, "beam.boosting_tree is 5, expected a mapping of keys to values"),
        ({"confidence_cfg": "x"}, "confidence_cfg is 'x', expected a mapping of keys to values"),
    ],
)
def test_a_section_that_is_no_mapping_is_named(section, message):
    with pytest.raises(ValueError, match=message):
        char_decoding(strategy="flexctc_beam", **section)


def test_register_does_not_import_nemo():
    code = "import sys, nemo_gpu_decoding as n; n.register(); assert 'nemo' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True)


def test_register_twice_wraps_once():
    register()
    for cls in (ctc_decoding.AbstractCTCDecoding, rnnt_decoding.AbstractRNNTDecoding):
        assert isinstance(vars(cls)["__init__"], wrapt.FunctionWrapper)
        assert isinstance(vars(cls)["__init__"].__wrapped__, types.FunctionType)


def test_unregister_restores_nemos_own_constructors():
    unregister()
    for cls in (ctc_decoding.AbstractCTCDecoding, rnnt_decoding.AbstractRNNTDecoding):
        assert isinstance(vars(cls)["__init__"], types.FunctionType)
    with pytest.raises(ValueError, match="Decoding strategy must be one of"):
        char_decoding(strategy="flexctc_beam")
    register()
    assert isinstance(char_decoding(strategy="flexctc_beam").decoding, FlexCTCInfer)
    decoding = char_decoding(strategy="flexctc_beam")
    unregister()
    assert decoding.decode_ids_to_str([0, 1]) == "ab"


def test_unregister_below_another_wrapper_disables_ours(monkeypatch):
    ours = vars(ctc_decoding.AbstractCTCDecoding)["__init__"]
    theirs = wrapt.FunctionWrapper(ours, lambda wrapped, instance, args, kwargs: wrapped(*args, **kwargs))
    monkeypatch.setattr(ctc_decoding.AbstractCTCDecoding, "__init__", theirs)
    assert isinstance(char_decoding(strategy="flexctc_beam").decoding, FlexCTCInfer)
    unregister()
    with pytest.raises(ValueError, match="Decoding strategy must be one of"):
        char_decoding(strategy="flexctc_beam")


def test_unknown_strategies_list_ours_beside_nemos(hybrid_model):
    with pytest.raises(ValueError, match=r"Decoding strategy must be one of .* Given flexctc_bean") as error:
        char_decoding(strategy="flexctc_bean")
    assert str(error.value).endswith("flexctc_beam, cuda_wfst, paged_biglm. Did you mean 'flexctc_beam'?")
    with pytest.raises(ValueError, match=r"malsd_batch.*: alsd_pp, aes_pp\. Did you mean 'alsd_pp'\?"):
        hybrid_model.change_decoding_strategy({"strategy": "alsd_ppp"}, decoder_type="rnnt", verbose=False)
    with pytest.raises(ValueError, match=r"beam\.search_type is 'pyctcdecode'"):
        char_decoding(strategy="flexctc_beam", beam={"search_type": "pyctcdecode"})


@pytest.mark.parametrize(
    ("config", "problem"),
    [
        ("alsd_pp", "decoding_cfg is 'alsd_pp', expected a Mapping such as"),
        (["alsd_pp"], "decoding_cfg is ['alsd_pp'], expected a Mapping"),
        ({"strategy": "alsd_pp", "beam": 4}, "beam is 4, expected a mapping of keys to values"),
        ({"strategy": "greedy_batch", "beam": [4]}, "beam is [4], expected a mapping of keys to values"),
    ],
)
def test_a_decoding_config_that_is_no_mapping_is_refused(config, problem, hybrid_model):
    with pytest.raises(ValueError, match=re.escape(problem)):
        hybrid_model.change_decoding_strategy(config, decoder_type="rnnt", verbose=False)


def test_head_of_a_strategy_is_one_that_it_decodes():
    names = {"flexctc_beam": "ctc", "alsd_pp": "rnnt", "malsd_batch": "rnnt", "greedy": "ctc", "unknown": "ctc"}
    assert {name: head_of(name, ["ctc", "rnnt"]) for name in names} == names


def test_n_best_lists_of_nemos_strategies_have_the_fields_that_nemo_sets():
    cfg = OmegaConf.structured(ctc_decoding.CTCDecodingConfig(strategy="beam_batch"))
    cfg.beam.update(beam_size=4, return_best_hypothesis=False)
    decoding = ctc_decoding.CTCDecoding(cfg, LETTERS)
    log_probs = torch.log_softmax(torch.randn(1, 9, len(LETTERS) + 1, generator=torch.manual_seed(0)), -1)
    (found,) = decoding.ctc_decoder_predictions_tensor(log_probs, torch.tensor([9]), return_hypotheses=True)
    assert (type(found), found.alignments) == (NBestList, None)


def test_nemo_builds_other_strategies():
    decoding = char_decoding(strategy="greedy_batch")
    assert type(decoding) is ctc_decoding.CTCDecoding
    assert type(decoding.decoding).__name__ == "GreedyBatchedCTCInfer"
    decoding = char_decoding(strategy="greedy_batch", beam={"search_type": "flexctc_beam"})
    assert not isinstance(decoding.decoding, FlexCTCInfer)


@pytest.mark.parametrize("strategy", ["beam", "beam_batch", "pyctcdecode", "flashlight"])
def test_search_type_names_our_strategy(strategy):
    decoding = char_decoding(strategy=strategy, beam={"search_type": "flexctc_beam"})
    assert isinstance(decoding.decoding, FlexCTCInfer)
    assert decoding.cfg.strategy == "flexctc_beam"


@pytest.mark.parametrize(
    "cfg",
    [
        OmegaConf.structured(ctc_decoding.CTCDecodingConfig(strategy="flexctc_beam")),
        ctc_decoding.CTCDecodingConfig(strategy="flexctc_beam"),
        {"strategy": "flexctc_beam"},
        OmegaConf.create({"strategy": "flexctc_beam", "beam": {"merge": "prefix"}}),
    ],
    ids=["structured", "dataclass", "dict", "DictConfig"],
)
def test_configs_of_every_form_are_accepted_and_unchanged(cfg):
    before = repr(cfg)
    assert isinstance(ctc_decoding.CTCDecoding(cfg, LETTERS).decoding, FlexCTCInfer)
    assert repr(cfg) == before


def test_subclasses_and_names_of_classes_are_kept():
    class Own(ctc_decoding.CTCDecoding):
        def decode_tokens_to_str(self, tokens):
            return super().decode_tokens_to_str(tokens).upper()

    decoding = Own({"strategy": "flexctc_beam"}, LETTERS)
    assert isinstance(decoding, Own)
    assert decoding.decode_ids_to_str([0, 1]) == "AB"
    decoding = char_decoding(strategy="flexctc_beam")
    assert isinstance(decoding, ctc_decoding.CTCDecoding)
    assert type(decoding).__name__ == "CTCDecoding"
    assert type(decoding) is type(char_decoding(strategy="flexctc_beam"))


@pytest.mark.parametrize(
    "cfg", [{"strategy": "flexctc_beam"}, {"strategy": "malsd_batch", "beam": {"search_type": "flexctc_beam"}}]
)
def test_a_ctc_strategy_on_a_transducer_says_what_is_possible(hybrid_model, cfg):
    with pytest.raises(ValueError, match="flexctc_beam") as error:
        hybrid_model.change_decoding_strategy(cfg, decoder_type="rnnt", verbose=False)
    for hint in ("CTC", "RNN-T", "malsd_batch", "decoder_type='ctc'"):
        assert hint in str(error.value)


@pytest.mark.parametrize("strategy", ["alsd_pp", "aes_pp"])
def test_a_transducer_strategy_on_ctc_says_what_is_possible(strategy):
    for cfg in ({"strategy": strategy}, {"strategy": "beam_batch", "beam": {"search_type": strategy}}):
        with pytest.raises(ValueError, match=strategy) as error:
            char_decoding(**cfg)
        for hint in ("CTC", "RNN-T", "flexctc_beam", "decoder_type='rnnt'"):
            assert hint in str(error.value)


def test_list_of_nemos_strategies_is_up_to_date():
    native = {family: {n for names in NATIVE[family].values() for n in names} for family in NATIVE}
    assert native["rnnt"] == {s.value for s in rnnt_decoding.TransducerDecodingStrategyType}
    unregister()
    with pytest.raises(ValueError, match="Decoding strategy must be one of") as error:
        char_decoding(strategy="?")
    assert native["ctc"] == set(str(error.value).split("[")[1].split("]")[0].replace("'", "").split(", "))


# ------------------------------------------------------------------ a later strategy is one entry
class ToyTransducer:
    def __init__(self, greedy):
        self.greedy = greedy

    def __call__(self, encoder_output, encoded_lengths, partial_hypotheses=None):
        best = self.greedy(encoder_output=encoder_output, encoded_lengths=encoded_lengths)[0]
        return ([NBestHypotheses([hypothesis, hypothesis]) for hypothesis in best],)


def build_toy_transducer(owner, cfg, decoder, joint):
    assert decoder is not None
    assert joint is not None
    assert cfg.beam.flavour == "sweet"
    return ToyTransducer(owner.decoding)


def test_strategy_spec_adds_a_transducer_strategy(hybrid_model, files, monkeypatch):
    monkeypatch.setitem(STRATEGIES, "toy", StrategySpec("toy", "rnnt", "beam", f"{__name__}:build_toy_transducer"))
    greedy = hybrid_model.transcribe(files[:2], verbose=False)
    cfg = {"strategy": "toy", "beam": {"flavour": "sweet", "return_best_hypothesis": False}}
    hybrid_model.change_decoding_strategy(cfg, verbose=False)
    n_best = hybrid_model.transcribe(files[:2], verbose=False)
    assert [[h.text for h in hypotheses] for hypotheses in n_best] == [[h.text] * 2 for h in greedy]
    assert [hypotheses.text for hypotheses in n_best] == [h.text for h in greedy]
    assert hybrid_model.cfg.decoding.strategy == "toy"


def build_toy_graph(owner, cfg):
    assert cfg.wfst.beam_width == 3.0
    return owner.decoding


def test_strategy_spec_adds_a_strategy_with_wfst_section(monkeypatch):
    monkeypatch.setitem(STRATEGIES, "toy", StrategySpec("toy", "ctc", "wfst", f"{__name__}:build_toy_graph"))
    by_name = char_decoding(strategy="toy", wfst={"beam_width": 3.0, "compute_timestamps": True})
    by_alias = char_decoding(strategy="wfst", wfst={"search_type": "toy", "beam_width": 3.0})
    assert by_name.compute_timestamps is True
    # NeMo treats the name "wfst" in a special way: it would skip the conversion to text
    assert by_alias.cfg.strategy == "toy"
