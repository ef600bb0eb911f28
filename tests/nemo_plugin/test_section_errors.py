"""Wrong keys of NeMo's `beam` and `wfst` sections: one table of what is given and what the error says."""

import re
from contextlib import nullcontext

import pytest
from omegaconf import OmegaConf

from nemo_gpu_decoding.nemo_plugin.beam_sections import FLEXCTC, TRANSDUCERS, read_aes, read_alsd, read_flexctc
from nemo_gpu_decoding.nemo_plugin.infer import load_fusion
from nemo_gpu_decoding.nemo_plugin.section import check_native
from nemo_gpu_decoding.nemo_plugin.word_graph_sections import COUNTERPARTS, read_cuda_wfst, read_paged_biglm
from nemo_gpu_decoding.vocabulary import Vocabulary
from tests.assets import ASSETS

READERS = {
    "flexctc_beam": read_flexctc, "alsd_pp": read_alsd, "aes_pp": read_aes, "cuda_wfst": read_cuda_wfst,
    "paged_biglm": read_paged_biglm,
}  # fmt: skip
PIECES = Vocabulary(("▁the", "▁да", "7", "é"), "bpe")
LM = str(ASSETS / "lm" / "tok3.arpa")
RATIO = f"ngram_lm_model: {LM}, ngram_lm_alpha: 0.6, source_lm_model: {LM}, source_lm_alpha: 0.2"

# strategy -> [(its section in YAML, parts of the message, divided by " ... ")]
ERRORS = {
    "flexctc_beam": [
        ("beam_sise: 4", "beam.beam_sise ... did you mean 'beam_size' ... merge ... ngram_lm_alpha"),
        ("boosting_tree: {key_phrase_list: [a]}", "beam.boosting_tree.key_phrase_list"),
        ("flashlight_cfg: {lexicon_path: x}", "beam.flashlight_cfg.lexicon_path ... flashlight"),
        ("flashlight_cfg: {boost_path: x}", "boost_path ... flashlight ... boosting_tree.key_phrases_file instead"),
        ("pyctcdecode_cfg: {hotwords: [a]}", "hotwords ... pyctcdecode ... boosting_tree.key_phrases_list instead"),
        ("pyctcdecode_cfg: {hotword_weight: 5.0}", "hotword_weight ... set beam.boosting_tree_alpha instead"),
        ("pyctcdecode_cfg: {hotword: [a]}", "beam.pyctcdecode_cfg.hotword ... hotwords"),
        ("search_type: flashlight", "beam.search_type ... flashlight"),
        ("beam_size: 0", "beam.beam_size is 0"),
        ("beam_size: '???'", "beam.beam_size is '???'"),
        ("beam_beta: much", "beam.beam_beta is 'much'"),
        ("lm_encoding: utf7", "beam.lm_encoding is 'utf7' ... pieces"),
        ("n_best: 3", "beam.n_best is 3 ... return_best_hypothesis"),
        ("n_best: 9, return_best_hypothesis: false", "beam.n_best is 9"),
        ("return_best_hypothesis: 'no'", "beam.return_best_hypothesis is 'no'"),
        ("allow_cuda_graphs: 3", "beam.allow_cuda_graphs is 3"),
        ("ngram_lm_alpha: -0.5", "beam.ngram_lm_alpha is -0.5"),
        (f"ngram_lm_model: {LM}, ngram_lm_alpha: null", "beam.ngram_lm_alpha is not set"),
        ("boosting_tree_alpha: .nan", "beam.boosting_tree_alpha is nan"),
        ("boosting_tree: {phrase_share: 0}", "beam.boosting_tree.phrase_share is 0, expected a finite number > 0"),
        ("boosting_tree: {phrase_share: 0.1}", "beam.boosting_tree.phrase_share is 0.1 ... without ngram_lm_model"),
        ("ngram_lm_model: 3", "beam.ngram_lm_model is 3"),
        ("merge: prefix, preserve_alignments: true", "preserve_alignments ... beam.merge"),
        ("ngram_lm_model: nowhere.arpa", "beam.ngram_lm_model is 'nowhere.arpa'"),
        ("kenlm_path: nowhere.arpa", "beam.ngram_lm_model is 'nowhere.arpa'"),
        ("boosting_tree: {key_phrases_file: nowhere.txt}", "beam.boosting_tree.key_phrases_file"),
        ("boosting_tree: {model_path: nowhere.nemo}", "beam.boosting_tree.model_path"),
    ],
    # of all searches over tokens
    "tokens": [
        (RATIO.replace("source_lm_alpha: 0.2", "source_lm_alpha: null"),
         "beam.source_lm_alpha is not set, expected the weight of beam.source_lm_model"),
        (RATIO.replace("0.2", "-0.1"), "beam.source_lm_alpha is -0.1"),
        (RATIO.replace("0.2", "some"), "beam.source_lm_alpha is 'some'"),
        (RATIO.replace(f"ngram_lm_model: {LM}", "ngram_lm_model: null", 1),
         "beam.ngram_lm_model is None, expected the LM from which source_lm"),
        (RATIO.replace(f"source_lm_model: {LM}", "source_lm_model: null"),
         "beam.source_lm_model is None with source_lm_weight 0.2"),
        (RATIO.replace("0.6", "0.0"), "beam.ngram_lm_alpha is 0.0 with a source_lm, expected a number > 0"),
        (RATIO.replace(f"source_lm_model: {LM}", "source_lm_model: 3"), "beam.source_lm_model is 3"),
        (RATIO.replace(f"source_lm_model: {LM}", "source_lm_model: nowhere"), "beam.source_lm_model is 'nowhere'"),
        ("lm_pool: [a.arpa]", "beam.lm_pool is ['a.arpa'], expected a mapping from names"),
        ("lm_pool: {a: nowhere}", "beam.lm_pool.a is 'nowhere', which is no file"),
        ("boosting_tree: 3", "beam.boosting_tree is 3"),
        ("boosting_tree: {key_phrases_list: true}", "beam.boosting_tree.key_phrases_list is True, expected a list"),
        ("lm_pool: {a: 3}", "beam.lm_pool.a is 3, expected the path of a file"),
        (f"lm_pool: {{none: {LM}}}", "beam.lm_pool is 'none', expected names of LMs: ... not 'none'"),
        ("lm_pool_alpha: {a: 0.3}", "beam.lm_pool_alpha is 'a', expected names of LMs in lm_pool: it is empty"),
        (f"lm_pool: {{a: {LM}}}, lm_pool_alpha: {{a: 0}}", "beam.lm_pool_alpha[a] is 0.0, expected ... > 0"),
        (f"lm_pool: {{a: {LM}}}, ngram_lm_alpha: null", "ngram_lm_alpha is not set, ... weight of beam.lm_pool"),
        ("allowed_scripts: [3]", "beam.allowed_scripts is [3], expected a list of texts"),
        ("allowed_scripts: [Latn]", "beam.allowed_scripts is 'Latn', expected scripts ... CYRILLIC, LATIN"),
        ("allowed_tokens: [x]", "beam.allowed_tokens is 'x', expected pieces"),
        ("allowed_price: -1", "beam.allowed_price is -1"),
        ("allowed_price: null", "beam.allowed_price is None"),
        ("grammar: [the x]", "beam.grammar is ['the x'] (grammar: 'x' has the character"),
        ("grammar: ['']", "beam.grammar is [''] (grammar: '' has no letters), expected a grammar"),
        ("grammar: [the], grammar_price: 0", "beam.grammar_price is 0"),
        ("grammar: 3", "beam.grammar is 3"),
        ("grammar: [the], boosting_tree: {key_phrases_list: [the]}, boosting_tree_alpha: 1.0",
         "beam.grammar is ['the'], expected null with boosting_tree"),
    ],
    "alsd_pp": [
        ("merge: max", "beam.merge ... valid keys"),
        ("beam_beta: much", "beam.beam_beta is 'much'"),
        ("alsd_max_target_len: 1.5", "beam.alsd_max_target_len ... 1.5 ... alsd_pp ... max_symbols"),
        ("maes_prefix_alpha: 3", "beam.maes_prefix_alpha ... default 1"),
        ("maes_num_steps: 3", "beam.maes_num_steps ... alsd_pp"),
        ("language_model: {a: 1}", "beam.language_model"),
        ("hat_subtract_ilm: true", "beam.hat_subtract_ilm"),
        ("hat_ilm_weight: 0.1", "beam.hat_ilm_weight"),
        ("tsd_max_sym_exp: 3", "beam.tsd_max_sym_exp"),
        ("search_type: aes_pp", "beam.search_type ... aes_pp ... alsd_pp"),
        ("max_symbols: 10, max_symbols_per_step: 5", "beam.max_symbols is 10 ... per_step is 5"),
        ("score_norm: 1", "beam.score_norm is 1"),
        ("compute_timestamps: 'no'", "beam.compute_timestamps is 'no'"),
    ],
    "aes_pp": [
        ("max_symbols: 5", "beam.max_symbols ... aes_pp ... maes_num_steps"),
        ("max_symbols_per_step: 5", "beam.max_symbols_per_step ... aes_pp"),
        ("maes_prefix_alpha: 3", "beam.maes_prefix_alpha ... aes_pp"),
        ("maes_expansion_gamma: 0", "maes_expansion_gamma is 0 ... writes 0 unless decoding_strategy=maes"),
        ("search_type: alsd_pp", "beam.search_type ... aes_pp"),
    ],
    "cuda_wfst": [
        ("beam_widht: 3.0", "unknown key 'wfst.beam_widht' (did you mean 'beam_width'?)"),
        ("beam_width: 0", "wfst.beam_width is 0, expected a finite number > 0"),
        ("n_best: 3", "wfst.n_best is 3, but wfst.return_best_hypothesis is true"),
        ("n_best: 3, return_best_hypothesis: false, decoding_mode: mbr", "wfst.n_best is 3 with decoding_mode mbr"),
        ("decoding_mode: best", "wfst.decoding_mode is 'best', expected one of nbest, mbr"),
        ("search_type: flexctc_beam", "wfst.search_type is 'flexctc_beam'"),
        ("device: cuda:1", "wfst.device is 'cuda:1'"),
        ("device: cpu, backend: cuda", "wfst.device is 'cpu', but wfst.backend is 'cuda'"),
        ("topology: graph", "wfst.topology is 'graph', which is for ready-made"),
        ("open_vocabulary_decoding: 'yes'", "wfst.open_vocabulary_decoding is 'yes'"),
        ("unknown_word_cost: 1.0", "wfst.unknown_word_cost is 1.0, which needs"),
        ("unknown_piece_cost: -1.0, open_vocabulary_decoding: true", "wfst.unknown_piece_cost is -1.0"),
        ("added_words: {acme: 1}", "wfst.added_words is {'acme': 1}"),
        ("words_path: words.txt", "wfst.words_path is set, which belongs to an OpenFst file"),
        ("large_lm_path: large.packed", "unknown key 'wfst.large_lm_path'"),
        ("boosting_tree: {key_phrase: [a]}", "unknown key 'wfst.boosting_tree.key_phrase'"),
        ("boosting_tree: {key_phrases_list: [a], segmentations: 2}",
         "wfst.boosting_tree.segmentations is 2 ... see wfst.segmentations"),
        ("boosting_tree: {key_phrases_list: [a], whole_words: false}", "wfst.boosting_tree.whole_words is False"),
        ("boosting_tree: {key_phrases_list: [a], overlapping: false}",
         "wfst.boosting_tree.overlapping is False ... it pays for every phrase"),
        ("arpa_lm_path: null", "wfst.arpa_lm_path and wfst.wfst_lm_path are not set"),
        ("arpa_lm_path: /nowhere/file", "wfst.arpa_lm_path is '/nowhere/file'"),
        ("added_words: /nowhere/file", "wfst.added_words is '/nowhere/file'"),
        ("arpa_lm_path: null, wfst_lm_path: /nowhere/TLG.fst", "wfst.wfst_lm_path is '/nowhere/TLG.fst'"),
        ("wfst_lm_path: /nowhere/TLG.fst", "can be kept there if the name ends in .graph"),
        (f"arpa_lm_path: null, wfst_lm_path: {LM}, segmentations: 3",
         "wfst.segmentations is 3, which has no effect on a ready"),
        ("riva_decoding_cfg: {num_channels: 3}", "wfst.riva_decoding_cfg.num_channels is 3 ... remove it"),
    ],
    "paged_biglm": [
        ("large_lm: x", "unknown key 'wfst.large_lm' (did you mean 'large_lm_"),
        ("large_lm_path: null", "wfst.large_lm_path is not set, expected the large LM"),
        ("large_lm_path: /nowhere/lm", "wfst.large_lm_path is '/nowhere/lm'"),
        ("arpa_lm_path: null", "wfst.arpa_lm_path and wfst.wfst_lm_path are not set"),
        ("small_lm_path: x", "wfst.small_lm_path and wfst.arpa_lm_path are both set"),
        (f"arpa_lm_path: null, wfst_lm_path: {LM}, small_lm_path: /nowhere/lm", "wfst.small_lm_path is '/nowhere/lm'"),
        (f"arpa_lm_path: null, wfst_lm_path: {LM}", "wfst.small_lm_path is not set, expected the LM that the gr"),
        ("search_type: cuda_wfst", "wfst.search_type is 'cuda_wfst'"),
        ("k2_decoding_cfg: {search_beam: 3}", "no effect with 'paged_biglm'; set wfst.beam_width"),
    ],
}  # fmt: skip


def error_of(strategy: str, section: str, top: str = "") -> str:
    """The message of reading a section in YAML, with its LM and lists of tokens; "" if there is none."""
    name = "wfst" if strategy in ("cuda_wfst", "paged_biglm") else "beam"
    given = OmegaConf.create(f"{{{section}}}")
    if name == "wfst":
        given = OmegaConf.merge({"arpa_lm_path": LM, "large_lm_path": LM} if strategy == "paged_biglm" else
                                {"arpa_lm_path": LM}, given)  # fmt: skip
    cfg = OmegaConf.merge({"strategy": strategy, name: given}, OmegaConf.create(f"{{{top}}}"))
    try:
        options = READERS[strategy](cfg)
        if name == "beam":
            load_fusion(options.fusion, len(PIECES), PIECES)
    except (ValueError, FileNotFoundError) as error:
        return str(error)
    return ""


def assert_says(message: str, expected: str) -> None:
    at = 0
    for part in expected.split(" ... "):
        assert part in message[at:], message
        at = message.index(part, at) + len(part)


@pytest.mark.parametrize(
    ("strategy", "section", "expected"),
    [(strategy, *row) for strategy, rows in ERRORS.items() if strategy != "tokens" for row in rows],
)
def test_wrong_section_is_named(strategy, section, expected):
    assert_says(error_of(strategy, section), expected)


@pytest.mark.parametrize("strategy", ["flexctc_beam", "alsd_pp", "aes_pp"])
@pytest.mark.parametrize(("section", "expected"), ERRORS["tokens"])
def test_wrong_lms_locks_and_grammars_are_named(strategy, section, expected):
    assert_says(error_of(strategy, section), expected)


@pytest.mark.parametrize(("key", "ours"), COUNTERPARTS.items())
def test_options_of_other_decoders_are_refused_with_the_key_to_use(key, ours):
    section = OmegaConf.create({})
    OmegaConf.update(section, key, 3, force_add=True)
    text = ", ".join(f"{name}: {value}" for name, value in OmegaConf.to_container(section).items())
    assert_says(error_of("cuda_wfst", text), f"wfst.{key} is 3 ... set wfst.{ours} instead")


@pytest.mark.parametrize(
    ("strategy", "top", "expected"),
    [
        *(("flexctc_beam", f"{key}: auto", f"beam.{key}") for key in FLEXCTC.added),
        *(("alsd_pp", f"{key}: auto", f"beam.{key}") for key in TRANSDUCERS["alsd_pp"].added),
        ("cuda_wfst", "max_active: 10", "unknown key 'max_active', expected wfst.max_active"),
        ("paged_biglm", "large_lm_path: large.packed", "expected wfst.large_lm_path"),
        ("flexctc_beam", "ngram_lm_model: x", "unknown key 'ngram_lm_model', expected beam.ngram_lm_model"),
        ("flexctc_beam", "beem: {beam_size: 4}", "unknown key 'beem' (did you mean 'beam'?)"),
        ("flexctc_beam", "arpa_lm_path: x", "unknown key 'arpa_lm_path', expected wfst.arpa_lm_path"),
        ("flexctc_beam", "beam: {arpa_lm_path: x}", "unknown key 'beam.arpa_lm_path', expected wfst.arpa_lm_path"),
        ("flexctc_beam", "beam: {confidence_cfg: {}}", "unknown key 'beam.confidence_cfg', expected confidence_cfg"),
        ("flexctc_beam", "wfst: {beam_width: 3}", "wfst.beam_width is 3, which 'flexctc_beam' does not read; remove"),
        ("flexctc_beam", "greedy: {ngram_lm_model: x}", "greedy.ngram_lm_model ... set beam.ngram_lm_model instead"),
        ("flexctc_beam", "beam: {beam_size: 4}, greedy: {max_symbols: 10}", ""),
        ("cuda_wfst", "beam: {beam_size: 16}", "beam.beam_size is 16 ... set wfst.beam_size instead"),
        ("cuda_wfst", "beam: {boosting_tree: {key_phrases_list: [a]}}", "beam.boosting_tree.key_phrases_list is"),
        ("flexctc_beam", "greedy: {max_symbol: 10}", "unknown key 'greedy.max_symbol' (did you mean 'max_symbols'?)"),
        ("alsd_pp", "greedy: {beam_size: 10}", "unknown key 'greedy.beam_size'"),
        ("alsd_pp", "wfst: {beam_width: 3}", "unknown key 'wfst'"),
        ("flexctc_beam", "fused_batch_size: -1, durations: [], greedy: {use_cuda_graph_decoder: false}", ""),
        ("alsd_pp", "confidence_cfg: {preserve_wrod_confidence: true}", "did you mean 'preserve_word_confidence'"),
        ("alsd_pp", "confidence_cfg: {method_cfg: {nam: x}}", "unknown key 'confidence_cfg.method_cfg.nam'"),
        ("alsd_pp", "big_blank_durations: [2, 4]", "big_blank_durations is [2, 4]"),
        # what eval_beamsearch_ngram_ctc.py makes of kenlm_model_file=lm.arpa
        *((name, "wfst: {arpa_lm_path: null}, beam: {ngram_lm_model: lm.arpa}",
           "is 'lm.arpa' ... transcribe_speech.py ... arpa_lm_path=words") for name in ("cuda_wfst", "paged_biglm")),
    ],
)  # fmt: skip
def test_key_outside_of_its_section_is_named(strategy, top, expected):
    assert_says(error_of(strategy, "", top), expected)


@pytest.mark.parametrize(
    ("sections", "problem"),
    [
        ({"beam": {"beem_size": 3}}, "unknown key 'beam.beem_size' (did you mean 'beam_size'?)"),
        ({"beam": {"merge": "max"}}, "unknown key 'beam.merge'"),
        ({"wfst": {"beam": 3}}, "unknown key 'wfst.beam'"),
        ({"greedy": {"beam_size": 3}}, "unknown key 'greedy.beam_size'"),
        ({"beam": {"max_symbols": 3, "maes_num_steps": 2, "n_best": 2}, "greedy": {"max_symbols": 3}}, None),
    ],
)
def test_keys_that_no_strategy_of_nemo_has_are_refused(sections, problem):
    with nullcontext() if problem is None else pytest.raises(ValueError, match=re.escape(problem)):
        check_native(sections)
