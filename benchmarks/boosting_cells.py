"""Phrase boosting with weights from dev, reported on test: heads with and without LMs on up to three sets of speech.

For every cell, a set and a head, dev chooses the LM weight without phrases, and then the boosting weight of each way
of paying phrases, as `tune` ranks them. Test shows each way with its weight: with the list of the set, with a list of
its distractors only, and with a list of many distractors. The encoder runs once per set and head.

Real speech is not part of the repository. `python -m benchmarks.boosting_cells --help` lists the options.
"""

from __future__ import annotations

import random
import sys
import time
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from datetime import datetime, timezone
from functools import cache, cached_property
from importlib.util import module_from_spec, spec_from_file_location
from itertools import islice
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any, NamedTuple

from omegaconf import OmegaConf

from benchmarks.clock import describe_machine, find_hardware, torch_threads
from benchmarks.report import result_path, write_result
from nemo_gpu_decoding.cli.decoding import decoding_config, load_phrase_file, section_of
from nemo_gpu_decoding.cli.dev_set import DevSet, encode
from nemo_gpu_decoding.cli.grid import Point, Searches, at_point
from nemo_gpu_decoding.cli.main import guarded, run_program
from nemo_gpu_decoding.cli.tune import FALSE_PHRASE_COST
from nemo_gpu_decoding.manifest import read_manifest
from nemo_gpu_decoding.metrics import PhraseWords
from nemo_gpu_decoding.plain_text import format_table

if TYPE_CHECKING:
    from nemo_gpu_decoding.nemo_plugin.model import Head
    from nemo_gpu_decoding.search.result import NBest

PROGRAM = "python -m benchmarks.boosting_cells"
SUMMARY = "phrase boosting with weights from dev, reported on test"
EXAMPLES = ("", "folder=REAL_SPEECH threads=2 out=docs/results")
SHIPPED = Path(__file__).resolve().parents[1] / "assets" / "self"
RARE = 6  # occurrences in a text
SHORTEST = 5  # letters of a rare word
DIGITS = ("zero", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine")


class Speech(NamedTuple):
    """Files of a set, relative to its folder."""

    dev: str
    test: str
    phrases: str  # listed for test, and for dev unless `rare` is true
    models: tuple[str, str]  # hybrid CTC and RNN-T, hybrid CTC and TDT
    token_lm: str
    word_lm: str | None
    distractors: str  # source of further distractors: names, words, digits
    text: str = ""  # of the LMs
    # the list holds rare words of the test set: for dev, rare words of dev take their place
    rare: bool = False


REAL = ("models/tiny_hybrid_rnnt.nemo", "models/tiny_hybrid_tdt.nemo")
SETS = {
    "shipped": Speech(
        "speech/dev.json", "speech/test.json", "phrases.txt",
        ("models/self_hybrid_rnnt.nemo", "models/self_hybrid_tdt.nemo"), "lm/tok3.arpa", "lm/word3.arpa", "names",
    ),
    "lj": Speech(
        "speech/dev_lj.json", "speech/test_lj.json", "boost/test_lj_with_distractors.txt", REAL,
        "lm/tok6.arpa", "lm/word3.arpa", "words", "lm/lm_train.txt", rare=True,
    ),
    "digits": Speech(
        "speech/dev_dig.json", "speech/test_dig.json", "boost/test_dig_with_distractors.txt", REAL,
        "lm/digits_codes_tok6.arpa", None, "digits",
    ),
}  # fmt: skip


class Kind(NamedTuple):
    """A head with or without an LM, and the weights to try."""

    strategy: str
    model: int  # index in `Speech.models`
    lm: str | None  # field of `Speech`
    lm_weights: tuple[float, ...]
    weights: tuple[float, ...]  # of boosting
    default: float  # weight with which thresholds are compared


TOKENS, WORDS = (0.5, 1.0, 1.5), (5.0, 10.0, 15.0)
HEADS = {
    "CTC": Kind("flexctc_beam", 0, None, (), TOKENS, 1.0),
    "CTC + LM": Kind("flexctc_beam", 0, "token_lm", (0.4, 0.6, 0.8), TOKENS, 1.0),
    "word graphs": Kind("cuda_wfst", 0, "word_lm", (0.5, 0.75, 1.0), WORDS, 15.0),
    "RNN-T": Kind("alsd_pp", 0, None, (), TOKENS, 1.0),
    "RNN-T + LM": Kind("alsd_pp", 0, "token_lm", (0.2, 0.4, 0.6), TOKENS, 0.5),
    "TDT": Kind("alsd_pp", 1, None, (), TOKENS, 1.0),
    "TDT + LM": Kind("alsd_pp", 1, "token_lm", (0.2, 0.4, 0.6), TOKENS, 0.5),
}


@dataclass
class CellOptions:
    """Options of the cells."""

    # Folder of LJ Speech and digits, with the files of `SETS` in benchmarks/boosting_cells.py. null: the shipped set
    # alone.
    folder: str | None = None
    # Sets: shipped, lj, digits. []: all that there are.
    sets: list[str] = field(default_factory=list)
    # Heads, such as "[CTC,TDT + LM]". []: all.
    heads: list[str] = field(default_factory=list)
    # Hypotheses per frame of the token searches.
    beam_size: int = 8
    # Least probabilities of a phrase to try.
    thresholds: list[float] = field(default_factory=lambda: [0.0001, 0.0003, 0.001, 0.01])
    # Distractors of the long list.
    distractors: int = 1000
    # Seed of invented names and digit strings.
    seed: int = 0
    # CPU threads of the searches.
    threads: int = 1
    # Output file, or a folder: the record as JSON.
    out: str | None = None

    def __post_init__(self) -> None:
        for name, known in (("sets", SETS), ("heads", HEADS)):
            unknown = [value for value in getattr(self, name) if value not in known]
            if unknown:
                raise ValueError(f"{name} holds {', '.join(unknown)}, expected any of {', '.join(known)}")
        if self.folder is None and set(self.sets) - {"shipped"}:
            raise ValueError(f"sets holds {', '.join(self.sets)}, which needs folder=FOLDER")


OPTIONS = CellOptions
Lists = dict[str, list[str]]  # name of a list -> phrases
Found = dict[str, Any]  # counts of one decoding


class Way(NamedTuple):
    """A way of paying phrases, with its weight."""

    name: str
    weight: float | None  # None: no phrases
    ac_threshold: float = 0.0


NOTHING = Way("none", None)
UNWEIGHTED = "unweighted"  # a way in which the default weight of a list is multiplied by `Way.weight`
FACTORS = (0.0, 0.25, 0.5, 0.7, 1.0, 1.4, 2.0)


class Cell:
    """One head on one set: decodes dev and test with any list of phrases."""

    def __init__(self, name: str, kind: Kind, head: Head, speech: Mapping[str, DevSet], files: Files) -> None:
        self.name, self.kind, self._head, self._speech, self.files = name, kind, head, speech, files
        self._searches: dict[tuple[str, bool, bool], Searches] = {}
        self._found: dict[tuple[Way, str, float | None], Found] = {}
        self.lm_weight: float | None = None

    def decode(self, way: Way, phrases: str) -> Found:
        """Counts of a decoding of dev or test, which the name of the list begins with."""
        key = way._replace(name=way.name if way.name in ("nemo", UNWEIGHTED) else ""), phrases, self.lm_weight
        if key not in self._found:
            self._found[key] = self._decode(way, phrases)
        return self._found[key]

    def _decode(self, way: Way, phrases: str) -> Found:
        speech, decoder = self._speech[phrases.partition("-")[0]], self._decoder(way, phrases)
        started = time.perf_counter()
        texts = speech.decode(decoder, self._head.text_of)
        seconds = time.perf_counter() - started
        score = speech.score(texts, self.files.lists[phrases])
        assert score.phrases is not None
        found = score.phrases
        return {
            "errors": score.errors.total, "words": score.errors.words, "wer": 100 * score.errors.wer,
            "found": found.true_positives, "missed": found.false_negatives, "false": found.false_positives,
            "fscore": found.fscore, "utterances": len(texts), "seconds": seconds,
        }  # fmt: skip

    def results(self, way: Way, phrases: str) -> Iterator[tuple[str, str, NBest[Any]]]:
        """Reference, text and result of each utterance."""
        speech, decoder = self._speech[phrases.partition("-")[0]], self._decoder(way, phrases)
        found = [nbest for batch in speech.batches for nbest in decoder.decode(batch.inputs, batch.lengths)]
        for reference, nbest in zip(speech.references, found, strict=True):
            yield reference, nbest.texts(self._head.text_of)[0], nbest

    def _decoder(self, way: Way, phrases: str) -> Any:
        in_graph = section_of(self.kind.strategy) == "wfst"
        is_nemo, is_unweighted = way.name == "nemo" and not in_graph, way.name == UNWEIGHTED
        point = Point(
            beam_size=None if in_graph else self.files.options.beam_size,
            lm_weight=self.lm_weight,
            boosting_weight=way.weight,
            ac_threshold=way.ac_threshold or None,
        )
        search = self._searches_of(phrases, is_nemo, is_unweighted).at(point)
        if is_unweighted:
            point = point._replace(boosting_weight=(way.weight or 0.0) * search.fusion.boosting_weight)
        return at_point(search, point)

    def _searches_of(self, phrases: str, is_nemo: bool, is_unweighted: bool) -> Searches:
        key = phrases, is_nemo, is_unweighted
        if key not in self._searches:
            lm = {"lm": self.files.path(getattr(self.files.speech, self.kind.lm))} if self.kind.lm else {}
            models: dict[str, Any] = {**lm, "phrases": self.files.written(phrases)}
            models |= {"lm_weight": 1.0} if lm else {}
            models |= {} if is_unweighted else {"boosting_weight": 1.0}
            preset = self.files.preset_of(self.kind.strategy, models) if is_nemo else None
            self._searches[key] = Searches(self._head, self.kind.strategy, preset, models)
        return self._searches[key]


class Files:
    """The files and lists of phrases of one set."""

    def __init__(self, name: str, options: CellOptions, temporary: str) -> None:
        self.name, self.speech, self.options = name, SETS[name], options
        assert options.folder is not None or name == "shipped"
        self._folder = SHIPPED if name == "shipped" else Path(str(options.folder))
        self._temporary = Path(temporary)

    def preset_of(self, strategy: str, models: Mapping[str, Any]) -> str:
        """A preset with the refunds of NeMo."""
        config, file = decoding_config(strategy, None, models), self._temporary / f"nemo-{strategy}.yaml"
        config.beam.boosting_tree.update(refund="nemo", overlapping=True)
        OmegaConf.save(config, file)
        return str(file)

    def path(self, file: str) -> str:
        """An absolute path; a ValueError if there is no such file."""
        path = self._folder / file
        if not path.is_file():
            raise ValueError(f"folder is {self._folder}, expected a folder with {file}")
        return str(path.resolve())

    def written(self, phrases: str) -> str:
        """The file of a list."""
        file = self._temporary / f"{self.name}-{phrases}.txt"
        if not file.exists():
            file.write_text("\n".join(self.lists[phrases]) + "\n", encoding="utf-8")
        return str(file)

    @cached_property
    def lists(self) -> Lists:
        """dev, test: the lists of the two parts; *-wrong: their distractors; test-many: many distractors."""
        listed = load_phrase_file(self.path(self.speech.phrases))
        texts = {part: self._references(part) for part in ("dev", "test")}
        lists = {"dev": listed, "test": listed}
        if self.speech.rare:
            rare = [word for word in self._rare_words() if spoken([word], texts["dev"])]
            lists["dev"] = sorted({*rare, *unspoken(listed, texts["test"])})
        for part in ("dev", "test"):
            lists[f"{part}-wrong"] = unspoken(lists[part], texts[part])
        known = {*listed, *spoken(listed, texts["test"])}
        more = (phrase for phrase in self._distractors() if phrase not in known)
        distractors = unspoken(list(islice(more, 2 * self.options.distractors)), texts["test"])
        lists["test-many"] = [*spoken(listed, texts["test"]), *distractors[: self.options.distractors]]
        return lists

    def _references(self, part: str) -> list[str]:
        return [str(own.text) for own in read_manifest(Path(self.path(getattr(self.speech, part))))]

    def _rare_words(self) -> list[str]:
        """Words of dev, test and the LM's text that this text has at most `RARE` times; the same order every time."""
        counts = Counter(Path(self.path(self.speech.text)).read_text(encoding="utf-8").split())
        spoken = {word for part in ("dev", "test") for text in self._references(part) for word in text.split()}
        return sorted(w for w in {*counts, *spoken} if counts[w] <= RARE and len(w) >= SHORTEST)

    def _distractors(self) -> Iterator[str]:
        rng = random.Random(self.options.seed)
        if self.speech.distractors == "words":
            words = self._rare_words()
            yield from rng.sample(words, len(words))
        coin = None if self.speech.distractors == "digits" else _coin()
        seen: set[str] = set()
        while True:
            name = " ".join(rng.choices(DIGITS, k=rng.randint(4, 6))) if coin is None else coin(rng)
            if name not in seen:
                seen.add(name)
                yield name


def _coin() -> Any:
    """The function that invents a name, of the recipe of the shipped set."""
    spec = spec_from_file_location("recipe_text", SHIPPED / "recipe" / "text.py")
    assert spec is not None
    assert spec.loader is not None
    recipe = module_from_spec(spec)
    spec.loader.exec_module(recipe)
    return recipe.coin


def spoken(phrases: Sequence[str], texts: Sequence[str]) -> list[str]:
    said = {words for text in texts for _, words in PhraseWords.of(phrases).found_in(text.split())}
    return [phrase for phrase in phrases if tuple(phrase.casefold().split()) in said]


def unspoken(phrases: Sequence[str], texts: Sequence[str]) -> list[str]:
    said = set(spoken(phrases, texts))
    return [phrase for phrase in phrases if phrase not in said]


# ------------------------------------------------------------------------------------- one cell


def cost(found: Found) -> tuple[float, float]:
    """The objective of `tune`, less is better."""
    return found["errors"] + FALSE_PHRASE_COST * found["false"], -found["fscore"]


def choose_lm_weight(cell: Cell) -> None:
    """Set the LM weight that is best on dev without phrases."""
    found = {}
    for weight in cell.kind.lm_weights:
        cell.lm_weight = weight
        found[weight] = cell.decode(NOTHING, "dev")
    cell.lm_weight = min(found, key=lambda weight: cost(found[weight]), default=None)


def measure(cell: Cell, thresholds: Sequence[float]) -> dict[str, Any]:
    """The row of a cell: settings from dev, and counts on test."""
    nothing, kind = NOTHING, cell.kind
    choose_lm_weight(cell)
    ways = {
        "none": [nothing],
        "nemo": [] if kind.strategy == "cuda_wfst" else [Way("nemo", weight) for weight in kind.weights],
        "default": [Way("default", weight) for weight in kind.weights],
        "threshold": [Way("threshold", weight, least) for least in thresholds for weight in kind.weights],
    }
    ways["tuned"] = [*ways["default"], *ways["nemo"], *ways["threshold"]]
    results = {}
    for name, tried in ways.items():
        if tried:
            way = min(tried, key=lambda way: cost(cell.decode(way, "dev")))
            lists = ("dev", "test") if way is nothing else ("dev", "test", "test-wrong", "test-many")
            results[name] = {"way": way._asdict(), **{phrases: cell.decode(way, phrases) for phrases in lists}}
    gate = [
        {"ac_threshold": least, **{phrases: cell.decode(Way("threshold", kind.default, least), phrases)
                                   for phrases in ("dev", "dev-wrong", "test", "test-wrong")}}
        for least in (0.0, *thresholds)
    ]  # fmt: skip
    curve = [
        {"factor": factor, **{phrases: cell.decode(Way(UNWEIGHTED, factor), phrases)
                              for phrases in ("test", "test-wrong", "test-many")}}
        for factor in FACTORS
    ]  # fmt: skip
    return {
        "head": cell.name, "strategy": kind.strategy, "lm_weight": cell.lm_weight, "results": results,
        "default_weight": kind.default, "gate": gate, "curve": curve,
    }  # fmt: skip


# ------------------------------------------------------------------------------------- all cells


def cells(options: CellOptions, temporary: str) -> Iterator[tuple[str, Cell]]:
    """The cells of the options; the encoder runs when the first cell of a set and head is drawn."""
    from nemo_gpu_decoding.nemo_plugin.model import Model
    from nemo_gpu_decoding.nemo_plugin.register import STRATEGIES

    load: Any = cache(lambda file: Model.load(file, device="cpu"))
    for name in options.sets or (SETS if options.folder else ["shipped"]):
        files = Files(name, options, temporary)
        encoded: dict[tuple[str, str], dict[str, DevSet]] = {}
        for title in options.heads or HEADS:
            kind = HEADS[title]
            if kind.lm and getattr(files.speech, kind.lm) is None:
                continue
            file, family = files.path(files.speech.models[kind.model]), STRATEGIES[kind.strategy].family
            head = load(file).head(family)
            if (file, family) not in encoded:
                encoded[file, family] = {
                    part: encode(head, read_manifest(Path(files.path(getattr(files.speech, part)))))
                    for part in ("dev", "test")
                }
            yield name, Cell(title, kind, head, encoded[file, family], files)


def run(options: CellOptions) -> int:
    """Measure all cells; print a table, write the record."""
    hardware = find_hardware("cpu", options.threads)
    header = {
        "strategy": "boosting", "mode": "batch", "device": hardware.name, **describe_machine(),
        "threads": options.threads, "date": datetime.now(timezone.utc).isoformat(timespec="seconds"),
        "options": {**asdict(options), "folder": None, "out": None, "device": "cpu"},
    }  # fmt: skip
    out = result_path(options.out, header) if options.out else None
    rows: list[dict[str, Any]] = []
    with TemporaryDirectory() as temporary, torch_threads(options.threads):
        for name, cell in cells(options, temporary):
            sizes = {which: len(phrases) for which, phrases in cell.files.lists.items()}
            rows.append({"task": name, "phrases": sizes, **measure(cell, options.thresholds)})
            print(f"{name}, {cell.name}", file=sys.stderr, flush=True)
            if out:
                write_result(out, header, rows)
    print(format_table(["set", "head", "way", "weight", "ac_threshold", "WER %", "F", "wrong only", "many: F"],
                       [line for row in rows for line in lines_of(row)]))  # fmt: skip
    return 0


def lines_of(row: Mapping[str, Any]) -> list[list[object]]:
    """The lines of a cell in the table."""
    lines: list[list[object]] = []
    for name, found in row["results"].items():
        way = found["way"]
        more = ["", ""]
        if "test-wrong" in found:
            more = [found["test-wrong"]["false"], f"{found['test-many']['fscore']:.2f}"]
        lines.append([row["task"], row["head"], name, way["weight"] or "", way["ac_threshold"] or "",
                      f"{found['test']['wer']:.1f}", f"{found['test']['fscore']:.2f}", *more])  # fmt: skip
    return lines


def main() -> int:
    """The exit code of the program."""
    return guarded(PROGRAM, lambda: run_program(PROGRAM, SUMMARY, sys.modules[__name__], sys.argv[1:]), __name__)


if __name__ == "__main__":
    sys.exit(main())
