"""NeMo's own scripts, unmodified, with every strategy: each row of the tables in docs/nemo_scripts.md is run.

The scripts are in NeMo's repository alone, not in its wheel: the page says how to get them, `make test-nemo-scripts`
runs this. That the page can be run (names, files, strategies) is tested without them.
"""

import json
import os
import re
import runpy
from pathlib import Path
from typing import NamedTuple

import pytest
import torch
import yaml
from omegaconf import OmegaConf

from nemo_gpu_decoding.metrics import word_errors
from nemo_gpu_decoding.presets import load_preset
from tests.assets import ASSETS, ROOT, speech
from tests.nemo_plugin.conftest import restore
from tests.nemo_plugin.usage import one_shot, texts, write_manifest

pytestmark = pytest.mark.slow

PAGE = (ROOT / "docs" / "nemo_scripts.md").read_text()
STREAMING = (ROOT / "docs" / "experiments" / "nemo_streaming.md").read_text()
NEMO = Path(os.environ.get("NEMO_EXAMPLES", "examples/asr")).resolve().parents[1]
TRANSDUCERS = ("alsd_pp", "aes_pp")
STRATEGIES = ("flexctc_beam", "cuda_wfst", "paged_biglm", *TRANSDUCERS)
PIPELINE = "asr_streaming_infer.py"
# files that the page names, in assets/self
FILES = {
    "words.arpa": "lm/word3.arpa",
    "small.arpa": "lm/word_small.arpa",
    "lm.arpa": "lm/tok3.arpa",
    "source.arpa": "lm/tok3.arpa",
    "names.txt": "phrases.txt",
}


def table(header: str, page: str = PAGE) -> list[list[str]]:
    """The rows of the page's table, without backticks. An empty first cell is that of the row above."""
    lines = iter(page.splitlines())
    assert any(line.startswith(header) for line in lines), header
    next(lines)
    rows = []
    for line in lines:
        if not line.startswith("|"):
            break
        cells = [cell.strip() for cell in line.strip("|").split("|")]
        cells = [re.sub(r"^`([^`]*)`$", r"\1", cell) for cell in cells]
        rows.append([cells[0] or rows[-1][0], *cells[1:]])
    return rows


class Row(NamedTuple):
    """A script with a strategy; `remark` begins with the error, as code."""

    script: str
    strategy: str
    words: str
    remark: str

    @property
    def error(self) -> str:
        return self.remark.split("`")[1] if self.remark else ""

    @property
    def head(self) -> str:
        return "rnnt" if self.strategy in TRANSDUCERS else "ctc"

    @property
    def model(self) -> str:
        if "cache_aware" in self.script:
            return "self_streaming"
        return "self_hybrid_rnnt" if self.head == "rnnt" else "self_ctc"


ROWS = [
    Row(script.strip("`"), *cells)
    for scripts, *cells in table("| script | strategy |")
    for script in scripts.split("`, `")
]
REST = {Path(file).name: (file, rest, output) for file, rest, output in table("| script | the rest |")}
FUSED = dict(table("| section | LM and phrases |"))
MORE = dict(table("| for | keys of `beam` |"))
STREAMS = table("| YAML | checkpoint | strategy |", STREAMING)
DECODING = [row for row in ROWS if not row.remark and row.script != PIPELINE]
TRANSCRIBING = [row for row in DECODING if "ngram" not in row.script]


def test_page_of_scripts_names_every_script():
    assert {row.script for row in ROWS} == set(REST)
    for script in {row.script for row in TRANSCRIBING} | {PIPELINE}:
        assert tuple(row.strategy for row in ROWS if row.script == script) == STRATEGIES
    assert len(TRANSCRIBING) == 20
    assert all(row.remark.startswith("`") for row in ROWS if row.remark)
    for words in [
        *(row.words for row in ROWS),
        *FUSED.values(),
        *MORE.values(),
        *(rest for _, rest, _ in REST.values()),
    ]:
        assert set(re.findall(r"=([\w.]+\.(?:arpa|txt))", words)) <= {*FILES, "spelled.txt", "commands.txt"}
    assert {strategy for _, _, strategy, _ in STREAMS} == {"greedy", *STRATEGIES}
    assert all(0 < float(wer) < 50 for *_, wer in STREAMS)


runs = pytest.mark.skipif(
    "NEMO_EXAMPLES" not in os.environ,
    reason="needs NeMo's repository: make test-nemo-scripts NEMO_EXAMPLES=.../NeMo/examples/asr",
)


@pytest.fixture
def folder(tmp_path, monkeypatch, utterances) -> Path:
    """A working folder with the files that the page names."""
    for name, file in FILES.items():
        (tmp_path / name).symlink_to(ASSETS / file)
    for model in (ASSETS / "models").iterdir():
        (tmp_path / model.name).symlink_to(model)
    write_manifest(tmp_path / "test.json", utterances)
    (tmp_path / "spelled.txt").write_text("graham_graham\n")  # said in the first utterance
    (tmp_path / "commands.txt").write_text("".join(f"{utterance['text']}\n" for utterance in utterances[:2]))
    (tmp_path / "out").mkdir()
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.fixture
def run(folder, monkeypatch):
    """Calls a row's script with overrides, in this process; returns the lines that it writes."""
    from hydra.core.global_hydra import GlobalHydra

    from nemo_gpu_decoding import register

    register()
    monkeypatch.setenv("HYDRA_FULL_ERROR", "1")  # or else Hydra prints the message and exits

    def call(row: Row, words: str, model: str = "", config: str = "buffered_ctc") -> list[str]:
        name, rest, output = REST[row.script]
        file = NEMO / name
        assert file.exists(), f"NEMO_EXAMPLES names no clone of NeMo: {file} is not there"
        if "scripts/asr_" in name:
            pytest.importorskip("editdistance")
        rest = rest.replace("model.nemo", f"{model or row.model}.nemo").replace("buffered_ctc", config)
        rest = rest.replace("decoder_type=ctc", f"decoder_type={row.head}")
        monkeypatch.syspath_prepend(file.parent)  # speech_to_text_eval imports transcribe_speech
        monkeypatch.setattr("sys.argv", [str(file), *rest.split(), *words.split()])
        try:
            runpy.run_path(str(file), run_name="__main__")
        finally:
            GlobalHydra.instance().clear()
            torch.set_grad_enabled(True)
        (written,) = folder.glob(output)
        return written.read_text().splitlines()

    return call


def transcripts(row: Row, decoding, files):
    """What `transcribe` returns by the checkpoint and head of a row with a decoding config."""
    model = restore(row.model)
    more = {"decoder_type": row.head} if hasattr(model, "cur_decoder") else {}
    model.change_decoding_strategy(decoding, verbose=False, **more)
    return model.transcribe(files, batch_size=len(files), verbose=False)


GREEDY = {"strategy": "greedy_batch"}


def decoding_of(row: Row, words: str) -> dict:
    config = OmegaConf.from_dotlist([word.lstrip("+") for word in words.split()])
    return OmegaConf.to_container(config)[f"{row.head}_decoding"]


def predicted(lines) -> list[str]:
    return [json.loads(line)["pred_text"] for line in lines]


def name(row: Row) -> str:
    return f"{row.script}-{row.strategy}"


@runs
@pytest.mark.parametrize("row", TRANSCRIBING, ids=name)
def test_transcripts_are_those_of_transcribe(row, run, files):
    fused = FUSED["wfst" if "wfst" in row.words else "beam"].replace("ctc_decoding", f"{row.head}_decoding")
    words = f"{row.words} {fused}"
    found = predicted(run(row, words))
    assert found == texts(transcripts(row, decoding_of(row, words), files))
    assert found != texts(transcripts(row, GREEDY, files))


@runs
@pytest.mark.parametrize("strategy", ["cuda_wfst", "paged_biglm"])
def test_presets_of_word_graphs_need_no_plus(strategy, run, files):
    (row,) = (row for row in TRANSCRIBING if row.script == "transcribe_speech.py" and row.strategy == strategy)
    words = f"{row.words} ctc_decoding.wfst.boosting_tree.key_phrases_file=names.txt".replace("+", "")
    preset = f"{strategy}_phrases"
    found = predicted(run(row, f"+ctc_decoding={preset} {words}"))
    assert found == texts(transcripts(row, OmegaConf.merge(load_preset(preset), decoding_of(row, words)), files))


@runs
@pytest.mark.parametrize("keys", MORE.values(), ids=[re.sub(r"\[(.*)\].*", r"\1", name) for name in MORE])
@pytest.mark.parametrize("row", [row for row in TRANSCRIBING[:5] if "wfst" not in row.words], ids=name)
def test_density_ratios_locks_and_grammars_are_those_of_transcribe(row, keys, run, files):
    words = f"{row.words} {keys.replace('ctc_decoding', f'{row.head}_decoding')}"
    found = predicted(run(row, words))
    assert found == texts(transcripts(row, decoding_of(row, words), files))
    if "lm_pool" not in keys:  # no utterance names one of these LMs
        assert found != texts(transcripts(row, decoding_of(row, row.words), files))


@runs
@pytest.mark.parametrize("row", [row for row in DECODING if "ngram" in row.script], ids=name)
def test_candidates_are_those_of_transcribe(row, run, files):
    found = [line.split("\t") for line in run(row, row.words)]
    beam = {"beam_size": 8, "ngram_lm_model": "lm.arpa", "ngram_lm_alpha": 0.5, "return_best_hypothesis": False}
    beam |= {"beam_beta": 1.0} if row.head == "ctc" else {"maes_prefix_alpha": 2}
    ours = transcripts(row, {"strategy": row.strategy, "beam": beam}, files)
    expected = [(candidate.text, float(candidate.score)) for candidates in ours for candidate in candidates]
    assert [text for text, _ in found] == [text for text, _ in expected]
    assert [float(score) for _, score in found] == pytest.approx([score for _, score in expected], abs=1e-3)
    assert [candidates[0].text for candidates in ours] != texts(transcripts(row, GREEDY, files))


@runs
@pytest.mark.parametrize("row", [row for row in ROWS if row.error], ids=name)
def test_script_that_cannot_use_a_strategy_says_so(row, run):
    with pytest.raises(Exception, match=re.escape(row.error)):
        run(row, row.words)


@runs
def test_scripts_that_decode_with_no_strategy_of_ours(run):
    wfst, biasing = (next(row for row in ROWS if row.script.startswith(name)) for name in ("eval_wfst", "eval_greedy"))
    with pytest.raises(AttributeError, match=wfst.error):
        run(wfst, "decoding_search_type=riva")
    with pytest.raises(ValueError, match="empty sequence"):
        run(biasing, "context_file=names.txt")
    assert run(biasing, f"+{biasing.words}") == run(biasing, "")


@runs
@pytest.mark.parametrize("more", ["presort_manifest=false", "", "timestamps=true"])
@pytest.mark.parametrize("row", TRANSCRIBING[:20:4], ids=name)
def test_scripts_write_n_best_lists(row, more, run, files):
    words = row.words + " ctc_decoding.wfst.beam_size=3" * ("wfst" in row.words)
    lines = [json.loads(line) for line in run(row, f"{words} extract_nbest=true {more}")]
    decoding = decoding_of(row, words)
    decoding.setdefault("wfst" if "wfst" in words else "beam", {})["return_best_hypothesis"] = False
    ours = transcripts(row, decoding, files)
    assert [[text for text, _ in line["beams"]] for line in lines] == [texts(beam) for beam in ours]
    if "timestamps" in more:
        assert [" ".join(word["word"] for word in line["word"]) for line in lines] == [beam[0].text for beam in ours]
    assert any(len(beam) > 1 for beam in ours)


def tuned(strategy: str, model: str) -> str:
    """The overrides of a decoding in assets/self that `tune` has found."""
    presets = {"flexctc_beam": "demo", "cuda_wfst": "demo_wfst", "paged_biglm": "demo_paged"}
    preset = presets.get(strategy, "demo_tdt" if model.endswith("tdt") else "demo_rnnt")
    options = yaml.safe_load((ASSETS / f"{preset}.yaml").read_text()) | {"strategy": strategy}

    def flat(prefix, value):
        if isinstance(value, dict):
            return [word for key in value for word in flat(f"{prefix}.{key}", value[key])]
        file = ASSETS / str(value)
        return [] if value is None else [f"++{prefix}={file if file.is_file() else value}"]

    return " ".join(flat("asr.decoding", options))


@runs
@pytest.mark.parametrize(("config", "model", "strategy", "wer"), STREAMS)
def test_streaming_scripts_write_the_transcripts(config, model, strategy, wer, run, folder, monkeypatch, pushed):
    from nemo.collections.asr.inference.factory.pipeline_builder import PipelineBuilder

    entries = speech()
    write_manifest(folder / "test.json", entries)
    pipelines, build = [], PipelineBuilder.build_pipeline
    monkeypatch.setattr(PipelineBuilder, "build_pipeline", lambda cfg: pipelines.append(build(cfg)) or pipelines[-1])
    row = next(row for row in ROWS if row.script == PIPELINE and strategy in (row.strategy, "greedy"))
    words = "" if strategy == "greedy" else f"{row.words} {tuned(strategy, model)}"
    if "cache_aware" in config:
        (slots,) = re.findall(r"`(streaming\.att[^`]*)`", STREAMING)
        words += f" {slots}"
    found = predicted(run(row, words, model, config))
    assert 100 * word_errors([entry["text"] for entry in entries], found).wer == pytest.approx(float(wer), abs=0.06)
    assert bool(pushed) == (strategy != "greedy")
    if pushed:
        ids_to_text = pipelines[0].tokenizer.ids_to_text
        whole = [ids_to_text(tokens) for tokens in one_shot(pipelines[0].infer, pushed)]
        # some transcripts are of several utterances, which end after 800 ms of silence
        assert sorted("".join("".join(whole).split())) == sorted("".join("".join(found).split()))
