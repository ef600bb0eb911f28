"""README and docs: snippets and tutorials run, links lead somewhere, options exist, figures are those of records."""

import contextlib
import importlib.util
import json
import os
import re
import shutil
import subprocess
import sys
import types
from dataclasses import astuple, dataclass, field, fields
from functools import partial
from importlib.metadata import version
from pathlib import Path
from typing import NamedTuple

import numpy as np
import pytest
import yaml
from omegaconf import OmegaConf

import nemo_gpu_decoding
from benchmarks.cases import lines_of
from benchmarks.options import BenchOptions
from nemo_gpu_decoding import EndpointConfig
from nemo_gpu_decoding.cli.main import load_command, main
from nemo_gpu_decoding.cli.options import parse_options, show_value
from tests.assets import ASSETS, CTC_MODEL, ROOT, load_script
from tools.compare.__main__ import main as compare


class Page(NamedTuple):
    path: Path
    text: str
    snippets: list[tuple[str, str]]  # language, text

    def blocks(self, language):
        return [text for kind, text in self.snippets if kind == language]

    @property
    def commands(self):
        """Lines of the bash blocks, without comments; one that ends in a backslash goes on in the next."""
        lines = re.sub(r" \\\n +", " ", "\n".join(self.blocks("bash"))).split("\n")
        return [line.split("  #")[0].strip() for line in lines if line.strip()]


def read_page(path):
    text = path.read_text(encoding="utf-8")
    return Page(path, text, re.findall(r"^```(\w*)\n(.*?)^```", text, re.MULTILINE | re.DOTALL))


DOCS = ROOT / "docs"
EXPERIMENTS = [read_page(path) for path in sorted((DOCS / "experiments").glob("*.md"))]
OTHERS = (ROOT / "README.md", *sorted(DOCS.glob("*.md")), *sorted((DOCS / "developers").glob("*.md")))
PAGES = [*map(read_page, OTHERS), *EXPERIMENTS]
PERFORMANCE = (DOCS / "performance.md").read_text(encoding="utf-8")
# what a page may import though an environment for tests lacks it
OPTIONAL_PEERS = ("torchaudio", "flashlight", "pyctcdecode", "kenlm")
DOWNLOADS = "# needs a download\n"  # first line of a block or cell that is compiled here, not run


def pages_with(wanted):
    """One test for each page of which `wanted` finds something."""
    return pytest.mark.parametrize("page", [p for p in PAGES if wanted(p)], ids=lambda page: page.path.stem)


def pages_run(wanted):
    """The same for tests that run what a page shows: README's in `make test`, the others' in `make test-all`."""
    pages = [pytest.param(p, marks=() if p.path.stem == "README" else pytest.mark.slow) for p in PAGES if wanted(p)]
    return pytest.mark.parametrize("page", pages, ids=lambda page: page.path.stem)


# ------------------------------------------------------------------------------------------- snippets
@pages_with(lambda page: page.snippets)
def test_snippets_have_a_known_language(page):
    assert {kind for kind, _ in page.snippets} <= {"python", "bash", "yaml"}


def runner_of(command):
    """What runs a command of the package or of `tools` in this process and returns its exit code; None for others."""
    for program, run in {"nemo-gpu-decoding ": main, "python -m tools.compare ": compare}.items():
        if command.startswith(program):
            return partial(run, command.removeprefix(program).split())
    return None


def is_measurement(command):
    """A command of the benchmarks, which exists. It takes minutes, so no test runs it."""
    if command.startswith("python docs/results/records.py measure "):
        records = load_script(DOCS / "results" / "records.py")
        return {word for word in command.split()[3:] if "=" not in word} <= set(records.RUNS)
    module = re.match(r"python -m (benchmarks[\w.]*)", command)
    return module is not None and importlib.util.find_spec(module[1]) is not None


def is_server(command):
    return command.startswith("nemo-gpu-decoding serve ")


def server_of(command):
    """The server that a command starts, in a thread."""
    for module in ("starlette", "uvicorn", "websockets"):
        pytest.importorskip(module)
    from nemo_gpu_decoding.cli.serve import ServeOptions, build_server
    from tests.live.test_server import served

    return served(build_server(parse_options(ServeOptions, command.split()[2:])))


@dataclass
class ASRResult:
    """That of NeMo Curator 1.4."""

    text: str
    skipped: bool = False
    skip_reason: str | None = None
    extras: dict = field(default_factory=dict)


@pytest.fixture
def curator(monkeypatch):
    """NeMo Curator, or where it is not installed what the page of clusters imports of it."""
    if importlib.util.find_spec("nemo_curator") is None:
        for name in ("nemo_curator", "nemo_curator.models", "nemo_curator.models.asr", "nemo_curator.models.asr.base"):
            monkeypatch.setitem(sys.modules, name, types.ModuleType(name))
        sys.modules["nemo_curator.models.asr.base"].ASRResult = ASRResult


@pytest.mark.nemo
@pages_run(lambda page: page.blocks("python"))
def test_python_snippets_of_a_page_run(page, curator, monkeypatch, capsys):
    """The blocks of a page run one after the other, as they are read."""
    if "nemo.collections" in page.text:
        pytest.importorskip("nemo.collections.asr")
    monkeypatch.chdir(ROOT)
    (ROOT / "build").mkdir(exist_ok=True)  # as `make demo` leaves it
    names, printed = {}, {}
    with contextlib.ExitStack() as stack:
        for command in page.commands:
            if is_server(command):  # the blocks are its clients
                stack.enter_context(server_of(command))
        for code in page.blocks("python"):
            compiled = compile(code, page.path.name, "exec")
            if code.startswith(DOWNLOADS):
                continue
            try:
                exec(compiled, names)
            except ModuleNotFoundError as error:
                if error.name.split(".")[0] not in OPTIONAL_PEERS:
                    raise
                continue
            printed[code] = capsys.readouterr().out
    runs = [code for code in page.blocks("python") if not code.startswith(DOWNLOADS)]
    assert bool("".join(printed.values()).strip()) == bool(runs)
    for columns in re.findall(r'<div class="columns" markdown>(.*?)</div>\n</div>', page.text, re.DOTALL):
        there, here = re.findall(r"^```python\n(.*?)^```", columns, re.MULTILINE | re.DOTALL)
        assert printed.get(there, printed.get(here)) == printed.get(here)


@pytest.mark.nemo
def test_curator_adapter_equals_transcribe(curator):
    pytest.importorskip("nemo.collections.asr")
    soundfile = pytest.importorskip("soundfile")
    (page,) = [page for page in PAGES if page.path.stem == "clusters"]
    names = {}
    exec(compile(page.blocks("python")[0], page.path.name, "exec"), names)
    beam = {"beam_size": 8, "ngram_lm_model": str(ASSETS / "lm" / "tok3.arpa"), "ngram_lm_alpha": 0.5}
    adapter = names["BeamASRAdapter"](str(CTC_MODEL), {"strategy": "flexctc_beam", "beam": beam})
    with contextlib.suppress(ImportError):  # Curator's own type, where it is installed
        from nemo_curator.models.asr.base import ASRAdapter

        assert isinstance(adapter, ASRAdapter)
    adapter.download_weights_on_node()
    adapter.load_model(num_gpus=0)
    files = [str(ASSETS / "speech" / "test" / f"test_{n:03}.flac") for n in (0, 1)]
    expected = adapter.model.transcribe(files, batch_size=2, return_hypotheses=True)
    items = [
        dict(zip(("waveform", "sample_rate"), soundfile.read(file, dtype="float32"), strict=True)) for file in files
    ]
    empty = {"waveform": np.zeros(0, np.float32), "sample_rate": 16000}
    first, skipped, second = adapter.transcribe_batch([items[0], empty, items[1]])
    assert (skipped.text, skipped.skipped, skipped.skip_reason) == ("", True, "empty_audio")
    assert [(found.text, found.extras["score"]) for found in (first, second)] == [
        (hypothesis.text, float(hypothesis.score)) for hypothesis in expected
    ]
    assert adapter.transcribe_batch([empty])[0].skipped
    with pytest.raises(ValueError, match=r"sample_rate is 8000, expected 16000, that of .*self_ctc\.nemo"):
        adapter.transcribe_batch([{**items[0], "sample_rate": 8000}])
    adapter.unload_model()
    assert adapter.model is None


@pytest.mark.nemo
@pages_with(lambda page: page.blocks("yaml"))
def test_decoding_sections_of_a_page_are_read(page, monkeypatch):
    pytest.importorskip("nemo.collections.asr")
    from nemo_gpu_decoding.nemo_plugin import beam_sections, word_graph_sections

    readers = {
        "flexctc_beam": beam_sections.read_flexctc,
        "alsd_pp": beam_sections.read_alsd,
        "aes_pp": beam_sections.read_aes,
        "cuda_wfst": word_graph_sections.read_cuda_wfst,
        "paged_biglm": word_graph_sections.read_paged_biglm,
    }
    monkeypatch.chdir(ROOT)
    for text in page.blocks("yaml"):
        section = OmegaConf.create(text)
        if section.strategy in readers:
            assert readers[section.strategy](section)
        else:
            assert section.strategy == "wfst"  # NeMo's own, before the migration


@pytest.mark.nemo
@pages_run(lambda page: page not in EXPERIMENTS and any(runner_of(c) for c in page.commands))
def test_commands_of_a_page_succeed(page, monkeypatch, capsys):
    pytest.importorskip("nemo.collections.asr")
    monkeypatch.chdir(ROOT)
    (ROOT / "build").mkdir(exist_ok=True)
    for folder in re.findall(r"\bout=(build/\S+)/(?:\s|$)", "\n".join(page.commands)):
        shutil.rmtree(ROOT / folder, ignore_errors=True)  # of other versions, which are not mixed; no other page's
    for command in page.commands:
        run = runner_of(command)
        if run is not None and not is_server(command):
            assert run() == 0, command
            shown = capsys.readouterr()
            assert (shown.out + shown.err).strip(), command


@pages_with(lambda page: page.path.parent == DOCS and page.path.stem != "papers")
def test_users_page_begins_with_its_question(page):
    assert "?" in page.text.split("\n\n")[1]


@pytest.mark.parametrize("page", EXPERIMENTS, ids=lambda page: page.path.stem)
def test_experiment_has_question_setup_answer_and_a_command_with_known_options(page):
    assert re.match(r"# [^\n]+\?\n", page.text)
    assert "**Set-up.** " in page.text
    assert "**Answer.** " in page.text
    assert page.commands
    for command in page.commands:
        if command.startswith("nemo-gpu-decoding "):
            name, *arguments = command.split()[1:]
            parse_options(load_command(name).OPTIONS, arguments)


@pytest.mark.parametrize("command", sorted({c for page in PAGES for c in page.commands if c.startswith("make ")}))
def test_make_target_exists(command):
    subprocess.run([*command.split(), "--dry-run"], cwd=ROOT, check=True, capture_output=True)


def test_workflow_runs_make_targets_on_every_supported_version():
    (workflow,) = [yaml.safe_load(f.read_text()) for f in (ROOT / ".github" / "workflows").glob("*.yml")]
    jobs = workflow["jobs"]
    commands = [step["run"] for job in jobs.values() for step in job["steps"] if "run" in step]
    known = re.findall(r"^([a-z0-9-]+):.*##", (ROOT / "Makefile").read_text(encoding="utf-8"), re.M)
    for command in (command for command in commands if command.startswith("make ")):
        assert all(word in known or "=" in word for word in re.sub(r'"[^"]*"', "", command).split()[1:]), command
    matrix = jobs["test"]["strategy"]["matrix"]
    project = (ROOT / "pyproject.toml").read_text(encoding="utf-8")
    for low, high, versions in ((">=3.10", "<3.14", matrix["python"]), (">=2.7", "<3.1", matrix["nemo"])):
        assert f"{low},{high}" in project
        numbers = sorted(tuple(map(int, version.split("."))) for version in versions)
        assert numbers[0][:2] == tuple(map(int, low[2:].split(".")))
        assert numbers[-1][1] == int(high.split(".")[1]) - 1


@pages_with(lambda page: page.commands)
def test_install_commands_name_existing_extras(page):
    project = (ROOT / "pyproject.toml").read_text(encoding="utf-8")
    for command in page.commands:
        if command.startswith("pip install ."):
            continue
        if page.path.stem == "README" and command.startswith(("git clone ", "cd ", "apt install ")):
            assert command.endswith(("nemo-gpu-decoding", "g++ ffmpeg chromium")), command
            continue
        extras = re.fullmatch(r'pip install "\.\[([\w,]+)\]"', command)
        if extras is None:
            assert command.startswith("make ") or runner_of(command) is not None or is_measurement(command), command
        else:
            assert all(re.search(rf"^{extra} = \[", project, re.M) for extra in extras[1].split(",")), command


@pages_with(lambda page: True)
def test_links_and_anchors_exist(page):
    for target, anchor in re.findall(r"\]\(([^)#:\s]*)(?:#([^)]*))?\)", page.text):
        path = page.path.parent / target if target else page.path
        assert path.exists(), target
        if anchor:
            titles = re.findall(r"^#+ (.*)$", path.read_text(encoding="utf-8"), re.M)
            anchors = [re.sub(r"[^\w\- ]", "", title.lower()).replace(" ", "-") for title in titles]
            assert anchor in anchors, f"{target}#{anchor}"


@pytest.mark.slow
def test_site_builds_without_a_warning(tmp_path):
    """mkdocs checks links and anchors, mkdocstrings the docstrings' arguments against the signatures."""
    for module in ("mkdocs", "material", "mkdocstrings_handlers.python"):
        pytest.importorskip(module, reason='the site needs pip install ".[docs]"')
    command = [sys.executable, "-m", "mkdocs", "build", "--quiet", "--strict", "--site-dir", str(tmp_path)]
    environment = {**os.environ, "NO_MKDOCS_2_WARNING": "1"}
    built = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False)
    assert built.returncode == 0, built.stdout + built.stderr
    pages = {path.stem: path.read_text(encoding="utf-8") for path in tmp_path.rglob("*.html")}
    assert {page.path.stem for page in PAGES[1:]} <= set(pages)
    for name in nemo_gpu_decoding.__all__[1:]:  # all but __version__
        assert f'id="nemo_gpu_decoding.{name}"' in pages["api"]
    loaded = re.findall(r'<(?:script|link|img)[^>]* (?:src|href)="(https?:[^"]*)"', "".join(pages.values()))
    assert not loaded, "the site needs something from elsewhere"


# -------------------------------------------------------------------------------------------- options
@pytest.fixture
def tables():
    return load_script(ROOT / "docs" / "pages.py")


@pages_with(lambda page: "<!-- options: " in page.text)
def test_option_tables_have_every_field(page, tables):
    for name in re.findall(r"<!-- options: (\w+)", page.text):
        rows = [row.split(" | ") for row in tables.option_table(name).split("\n")[2:]]
        assert [row[0] for row in rows] == [f"| `{f.name}`" for f in fields(getattr(nemo_gpu_decoding, name))]
        assert all(len(row[2]) > 10 for row in rows), f"{name}: an option that no comment explains"
        if f"options: {name} -->" in page.text or f"options: {name} flexctc_beam -->" in page.text:  # without `beyond`
            assert [f.name for f in fields(getattr(nemo_gpu_decoding, name)) if f"`{f.name}`" not in page.text] == []


@pytest.fixture
def nemo3():
    pytest.importorskip("nemo.collections.asr")
    if not version("nemo_toolkit").startswith("3."):
        pytest.skip("other versions of NeMo have other defaults")


@pytest.mark.nemo
@pages_with(lambda page: "<!-- options: " in page.text)
def test_option_tables_are_up_to_date(page, tables, nemo3):
    assert tables.with_options(page.text) == page.text, "python docs/pages.py"


@pytest.mark.nemo
@pytest.mark.parametrize("strategy", ["flexctc_beam", "alsd_pp", "aes_pp", "cuda_wfst", "paged_biglm"])
def test_page_of_a_strategy_has_every_key_with_its_default(strategy, tables, nemo3):
    names = {"paged_biglm": ("cuda_wfst", "paged_biglm"), "aes_pp": ("alsd_pp", "aes_pp")}.get(strategy, (strategy,))
    text = "".join((ROOT / "docs" / f"{name}.md").read_text(encoding="utf-8") for name in names)
    section = tables.section_of(strategy)
    defaults = section.defaults | section.added
    keys = section.valid
    assert [key for key in keys if f"`{key}`" not in text] == []
    by_hand = re.sub(r"<!-- options: .*?<!-- end -->", "", text, flags=re.DOTALL)
    for key, default in re.findall(r"^\| `(\w+)` \| (\S+) \|", by_hand, re.M):
        if key in keys and default != "-":
            assert default == show_value(defaults[key]), key


def test_every_config_class_has_a_table():
    shown = re.findall(r"<!-- options: (\w+)", "".join(page.text for page in PAGES))
    configs = {name for name in nemo_gpu_decoding.__all__ if name.endswith("Config")}
    assert sorted(shown) == sorted(configs - {"EndpointConfig"})  # its table is tested below


def test_table_of_endpoint_rules_is_up_to_date():
    text = (ROOT / "docs" / "streaming.md").read_text(encoding="utf-8")
    rows = re.findall(r"^\| `(rule\d)` \| (\w+) \| (\S+) \| (\S+) \| (\S+) \|$", text, re.M)
    shown = {name: (spoken == "yes", *map(float, numbers)) for name, spoken, *numbers in rows}
    assert shown == {name: astuple(rule) for name, rule in EndpointConfig().rules()}


# ----------------- The figures of pages are those of the records, and of the command beside them
@pytest.fixture
def records():
    return load_script(ROOT / "docs" / "results" / "records.py")


def test_figures_are_those_of_the_records(records):
    pages = {page: page.read_text(encoding="utf-8") for page in records.PAGES}
    assert sum(text.count("<!-- records: ") for text in pages.values()) == len(records.WRITERS)
    for page, text in pages.items():
        assert records.with_figures(text, records.results_from(page)) == text, "python docs/results/records.py write"


def figures_of(record):
    """What a table by hand may show of a record: single figures, WER/RTFx and WER/F-score/RTFx of one row."""
    for row in record["rows"]:
        if "latency" in row:
            mean = row["mean"]
            yield from (f"{1e3 * seconds:.1f}" for seconds in (*mean.values(), sum(mean.values())))
            yield from (f"{1e3 * row['latency']['partial']['p99']:.1f}", f"{row['streams_per_core']:,.0f}")
        elif row.get("ratio"):
            yield from (f"{row['ratio']:.2f}", str(row["params"]["beam_size"]))
            for side in ("ours", "peer"):
                wer, score, speed = row["wer"][side], row["fscore"][side], f"{row['rtfx'][side]:,.0f}"
                score = "-" if score is None else f"{score:.2f}"
                yield from (f"{wer:.1f}", f"{wer:.2f}", speed, f"{wer:.1f}/{speed}", f"{wer:.1f}/{score}/{speed}")


def cells_of_tasks(section):
    """Cells of tables from the column of the first task on, or in a row that begins with a task."""
    first = None
    for line in re.sub(r"<!-- records: .*?<!-- end -->", "", section, flags=re.DOTALL).splitlines():
        cells = [cell.strip() for cell in line.strip("|").split("|")] if line.startswith("|") else []
        if cells and first is None:
            first = next((column for column, cell in enumerate(cells) if cell.startswith("peaked")), len(cells))
        elif cells:
            yield from cells[1 if re.match("peaked|hard", cells[0]) else first :]
        else:
            first = None


def test_figures_of_tables_by_hand_are_those_of_the_linked_records():
    """In docs/papers.md: the tables with a link "record" in their section."""
    checked, unknown = 0, []
    for section in re.split(r"^## ", (DOCS / "papers.md").read_text(encoding="utf-8"), flags=re.M):
        links = set(re.findall(r"\]\((results/[\w.-]+\.json)\)", section))
        known = {figure for link in links for figure in figures_of(json.loads((DOCS / link).read_text()))}
        for cell in cells_of_tasks(section):
            for figure in re.findall(r"\d[\d.,/]*\d", cell):
                checked += 1
                if figure not in known and not set(figure.split("/")) <= known:
                    unknown.append((cell, figure))
    assert not unknown
    assert checked > 120


@pytest.fixture
def copied(records, tmp_path, monkeypatch):
    for path, record in records.records().values():
        (tmp_path / path.name).write_text(json.dumps(record))
    monkeypatch.setattr(records, "HERE", tmp_path)
    return tmp_path


def test_rows_that_are_not_verified_give_no_figures(records, copied):
    path, record = records.records()["flexctc_beam"]
    record["rows"][0]["verified"] = False
    path.write_text(json.dumps(record))
    with pytest.raises(ValueError, match="has a row that is not verified"):
        records.with_figures(PERFORMANCE)


def test_new_record_replaces_the_old_one(records, copied, monkeypatch):
    page = copied / "performance.md"
    page.write_text(PERFORMANCE)
    monkeypatch.setattr(records, "PAGES", [page])
    monkeypatch.setattr(records, "plot_rows", lambda *given: None)
    old, record = records.records()["aes_pp"]

    def bench(command, cwd, check):
        options = parse_options(BenchOptions, command[3:])
        assert (options.strategy, options.mode, options.out) == ("aes_pp", "batch", str(copied))
        (copied / "a-new.json").write_text(json.dumps({**record, "date": "2099-01-01"}))

    monkeypatch.setattr(records.subprocess, "run", bench)
    records.main("measure", "aes_pp")
    assert not old.exists()
    assert "[rows](results/a-new.json) of aes_pp" in page.read_text()


def test_commands_of_records_are_options_of_the_benchmarks(records):
    for options in records.RUNS.values():
        parse_options(BenchOptions, options.split())


def test_no_two_records_measure_the_same_row(records):
    rows = []
    for name, text in records.RUNS.items():
        given = text if "strategy=" in text else f"strategy={name} {text}"
        if name not in records.PROGRAMS and (options := parse_options(BenchOptions, given.split())).mode == "batch":
            rows += [(options.strategy, peer) for peer in {line.family for line in lines_of(options)} if peer]
    rows.remove(("alsd_pp", "greedy_fusion"))  # once over beams, once over batch sizes
    assert len(rows) == len(set(rows)) > 15


# ------------------------------------------------ Every tutorial runs from its first cell to its last
TUTORIALS = sorted((ROOT / "tutorials").glob("*.ipynb"))


@pytest.fixture(scope="module")
def kernel():
    """One for all tutorials, so that NeMo is loaded once; of this very interpreter, whatever kernels there are."""
    pytest.importorskip("ipykernel")
    manager = pytest.importorskip("jupyter_client.manager").KernelManager(kernel_name="python3")
    manager.kernel_spec.argv = [sys.executable, "-m", "ipykernel_launcher", "-f", "{connection_file}"]
    manager.start_kernel(cwd=str(ROOT / "tutorials"))
    yield manager
    manager.shutdown_kernel(now=True)


@pytest.mark.slow
@pytest.mark.nemo
@pytest.mark.parametrize("path", TUTORIALS, ids=lambda path: path.stem)
def test_tutorial_runs(path, request):
    pytest.importorskip("nemo.collections.asr")
    nbformat, nbclient = pytest.importorskip("nbformat"), pytest.importorskip("nbclient")
    notebook = nbformat.read(path, as_version=4)
    for cell in notebook.cells:
        if cell.source.startswith(DOWNLOADS):
            compile(cell.source, path.name, "exec")
            cell.source = ""
    notebook.cells.insert(0, nbformat.v4.new_code_cell("%reset -f"))  # nothing of the one before
    nbclient.NotebookClient(notebook, km=request.getfixturevalue("kernel"), timeout=600).execute()
    outputs = [output for cell in notebook.cells for output in cell.get("outputs", [])]
    assert any("image/png" in output.get("data", {}) for output in outputs)
