"""Goldens: whether two trees of this repository give the same results on this machine, to the bit.

    make goldens BASE=COMMIT                       compare this tree with a commit
    python scripts/goldens.py record OUT           record this tree; --tree=TREE: another one
    python scripts/goldens.py messages OUT         record error messages of the tests; pytest takes further arguments
    python scripts/goldens.py compare A B          list the differences of two recordings; exit status 1: there are any
    python scripts/goldens.py time TREE_A TREE_B   CPU seconds of B / A; exit status 1: more than 1.02 in a row

`goldens.yaml` lists the cases. Both trees read the same inputs, which this tree makes once. A recording uses public
names, NeMo's configs and the command line only. A case that a tree cannot run is recorded as an error.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import hashlib
import importlib
import inspect
import io
import json
import os
import re
import shlex
import shutil
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import cached_property, partial
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
ASSETS = ROOT / "assets" / "self"
EXPECTED = ROOT / "scripts" / "goldens_expected.txt"
CHUNK = 7  # frames
BEAM = 12.0  # of word graphs
ROUNDS, MOST_RATIO, LEAST_SECONDS = 9, 1.02, 0.3  # of `time`
TIMED = {"flexctc_beam": ("peaked", "hard"), "cuda_wfst": ("peaked", "hard"), "paged_biglm": ("peaked", "hard")}
TIMED |= dict.fromkeys(("alsd_pp", "aes_pp"), ("peaked-rnnt", "peaked-tdt", "hard-rnnt", "hard-tdt"))
MESSAGES = "GOLDENS_MESSAGES"  # environment variable: the file that the pytest plugin writes
# fields that are no values (`lattice_case` reads the first), and fields that were removed
OBJECTS = {"lattice", "aliases", "find_alternatives", "risk"}
Cases = Iterator[tuple[str, Callable[[], Any]]]  # names, and functions that give results


# ------------------------------------------------------------------------------------------------ inputs
def make_inputs(folder: Path) -> None:
    """Write the inputs of decoders as plain files: the tasks of the benchmarks, and shipped speech."""
    import torch

    from benchmarks.options import BenchOptions
    from benchmarks.ours import SMALL, word_lm
    from benchmarks.sources import make_tasks
    from nemo_gpu_decoding import prune_ngram_lm, read_arpa, write_arpa

    folder.mkdir(parents=True, exist_ok=True)
    for task in make_tasks(BenchOptions("paged_biglm")):
        for which, file in (("word", task.word_lm), ("small", word_lm(task, SMALL))):
            shutil.copy(str(file), folder / f"{task.name}.{which}.arpa")
    speech: dict[str, Any] = {"model": f"{ASSETS}/models/self_ctc.nemo", "manifest": f"{ASSETS}/speech/test.json"}
    speech |= {
        "lm": f"{ASSETS}/lm/tok3.arpa",
        "word_lm": f"{ASSETS}/lm/word3.arpa",
        "weights": {"acoustic_scale": 1.0},
    }
    for options in ({"strategy": "flexctc_beam"}, {"strategy": "alsd_pp"}, speech):
        for task in make_tasks(BenchOptions(utterances=6, **options)):
            networks = vars(task.transducer.ours()) if task.transducer else {}
            content = {key: getattr(task, key) for key in ("inputs", "lengths", "texts", "lexicon")}
            content |= {"pieces": task.vocabulary.pieces, "phrases": task.phrases(40), "weights": vars(task.weights)}
            content |= {"durations": task.transducer.durations if task.transducer else ()}
            content |= {"modules": {key: part for key, part in networks.items() if isinstance(part, torch.nn.Module)}}
            name = "self" if options is speech else task.name
            torch.save(content, folder / f"{name}.pt")
            lm = read_arpa(shutil.copy(str(task.lm), folder / f"{name}.lm.arpa"))
            counts = [len(order.symbols) for order in lm.orders]
            write_arpa(prune_ngram_lm(lm, size=counts[0] + sum(counts) // 5), folder / f"{name}.source_lm.arpa")
    for which, file in (("word", "word3"), ("small", "word_small")):
        shutil.copy(ASSETS / "lm" / f"{file}.arpa", folder / f"self.{which}.arpa")
    (folder / "complete").touch()


class Task:
    """Inputs of decoders, and parts of their fusion: six utterances."""

    inputs: Any  # [B, T, ...] log-probs or encoder output
    lengths: Any  # [B] frames
    texts: list[str]
    lexicon: Mapping[str, tuple[int, ...]]
    pieces: Sequence[str]
    phrases: list[str]
    weights: Mapping[str, Any]
    durations: Sequence[int]
    modules: Mapping[str, Any]  # of a transducer, by the names of `LSTMNetworks`' arguments

    def __init__(self, folder: Path, name: str) -> None:
        import torch

        self.name, self.folder = name, folder
        vars(self).update(torch.load(folder / f"{name}.pt", weights_only=False))
        self.vocabulary = api().Vocabulary(tuple(self.pieces), "bpe", self._spelled)

    def _spelled(self, text: str) -> list[int]:
        return [token for word in text.split() for token in self.lexicon[word]]

    def arpa(self, which: str) -> Path:
        return self.folder / f"{self.name}.{which}.arpa"

    @cached_property
    def graphs(self) -> dict[str, Any]:
        """The graphs of the word LM and of the small LM."""
        return {which: api().build_graph(self.arpa(which), self.vocabulary) for which in ("word", "small")}

    @cached_property
    def packed(self) -> list[Any]:
        """The large and the small LM of paged_biglm."""
        return [api().pack_arpa_in_memory(self.arpa(which)) for which in ("word", "small")]

    def part(self, name: str, graph: Any) -> dict[str, Any]:
        """Fields of `Fusion`; "requests": the requests of the utterances."""
        package, vocabulary, size = api(), self.vocabulary, len(self.pieces)
        sentences = [*self.texts[:3], *(" ".join(text.split()[:3]) for text in self.texts), *self.phrases[:5]]

        def lm(which: str) -> Any:
            return package.load_ngram_lm(self.arpa(which), size, encoding="nemo")

        def tree(**options: Any) -> dict[str, Any]:
            first, second, *others = self.phrases
            items = [package.Phrase(first, weight=2.0, aliases=(second,)), *others]
            boosting = package.build_boosting_tree(items, vocabulary, package.BoostingConfig(**options))
            return {"boosting": boosting, "boosting_weight": 0.8}

        def words(count: int, bonus: float) -> dict[str, Any]:
            listed = [*self.phrases, *(word for text in self.texts for word in text.split())]
            phrases = dict.fromkeys(listed[-count:], bonus)
            known = {text: bonus for text, bonus in phrases.items() if graph.word_ids.keys() >= set(text.split())}
            return {"boosting": package.build_word_boosting(known, graph)}

        def requests(*fields: dict[str, Any]) -> dict[str, Any]:
            rows = [package.Request(**given) if given else None for given in fields]
            return {"requests": (rows * len(self.texts))[: len(self.texts)]}

        makers: dict[str, Callable[[], dict[str, Any]]] = {
            "lm": lambda: {"lm": lm("lm"), "lm_weight": self.weights["lm_weight"]},
            "source_lm": lambda: {"source_lm": lm("source_lm"), "source_lm_weight": 0.2},
            "lm_pool": lambda: {"lm_pool": {"other": lm("source_lm")}, "lm_pool_weights": {"other": 0.5}},
            "phrases": tree,
            "nemo_phrases": lambda: tree(refund="nemo"),
            "gated_phrases": lambda: tree(ac_threshold=0.01),
            "allowed": lambda: {"allowed": package.allowed_tokens(vocabulary, texts=self.texts[::2])},
            "priced": lambda: {"allowed": package.allowed_tokens(vocabulary, texts=self.texts[::2], price=2.0)},
            "grammar": lambda: {"grammar": package.build_grammar(sentences, vocabulary)},
            "priced_grammar": lambda: {"grammar": package.build_grammar(sentences, vocabulary, price=3.0)},
            "requests": lambda: requests(
                {}, {**tree(context_score=2.0), "lm_weight": 0.3}, {"lm": "other"}, {"lm": "none"},
                self.part("allowed", None), self.part("grammar", None),
            ),
            "word_phrases": lambda: words(40, 4.0),
            "word_requests": lambda: requests({}, {**words(20, 6.0), "lm_weight": 0.8}, {"boosting_weight": 0.0}),
            "word_lm_pool": lambda: {"lm_pool": {"other": self.packed[1]}},
            "pool_requests": lambda: requests({}, {"lm": "other"}, {"lm": "none"}),
        }  # fmt: skip
        return makers[name]()


def api() -> Any:
    """The package of the tree; its public names."""
    import nemo_gpu_decoding

    return nemo_gpu_decoding


# ------------------------------------------------------------------------------------------------- cases
def make_decoder(strategy: str, task: Task, options: Mapping[str, Any], parts: str) -> tuple[Any, Any]:
    """A decoder with one thread on the CPU, and the requests of the utterances or None."""
    package, size = api(), len(task.pieces)
    in_graph, options = strategy in ("cuda_wfst", "paged_biglm"), {"threads": 1, "backend": "cpu", **options}
    graph = task.graphs["word" if strategy == "cuda_wfst" else "small"] if in_graph else None
    fields = {key: value for part in parts.split() for key, value in task.part(part, graph).items()}
    requests, fusion = fields.pop("requests", None), package.Fusion(**fields)
    if in_graph:
        options = {"acoustic_scale": task.weights["acoustic_scale"], "beam": BEAM, **options}
    elif "lm" in fields:
        options["beam_beta"] = task.weights["beam_beta"]
    if strategy == "flexctc_beam":
        return package.FlexCTCBeam(size, size, package.FlexCTCConfig(**options), fusion), requests
    if strategy == "cuda_wfst":
        return package.CudaWFST(graph, size, size, package.WFSTConfig(**options), fusion), requests
    if strategy == "paged_biglm":
        config = package.PagedBigLMConfig(**options)
        return package.PagedBigLM(graph, size, size, *task.packed, config, fusion), requests
    networks = package.LSTMNetworks(**task.modules, durations=task.durations)
    if strategy == "alsd_pp":
        return package.ALSDPlusPlus(networks, package.ALSDConfig(**options), fusion), requests
    return package.AESPlusPlus(networks, package.AESConfig(**{"pruning_mode": "late", **options}), fusion), requests


def search_case(strategy: str, task: Task, options: Mapping[str, Any], parts: str) -> dict[str, Any]:
    """Results of a batch, digests of its streams in chunks, and what lattices and second passes give."""
    decoder, requests = make_decoder(strategy, task, options, parts)
    results = decoder.decode(task.inputs, task.lengths, requests)
    streams, chunks = decoder.open(len(task.lengths), requests), []
    for begin in range(0, task.inputs.shape[1], CHUNK):
        decoder.push(streams, task.inputs[:, begin : begin + CHUNK], (task.lengths - begin).clamp(0, CHUNK))
        chunks.append(digest(decoder.partial(streams)))
    case = {"results": results, "partials": chunks, "finals": digest(decoder.close(streams))}
    if options.get("lattice"):
        case["lattices"] = [lattice_case(decoder, nbest.lattice, task) for nbest in results]
    elif options.get("n_best") == 4:
        arguments = (
            lambda texts: [-1.5 * len(text) for text in texts],
            lambda path: task.vocabulary.text(path.tokens),
        )
        case["rescored"] = [
            [path.score for path in nbest] for nbest in api().rescored(results, *arguments, weight=0.1)
        ]
    return case


def lattice_case(decoder: Any, lattice: Any, task: Task) -> dict[str, Any]:
    rescored = lattice.pruned(4.0).rescored(task.packed[0], 0.8)
    return {
        "sizes": (lattice.num_nodes, lattice.num_links), "kaldi": digest(lattice.to_kaldi_text().encode()),
        "n_best": decoder.n_best(lattice, 3), "rescored": decoder.n_best(rescored, 3),
        "determinized": lattice.determinized().n_best(3),
    }  # fmt: skip


def drop_in_case(task: Task) -> list[Any]:
    """Texts and beams of the interface of pyctcdecode."""
    from nemo_gpu_decoding.compat.pyctcdecode import build_ctcdecoder

    decoder, case = build_ctcdecoder([*task.pieces, ""], str(task.arpa("word"))), []
    for row, length in zip(task.inputs.numpy(), task.lengths.tolist(), strict=True):
        for hotwords in (None, task.phrases):
            case.append(decoder.decode(row[:length], beam_width=16, hotwords=hotwords))
            case.append([tuple(beam) for beam in decoder.decode_beams(row[:length], beam_width=16, hotwords=hotwords)])
    return case


def nemo_case(model: Any, config: Mapping[str, Any], names: Sequence[str]) -> dict[str, Any]:
    """Fields of the hypotheses of `transcribe` for four shipped recordings, without and with timestamps."""
    confidence = dict.fromkeys([f"preserve_{of}_confidence" for of in ("frame", "token", "word")], True)
    model.change_decoding_strategy({**config, "confidence_cfg": confidence}, verbose=False)
    files, case = [str(path) for path in sorted((ASSETS / "speech" / "test").glob("*.flac"))[:4]], {}
    for timed in (False, True):
        found = model.transcribe(files, batch_size=2, return_hypotheses=True, timestamps=timed, verbose=False)
        rows = [row if isinstance(row, list) else [row] for row in found]
        case[f"timestamps={timed}"] = [
            [{name: getattr(one, name) for name in names if hasattr(one, name)} for one in row] for row in rows
        ]
    return case


def run_command(tree: Path, arguments: str) -> str:
    """Run a command, or a program "-m MODULE", in this process; returns its stdout. A RuntimeError has its stderr."""
    script = re.search(r'nemo-gpu-decoding = "([\w.]+):main"', (tree / "pyproject.toml").read_text())
    assert script is not None
    program, *given = shlex.split(arguments)
    module, given = (f"{given[0]}.__main__", given[1:]) if program == "-m" else (script[1], [program, *given])
    with contextlib.redirect_stdout(io.StringIO()) as out, contextlib.redirect_stderr(io.StringIO()) as errors:
        status = importlib.import_module(module).main(given)
    if status:
        raise RuntimeError(f"exit status {status}: {errors.getvalue()[-500:]}")
    return out.getvalue()


def help_cases(tree: Path) -> Cases:
    """The help of all commands, by option."""

    def by_option(name: str) -> dict[str, str]:
        usage, *options = re.split(r"^  (?=[\w.]+=)", run_command(tree, f"{name} --help all"), flags=re.M)
        return {"usage": usage, **{option.partition("=")[0]: option for option in options}}

    commands = dict(re.findall(r"^  ([\w-]+) +(.*)", run_command(tree, "--help"), flags=re.M))
    yield "help", lambda: commands
    yield from ((f"help of {name}", partial(by_option, name)) for name in commands)


def command_case(tree: Path, folder: Path, arguments: str) -> dict[str, Any]:
    """What a command prints, without lines of seconds and memory, and the files that it writes into a folder."""
    before = {path for path in folder.rglob("*") if path.is_file()}
    lines = plain(run_command(tree, arguments), tree, folder).splitlines()
    case: dict[str, Any] = {"stdout": [line for line in lines if not re.search(r"\d\.\d|---|slowest|memory", line)]}
    for path in sorted({path for path in folder.rglob("*") if path.is_file()} - before):
        if path.suffix in (".done", ".graph") or path.name in ("run.json", "plan.json"):
            continue  # they hold seconds of work; a later command reads the graph
        content: Any = digest(path.read_bytes())
        if path.suffix in (".json", ".jsonl"):
            rows = [json.loads(line) for line in plain(path.read_text(), tree, folder).splitlines()]
            content = [{key: value for key, value in row.items() if key != "seconds"} for row in rows]
        elif path.suffix in (".srt", ".vtt", ".tsv", ".txt", ".yaml", ".html"):
            text = re.sub(r'"(seconds|rtfx)":[\d.]+', "", plain(path.read_text(), tree, folder))
            content = text.splitlines() if path.suffix != ".html" else digest(text.encode())
        case[str(path.relative_to(folder))] = content
    return case


def write_audio(folder: Path, manifests: Mapping[str, list[dict[str, Any]]]) -> None:
    """The inputs of commands: manifests, a folder of recordings, and 20 recordings joined to a long one."""
    import numpy as np
    import soundfile

    speech = ASSETS / "speech"
    for name, added in manifests.items():
        lines = (speech / f"{'dev' if name == 'dev' else 'test'}.json").read_text().splitlines()
        rows = [json.loads(line) | more for line, more in zip(lines, added, strict=False)]
        rows = [row | {"audio_filepath": str(speech / row["audio_filepath"])} for row in rows]
        (folder / f"{name}.json").write_text("".join(json.dumps(row) + "\n" for row in rows))
    recordings = sorted((speech / "test").glob("*.flac"))[:20]
    (folder / "audio").mkdir()
    for path in recordings[:4]:
        shutil.copy(path, folder / "audio")
    sounds = [soundfile.read(path, dtype="float32") for path in recordings]
    soundfile.write(folder / "long.wav", np.concatenate([samples for samples, _ in sounds]), sounds[0][1])


def all_cases(tree: Path, inputs: Path, out: Path) -> Cases:
    """All cases of `goldens.yaml`."""
    import yaml

    text = (Path(__file__).with_suffix(".yaml")).read_text()
    for name, path in (("{assets}", ASSETS), ("{lm}", ASSETS / "lm"), ("{models}", ASSETS / "models")):
        text = text.replace(name, str(path))
    table = yaml.safe_load(text)
    yield "inputs", lambda: {path.name: digest(path.read_bytes()) for path in sorted(inputs.iterdir())}
    yield from help_cases(tree)
    for strategy, names in table["tasks"].items():
        for task in (Task(inputs, name) for name in names):
            for label, options, parts in (row for rows in table["cases"][strategy] for row in rows):
                yield f"{strategy}: {task.name}: {label}", partial(search_case, strategy, task, options, parts)
    yield from ((f"pyctcdecode: {name}", partial(drop_in_case, Task(inputs, name))) for name in ("self", "hard"))
    from nemo.collections.asr.models import ASRModel

    file, model = None, None
    for name, strategy, section, options, rows in table["nemo"]:
        if name != file:
            file, model = name, ASRModel.restore_from(str(ASSETS / "models" / f"{name}.nemo"), map_location="cpu")
        for row in rows:
            config = {"strategy": strategy, section: {**options, **row}}
            run = partial(nemo_case, model, config, table["hypothesis"].split())
            label = re.sub(r'"[^"]*/', '"', json.dumps(row))  # without folders: "/" ends the name of a case
            yield f"NeMo: {name}: {strategy}: {label}", run
    folder = out / "commands"
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir()
    write_audio(folder, table["manifests"])
    os.chdir(folder)
    for name, arguments in table["commands"].items():
        yield f"command: {name}", partial(command_case, tree, folder, arguments.format(**table["names"]))


# -------------------------------------------------------------------------------------------- recordings
def leaves(value: Any, name: str) -> Iterator[tuple[str, str]]:
    """Names and texts of all numbers, texts and arrays of a result; floats to the bit."""
    import numpy as np

    if hasattr(value, "detach"):
        value = value.detach().numpy()
    if isinstance(value, float | np.floating):
        yield name, float(value).hex()
    elif value is None or isinstance(value, str | int | np.integer | np.bool_):
        yield name, str(value)
    elif isinstance(value, np.ndarray):
        is_short = value.size <= 50 and value.ndim == 1 and not value.dtype.names
        shown = " ".join(text for one in value for _, text in leaves(one, "")) if is_short else digest(value.tobytes())
        yield name, f"{value.dtype.str} {value.shape} {shown}"
    elif dataclasses.is_dataclass(value):
        fields = [field.name for field in dataclasses.fields(value)]
        yield from leaves({field: getattr(value, field, None) for field in fields}, name)
    elif hasattr(value, "_asdict"):
        yield from leaves(value._asdict(), name)
    else:
        if not isinstance(value, Mapping):
            value = dict(enumerate(value))
            yield f"{name}/length", str(len(value))
        for key, part in value.items():
            if key not in OBJECTS:
                yield from leaves(part, f"{name}/{key}")


def digest(value: Any) -> str:
    """A short digest of bytes, or of all leaves of a result."""
    content = value if isinstance(value, bytes) else json.dumps(list(leaves(value, ""))).encode()
    return hashlib.sha256(content).hexdigest()[:16]


def plain(text: str, tree: Path, folder: Path | None = None) -> str:
    """A text without paths and addresses, which differ from run to run."""
    for path, name in ((folder, "FOLDER"), (tree, "TREE"), (ROOT, "TREE")):
        text = text.replace(str(path), name)
    text = re.sub(r"(?:/[\w.+-]+)*/pytest-of-\w+/pytest-\d+/(?:popen-gw\d+/)?[^/\s'\"]+", "FOLDER", text)
    return re.sub(r"\b0x[0-9a-f]{6,}\b|\btmp\w{8}\b", "*", text)


def record(tree: Path, inputs: Path, out: Path, only: str) -> None:
    """Write the entries of a tree to OUT/goldens.json, or replace those of `only`.

    OUT/cache keeps compiled code. Graphs are built anew.
    """
    out.mkdir(parents=True, exist_ok=True)
    os.environ["NEMO_GPU_DECODING_CACHE"] = str(out / "cache")
    shutil.rmtree(out / "cache" / "nemo_gpu_decoding" / "graphs", ignore_errors=True)
    sys.path.insert(0, str(tree))
    assert Path(str(api().__file__)).is_relative_to(tree), api().__file__
    file, entries, errors = out / "goldens.json", {}, 0
    if only != "*" and file.exists():
        old = json.loads(file.read_text())
        entries = {name: value for name, value in old.items() if not glob(only, name.partition("/")[0])}
    for name, run in all_cases(tree, inputs, out):
        if not glob(only, name):
            continue
        started = time.process_time()
        try:
            entries.update(leaves(run(), name))
        except Exception as error:
            errors += 1
            entries[f"{name}/error"] = plain(f"{type(error).__name__}: {error}", tree, out)
        print(f"{time.process_time() - started:6.1f} s  {name} {entries.get(f'{name}/error', '')}", flush=True)
    file.write_text(json.dumps(entries, indent=0, ensure_ascii=False))
    print(f"{len(entries)} entries in {file}; {errors} cases cannot run")


# ---------------------------------------------------------------------------------------- error messages
def pytest_configure(config: Any) -> None:
    """As a plugin of pytest (`-p goldens`): write the messages of errors that `pytest.raises` catches."""
    import pytest

    raises: Any = type(pytest.raises(SystemError))
    leave = raises.__exit__

    def leave_and_write(self: Any, kind: Any, error: Any, trace: Any) -> Any:
        caught = leave(self, kind, error, trace)
        if caught:
            test = os.environ.get("PYTEST_CURRENT_TEST", "").rpartition(" ")[0]
            row = json.dumps([test, plain(f"{kind.__name__}: {error}", config.rootpath)])
            with open(os.environ[MESSAGES], "a", encoding="utf-8") as file:
                file.write(f"{row}\n")
        return caught

    raises.__exit__ = leave_and_write


def catches(function: Any, depth: int = 3) -> bool:
    """Whether a test, or a function that it calls, uses `pytest.raises`."""
    codes, names = [getattr(function, "__code__", None)], set()
    for code in codes:  # grows
        names |= set(code.co_names if code else ())
        codes += [inner for inner in (code.co_consts if code else ()) if inspect.iscode(inner)]
    known = getattr(function, "__globals__", {})
    called = [known[name] for name in names if inspect.isfunction(known.get(name))]
    return "raises" in names or (depth > 0 and any(catches(other, depth - 1) for other in called))


def pytest_collection_modifyitems(items: list[Any]) -> None:
    items[:] = [item for item in items if catches(getattr(item, "function", None))]


def record_messages(tree: Path, out: Path, arguments: Sequence[str]) -> int:
    """Run the tests that expect errors, and write OUT/messages.jsonl; returns the exit status of pytest."""
    out.mkdir(parents=True, exist_ok=True)
    (out / "messages.jsonl").unlink(missing_ok=True)
    search = os.pathsep.join([str(tree), str(Path(__file__).parent)])
    environment = {**os.environ, "PYTHONPATH": search, MESSAGES: str(out / "messages.jsonl")}
    command = [sys.executable, "-m", "pytest", "-p", "goldens", "-p", "no:cacheprovider", *arguments]
    return subprocess.run(command, cwd=tree, env=environment).returncode


def read_messages(folder: Path) -> dict[str, set[str]]:
    """Message -> the tests that provoke it."""
    tests: dict[str, set[str]] = {}
    file = folder / "messages.jsonl"
    for line in file.read_text(encoding="utf-8").splitlines() if file.exists() else ():
        test, message = json.loads(line)
        tests.setdefault(message, set()).add(test)
    return tests


# -------------------------------------------------------------------------------------------- comparison
def glob(pattern: str, name: str) -> bool:
    """Whether a name matches a pattern, in which * is any text."""
    return re.fullmatch(".*".join(map(re.escape, pattern.split("*"))), name, re.S) is not None


class Expected:
    """Differences on purpose: the lines of `goldens_expected.txt`."""

    def __init__(self, file: Path) -> None:
        lines = [line.partition(" ") for line in file.read_text().splitlines()]
        self._patterns = [(kind, pattern.strip()) for kind, _, pattern in lines if kind in ("removed", "changed")]
        self._used: set[str] = set()

    def covers(self, kind: str, name: str) -> bool:
        """Whether the removal ("removed") or change ("changed") of an entry is on purpose."""
        fit = {pattern for wanted, pattern in self._patterns if wanted == kind and glob(pattern, name)}
        self._used |= fit
        return bool(fit)

    def unused(self) -> list[str]:
        return [pattern for _, pattern in self._patterns if pattern not in self._used]


def compare(a: Path, b: Path, expected: Expected, most: int) -> int:
    """Print the differences that are not expected, at most so many per case; returns 1 if there is one."""
    old, new = (json.loads((folder / "goldens.json").read_text()) for folder in (a, b))
    differences: dict[str, list[str]] = {}
    for name, value in old.items():
        kind = "changed" if name in new else "removed"
        if new.get(name) != value and not name.endswith("/error") and not expected.covers(kind, name):
            shown = f"{name}: {value} -> {new[name]}" if name in new else f"{name}: missing"
            differences.setdefault(name.partition("/")[0], []).append(shown)
    said = read_messages(b)
    for message, tests in sorted(read_messages(a).items()) if said else ():
        names = [f"message of {test}: {message}" for test in sorted(tests)]
        if message not in said and not sum(expected.covers("removed", name) for name in names):
            differences[names[0]] = ["missing"]
    for case, rows in differences.items():
        print(f"{case}: {len(rows)} differences. {new.get(f'{case}/error', '')}")
        print("".join(f"    {row}\n" for row in rows[:most]), end="")
    print("".join(f"expected, but not seen: {pattern}\n" for pattern in expected.unused()), end="")
    print(f"{sum(map(len, differences.values()))} differences in {len(differences)} cases; {len(old)} entries, "
          f"{len(new.keys() - old.keys())} new ones; messages {'' if said else 'not '}compared")  # fmt: skip
    return int(bool(differences))


# -------------------------------------------------------------------------------------------------- time
def work(tree: Path, inputs: Path, lines: Iterable[str]) -> None:
    """Time decoders on request: a line "strategy task" prepares one, a line with a number runs it so many times."""
    sys.path.insert(0, str(tree))
    answers, sys.stdout = sys.stdout, sys.stderr
    run: Callable[[], Any] = int
    for line in lines:
        strategy, _, name = line.strip().partition(" ")
        calls = 1 if name else int(strategy)
        if name:
            task = Task(inputs, name)
            decoder, _ = make_decoder(strategy, task, {}, "" if strategy in ("cuda_wfst", "paged_biglm") else "lm")
            run = partial(decoder.decode, task.inputs, task.lengths)
            run()  # compiles
        started = time.process_time()
        for _ in range(calls):
            run()
        print((time.process_time() - started) / calls, file=answers, flush=True)


def time_trees(a: Path, b: Path, inputs: Path) -> int:
    """Print the CPU milliseconds of both trees, timed in turn, and their ratio; returns 1 if a ratio is too large."""
    commands = [[sys.executable, __file__, "work", str(tree), f"--inputs={inputs}"] for tree in (a, b)]
    workers = [subprocess.Popen(one, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) for one in commands]

    def ask(worker: Any, line: object) -> float:
        print(line, file=worker.stdin, flush=True)
        return float(worker.stdout.readline())

    is_slower = False
    for strategy, names in TIMED.items():
        for name in names:
            calls = 1 + int(LEAST_SECONDS / min([ask(worker, f"{strategy} {name}") for worker in workers]))
            rounds = []
            for n in range(ROUNDS):
                pair = [ask(worker, calls) for worker in workers[:: 1 if n % 2 else -1]]
                rounds.append(pair[:: 1 if n % 2 else -1])
            ratio = statistics.median(second / first for first, second in rounds)
            is_slower |= ratio > MOST_RATIO
            medians = [1e3 * statistics.median(column) for column in zip(*rounds, strict=True)]
            print(f"{strategy:13} {name:12} {medians[0]:9.3f} {medians[1]:9.3f} ms  ratio {ratio:.3f}", flush=True)
    return int(is_slower)


def main() -> int:
    """Run a command; returns its exit status."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    folder: Any = lambda text: Path(text).absolute()  # noqa: E731
    parser.add_argument("command", choices=("inputs", "record", "messages", "compare", "time", "work"))
    parser.add_argument("folders", nargs="+", type=folder)
    parser.add_argument("--tree", type=folder, default=ROOT, help="the tree to record")
    parser.add_argument("--inputs", type=folder, default=ROOT / "build" / "goldens" / "inputs", help="made if missing")
    parser.add_argument("--only", default="*", help="record: pattern of the cases to record anew")
    parser.add_argument("--expected", type=folder, default=EXPECTED, help="compare: differences on purpose")
    parser.add_argument("--most", type=int, default=5, help="compare: differences to show per case")
    options, others = parser.parse_known_args()
    os.environ.update(OMP_NUM_THREADS="1", HF_HUB_OFFLINE="1")
    command, folders, inputs = options.command, options.folders, options.inputs
    if command in ("record", "time") and not (inputs / "complete").exists():
        environment = {**os.environ, "PYTHONPATH": str(ROOT)}
        subprocess.run([sys.executable, __file__, "inputs", inputs], env=environment, check=True)
    if command == "messages":
        return record_messages(options.tree, folders[0], others)
    if command == "compare":
        return compare(*folders, Expected(options.expected), options.most)
    if command == "time":
        return time_trees(*folders, inputs)
    if command == "record":
        record(options.tree, inputs, folders[0], options.only)
    elif command == "inputs":
        make_inputs(folders[0])
    else:
        work(folders[0], inputs, sys.stdin)
    return 0


if __name__ == "__main__":
    sys.exit(main())
