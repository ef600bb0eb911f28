"""Presets: shipped ones, files, and what options make of them."""

from pathlib import Path

import pytest
from omegaconf import OmegaConf

from nemo_gpu_decoding.cli.decoding import decoding_config
from nemo_gpu_decoding.presets import load_preset, write_preset


@pytest.fixture
def files(tmp_path):
    (tmp_path / "lm.arpa").touch()
    (tmp_path / "names.txt").touch()
    return {"lm": str(tmp_path / "lm.arpa"), "phrases": str(tmp_path / "names.txt")}


def test_default_preset_gets_lm_and_phrases(files):
    plain = decoding_config(None, None, {})
    assert plain.strategy == "flexctc_beam"
    assert plain == load_preset("flexctc_beam")
    both = decoding_config(None, None, files)
    assert both.beam.ngram_lm_model == files["lm"]
    assert both.beam.boosting_tree.key_phrases_file == files["phrases"]
    assert both.beam.ngram_lm_alpha > 0
    assert both.beam.boosting_tree_alpha is None  # the default


@pytest.mark.parametrize(
    ("strategy", "given", "expected"),
    [
        ("flexctc_beam", "", (8, 0.0)),
        ("flexctc_beam", "lm", (16, 1.0)),
        ("flexctc_beam", "phrases", (16, 0.0)),
        ("alsd_pp", "", (4, "late")),
        ("alsd_pp", "phrases", (6, "late")),
        ("alsd_pp", "lm phrases", (6, "late")),
        ("aes_pp", "phrases", (6, "late")),
        ("aes_pp", "lm", (6, "early")),
        ("aes_pp", "lm phrases", (6, "early")),
    ],
)
def test_default_values_depend_on_lm_and_phrases(strategy, given, expected, files):
    beam = decoding_config(strategy, None, {name: files[name] for name in given.split()}).beam
    assert (beam.beam_size, beam.beam_beta if strategy == "flexctc_beam" else beam.pruning_mode) == expected


def test_options_override_the_preset():
    config = decoding_config(None, "flexctc_beam", {"beam_size": 3, "lm_weight": None, "beam_beta": -1.0})
    preset = load_preset("flexctc_beam")
    assert config.beam.beam_size == 3
    assert config.beam.beam_beta == -1.0
    assert config.beam.ngram_lm_alpha == preset.beam.ngram_lm_alpha


def test_a_given_strategy_wins_and_needs_no_preset():
    assert decoding_config("greedy_batch", None, {}) == {"strategy": "greedy_batch"}
    assert decoding_config("beam_batch", "flexctc_beam", {}).strategy == "beam_batch"


@pytest.mark.parametrize("option", ["lm", "phrases"])
def test_a_missing_file_is_named(option):
    with pytest.raises(ValueError, match=f"{option}=nowhere is no file here"):
        decoding_config(None, None, {option: "nowhere"})


@pytest.mark.parametrize("strategy", ["flexctc_beam", "alsd_pp", "aes_pp"])
def test_source_lm_enters_the_section_beside_the_lm(strategy, files, tmp_path):
    (tmp_path / "train.arpa").touch()
    options = {"lm": files["lm"], "source_lm": str(tmp_path / "train.arpa"), "source_lm_weight": 0.2}
    config = decoding_config(strategy, None, options)
    assert (config.beam.source_lm_model, config.beam.source_lm_alpha) == (options["source_lm"], 0.2)
    write_preset(tmp_path / "best.yaml", config, "")
    assert "source_lm_model: train.arpa" in (tmp_path / "best.yaml").read_text()
    assert load_preset(str(tmp_path / "best.yaml")) == config
    with pytest.raises(ValueError, match="source_lm=nowhere is no file here"):
        decoding_config(strategy, None, {**options, "source_lm": "nowhere"})
    with pytest.raises(ValueError, match="source_lm_weight is not set, expected the weight of source_lm"):
        decoding_config(strategy, None, {**options, "source_lm_weight": None})
    with pytest.raises(ValueError, match=r"source_lm=.* has no effect with strategy cuda_wfst"):
        decoding_config("cuda_wfst", None, options)


@pytest.mark.parametrize("strategy", ["flexctc_beam", "alsd_pp", "aes_pp"])
def test_named_lms_are_the_lm_pool_of_the_section(strategy, files, tmp_path):
    paths = {name: str(tmp_path / f"{name}.arpa") for name in ("news", "en.law")}
    for path in paths.values():
        Path(path).touch()
    config = decoding_config(strategy, None, {"lms": paths})
    assert config.beam.lm_pool == paths
    assert config.beam.beam_size == decoding_config(strategy, None, {"lm": files["lm"]}).beam.beam_size
    write_preset(tmp_path / "pool.yaml", config, "")
    assert "en.law: en.law.arpa" in (tmp_path / "pool.yaml").read_text()
    assert load_preset(str(tmp_path / "pool.yaml")) == config
    with pytest.raises(ValueError, match=r"lms.a=nowhere is no file here"):
        decoding_config(strategy, None, {"lms": {"a": "nowhere"}})
    for other in ("cuda_wfst", "paged_biglm"):
        with pytest.raises(ValueError, match=rf"lms=.* has no effect with strategy {other}"):
            decoding_config(other, None, {"lms": paths})
    assert "lm_pool" not in decoding_config(strategy, None, {"lms": {}}).beam


def test_a_grammar_in_a_preset_is_a_file_or_sentences(tmp_path):
    (tmp_path / "commands.txt").touch()
    config = decoding_config("alsd_pp", None, {})
    for grammar in (str(tmp_path / "commands.txt"), ["light on", "light off"]):
        config.beam.grammar = grammar
        write_preset(tmp_path / "commands.yaml", config, "")
        assert load_preset(str(tmp_path / "commands.yaml")) == config
        assert ("grammar: commands.txt" in (tmp_path / "commands.yaml").read_text()) == isinstance(grammar, str)


def test_a_word_graph_has_its_own_keys(files):
    options = {**files, "lm_weight": 0.7, "boosting_weight": 9.0, "beam_width": 12.0}
    config = decoding_config("cuda_wfst", None, options)
    assert "beam" not in config
    assert config.wfst.arpa_lm_path == files["lm"]
    assert config.wfst.boosting_tree.key_phrases_file == files["phrases"]
    assert (config.wfst.lm_weight, config.wfst.boosting_tree_alpha, config.wfst.beam_width) == (0.7, 9.0, 12.0)


GRAPH_START = bytes(8) + b'{"__metadata__":{"kind":"word graph",'


@pytest.mark.parametrize("mark", [GRAPH_START, b"\xd6\xfd\xb2\x7e"])
def test_graph_replaces_the_lm_of_the_preset(mark, tmp_path, files):
    graph = tmp_path / "word.graph"
    graph.write_bytes(mark)
    of_lm = decoding_config("cuda_wfst", None, files)
    write_preset(tmp_path / "best.yaml", of_lm, "")
    config = decoding_config(None, str(tmp_path / "best.yaml"), {"lm": str(graph)})
    assert config.wfst.wfst_lm_path == str(graph)
    assert "arpa_lm_path" not in config.wfst
    write_preset(tmp_path / "graph.yaml", config, "")
    assert "wfst_lm_path: word.graph" in (tmp_path / "graph.yaml").read_text()
    assert decoding_config(None, str(tmp_path / "graph.yaml"), {"lm": files["lm"]}) == of_lm


def test_large_lm_enters_the_section_beside_the_small_one(tmp_path, files):
    options = files | {"large_lm": str(tmp_path / "large.packed")}
    (tmp_path / "large.packed").touch()
    config = decoding_config("paged_biglm", None, {**options, "phrases": None})
    assert config.wfst.arpa_lm_path == files["lm"]
    assert config.wfst.large_lm_path == options["large_lm"]
    assert config.wfst.beam_width == load_preset("paged_biglm").wfst.beam_width == 16
    boosted = decoding_config("paged_biglm", None, options)
    assert boosted.wfst.boosting_tree.key_phrases_file == files["phrases"]
    assert boosted.wfst.beam_width == 30  # bonuses are part of what is compared
    write_preset(tmp_path / "best.yaml", config, "")
    assert "large_lm_path: large.packed" in (tmp_path / "best.yaml").read_text()
    assert load_preset(str(tmp_path / "best.yaml")) == config
    with pytest.raises(ValueError, match=r"large_lm=.* has no effect with strategy cuda_wfst"):
        decoding_config("cuda_wfst", None, options)
    with pytest.raises(ValueError, match="large_lm=nowhere is no file here"):
        decoding_config("paged_biglm", None, {"large_lm": "nowhere"})


def test_the_lm_of_a_graph_goes_with_the_graph(tmp_path, files):
    preset = {"strategy": "paged_biglm", "wfst": {"wfst_lm_path": "a.graph", "small_lm_path": "a.arpa"}}
    OmegaConf.save(OmegaConf.create(preset), tmp_path / "graph.yaml")
    config = decoding_config(None, str(tmp_path / "graph.yaml"), {"lm": files["lm"]})
    assert config.wfst == {"arpa_lm_path": files["lm"]}


@pytest.mark.parametrize(
    ("strategy", "option"),
    [("cuda_wfst", "beam_size"), ("cuda_wfst", "beam_beta"), ("wfst", "blank_lm_score_mode")]
    + [(name, "beam_width") for name in ("flexctc_beam", "alsd_pp", "beam_batch")],
)
def test_an_option_of_other_strategies_is_refused(strategy, option):
    with pytest.raises(ValueError, match=f"{option}=3 has no effect with strategy {strategy}"):
        decoding_config(strategy, None, {option: 3})


def test_an_unknown_preset_lists_the_shipped_ones():
    with pytest.raises(ValueError, match=r"preset=best is no file here .*flexctc_beam"):
        load_preset("best")


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("a: [1", "not valid YAML"), ("[1, 2]", "expected a mapping"), ("beam: {}", "the key `strategy`"),
        ("a: &a [*a]", "not valid YAML"), ("strategy: x\nn: " + "9" * 5000, "not valid YAML"),
        ("strategy: x\nbeam: {ngram_lm_model: 5}", "beam.ngram_lm_model is 5, expected a path"),
        ("strategy: x\nbeam: {ngram_lm_model: [a]}", r"beam.ngram_lm_model is \['a'\], expected a path"),
        ("strategy: x\nwfst: {words_path: false}", "wfst.words_path is False, expected a path"),
        ("strategy: x\nbeam: [1]", r"beam is \[1\], expected a mapping of keys to values"),
        ("strategy: x\nwfst: 5", "wfst is 5, expected a mapping"),
        ("strategy: x\nbeam: {boosting_tree: 5}", "beam.boosting_tree is 5, expected a mapping"),
        ("strategy: x\nbeam: '${nope}'", "beam cannot be read: .*nope"),
        ("strategy: x\nbeam: {ngram_lm_model: '${nope}'}", "beam.ngram_lm_model cannot be read: .*nope"),
    ],
)  # fmt: skip
def test_a_bad_preset_file_is_refused(text, problem, tmp_path):
    file = tmp_path / "bad.yaml"
    file.write_text(text)
    with pytest.raises(ValueError, match=f"preset={file}.* {problem}"):
        load_preset(str(file))


def test_the_home_folder_may_be_abbreviated(tmp_path, files, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path))
    (tmp_path / "own.yaml").write_text("strategy: flexctc_beam\nbeam: {ngram_lm_model: ~/lm.arpa}")
    assert load_preset("~/own.yaml").beam.ngram_lm_model == files["lm"]


def test_a_written_preset_reads_back_and_can_be_moved_with_its_files(tmp_path, files):
    config = decoding_config(None, None, {**files, "lm_weight": 0.4})
    write_preset(tmp_path / "best.yaml", config, "two\nlines")
    text = (tmp_path / "best.yaml").read_text()
    assert text.startswith("# two\n# lines\n")
    assert str(tmp_path) not in text
    assert load_preset(str(tmp_path / "best.yaml")) == config
    moved = tmp_path.rename(tmp_path.with_name("moved"))
    assert load_preset(str(moved / "best.yaml")).beam.ngram_lm_model == str(moved / "lm.arpa")


def test_files_in_the_folder_above_stay_relative_and_far_ones_become_absolute(tmp_path, files):
    config = decoding_config(None, None, files)
    write_preset(tmp_path / "presets" / "near.yaml", config, "")
    assert OmegaConf.load(tmp_path / "presets" / "near.yaml").beam.ngram_lm_model == "../lm.arpa"
    write_preset(tmp_path / "a" / "b" / "far.yaml", config, "")
    assert OmegaConf.load(tmp_path / "a" / "b" / "far.yaml").beam.ngram_lm_model == files["lm"]
