"""The `wfst` section with paged_biglm: every key is used or refused by its name."""
# ruff: noqa: E402 (what needs NeMo is imported after the check for it)

from dataclasses import fields

import pytest

pytestmark = pytest.mark.nemo
pytest.importorskip("nemo.collections.asr")

from omegaconf import OmegaConf

from nemo_gpu_decoding.nemo_plugin.paged_config import PAGED_KEYS, read_paged_options
from nemo_gpu_decoding.nemo_plugin.wfst_config import read_wfst_options
from nemo_gpu_decoding.search.cuda_wfst.config import WFSTConfig
from nemo_gpu_decoding.search.paged_biglm.config import PagedBigLMConfig


@pytest.fixture
def lms(tmp_path):
    for name in ("small.arpa", "large.packed", "small.graph"):
        (tmp_path / name).touch()
    return tmp_path


@pytest.fixture
def read(lms):
    def options(cfg=None, **wfst):
        paths = {"arpa_lm_path": lms / "small.arpa", "large_lm_path": lms / "large.packed"}
        wfst = {**{key: str(path) for key, path in paths.items()}, **wfst}
        cfg = {"strategy": "paged_biglm", "wfst": wfst, **(cfg or {})}
        return read_paged_options(OmegaConf.create(cfg))

    return options


def test_defaults(read, lms):
    options = read()
    assert options.search == PagedBigLMConfig(beam=10.0, lattice_beam=10.0)
    assert (options.large, options.small) == (lms / "large.packed", lms / "small.arpa")
    assert options.graph.arpa == lms / "small.arpa"


def test_every_search_key_arrives(read):
    options = read(
        beam_width=14, lm_weight=0.7, max_active=500, decoding_mode="lattice", large_lm_weight=0.8,
        composition="LAZY", group_size=4, difference="never", placement="paged", cache_mb=7,
    )  # fmt: skip
    assert options.search == PagedBigLMConfig(
        beam=14.0, lattice_beam=14.0, max_active=500, n_best=20, lattice=True,
        large_lm_weight=0.8, group_size=4, difference="never", placement="paged", cache_mb=7,
    )  # fmt: skip
    assert options.lm_weight == 0.7
    assert read(composition="eager").search.composition == "eager"


def test_every_option_of_the_search_has_a_key():
    own = {field.name for field in fields(PagedBigLMConfig)} - {
        field.name for field in fields(WFSTConfig)
    }
    assert own == PAGED_KEYS.keys() - {"large_lm_path", "small_lm_path"}


def test_a_ready_made_graph_comes_with_its_lm(read, lms):
    graph = {"wfst_lm_path": str(lms / "small.graph")}
    options = read(**graph, arpa_lm_path=None, small_lm_path=str(lms / "large.packed"))
    assert (options.graph.ready_made, options.small) == (lms / "small.graph", lms / "large.packed")
    assert read(**graph).small == lms / "small.arpa"
    with pytest.raises(ValueError, match=r"wfst\.small_lm_path is not set, expected the LM that the gr"):
        read(**graph, arpa_lm_path=None)


@pytest.mark.parametrize(
    ("wfst", "message"),
    [
        ({"large_lm": "x"}, r"unknown key 'wfst\.large_lm' \(did you mean 'large_lm_\w+'\?\)"),
        ({"large_lm_path": None}, r"wfst\.large_lm_path is not set, expected the large LM"),
        ({"arpa_lm_path": None}, r"wfst\.arpa_lm_path and wfst\.wfst_lm_path are not set"),
        ({"small_lm_path": "x"}, r"wfst\.small_lm_path and wfst\.arpa_lm_path are both set"),
        ({"large_lm_weight": -1}, r"wfst\.large_lm_weight is -1\.0, expected a finite number >= 0"),
        ({"large_lm_weight": "all"}, r"wfst\.large_lm_weight is 'all', expected a number"),
        ({"composition": "static"}, r"wfst\.composition is 'static', expected one of lazy, eager"),
        ({"group_size": -1}, r"wfst\.group_size is -1"),
        ({"group_size": 2, "composition": "eager"}, r"wfst\.group_size is 2 with composition 'eager'"),
        ({"difference": "maybe"}, r"wfst\.difference is 'maybe', expected one of auto, always, never"),
        ({"placement": "host"}, r"wfst\.placement is 'host', expected one of auto, device, paged"),
        ({"cache_mb": 0}, r"wfst\.cache_mb is 0"),
        ({"search_type": "cuda_wfst"}, r"wfst\.search_type is 'cuda_wfst'"),
        ({"k2_decoding_cfg": {"search_beam": 3}}, r"no effect with 'paged_biglm'; set wfst\.beam_width"),
        ({"beam_width": 0}, r"wfst\.beam_width is 0\.0"),
    ],
)
def test_bad_keys_are_named(read, wfst, message):
    with pytest.raises(ValueError, match=message):
        read(**wfst)


@pytest.mark.parametrize("key", ["large_lm_path", "small_lm_path"])
def test_files_that_do_not_exist(read, key, lms):
    graph = {"arpa_lm_path": None, "wfst_lm_path": str(lms / "small.graph")}
    with pytest.raises(FileNotFoundError, match=rf"wfst\.{key} is '/nowhere/lm'"):
        read(**{**graph, key: "/nowhere/lm"})


def test_our_keys_do_not_stand_beside_the_section(read):
    with pytest.raises(ValueError, match=r"expected it in there: wfst\.large_lm_path"):
        read({"large_lm_path": "large.packed"})


def test_cuda_wfst_has_no_large_lm(lms):
    wfst = {"arpa_lm_path": str(lms / "small.arpa"), "large_lm_path": str(lms / "large.packed")}
    with pytest.raises(ValueError, match=r"unknown key 'wfst\.large_lm_path'"):
        read_wfst_options(OmegaConf.create({"strategy": "cuda_wfst", "wfst": wfst}))
