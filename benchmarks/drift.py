"""A model that drifts into other languages: the language lock, and the density ratio of the language's LM.

The model was trained on much English and little French and Spanish; its twin was trained on the French utterances
alone (assets/drift). Dev chooses all weights; test is decoded once with them. Every language has its own LM, lock and
request, in one decoder and in batches of all languages. The source LM is a bigram of the training text.

The word error rate minus the twin's is an interval with 95 % of 2,000 draws of as many utterances (paired bootstrap).
"""

from __future__ import annotations

import gzip
import itertools
import math
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any, NamedTuple

import kaldialign

from nemo_gpu_decoding import Fusion, Request, allowed_tokens, estimate_ngram_lm, load_ngram_lm, write_arpa
from nemo_gpu_decoding.cli.decoding import decoding_config
from nemo_gpu_decoding.cli.main import guarded, run_program
from nemo_gpu_decoding.fusion.ngram import nemo_symbol
from nemo_gpu_decoding.manifest import read_manifest
from nemo_gpu_decoding.metrics import word_errors
from nemo_gpu_decoding.plain_text import format_table

if TYPE_CHECKING:
    from nemo_gpu_decoding import BackoffAutomaton
    from nemo_gpu_decoding.cli.dev_set import DevSet, Search
    from nemo_gpu_decoding.nemo_plugin.model import Head

PROGRAM = "python -m benchmarks.drift"
SUMMARY = "language lock and density ratio on a model that drifts into other languages"
EXAMPLES = ("", "heads=[TDT]")
# head of the model, model and strategy
HEADS = {
    "CTC": ("ctc", "rnnt", "flexctc_beam"),
    "RNN-T": ("rnnt", "rnnt", "alsd_pp"),
    "TDT": ("rnnt", "tdt", "alsd_pp"),
}


@dataclass
class DriftOptions:
    """Options of the table."""

    # Folder of the models, speech and text.
    folder: str = str(Path(__file__).resolve().parents[1] / "assets" / "drift")
    # Manifest of other test utterances; empty: those of the folder.
    test: str = ""
    # Heads: CTC, RNN-T, TDT.
    heads: list[str] = field(default_factory=lambda: list(HEADS))
    # The rare language.
    language: str = "fr"
    # Hypotheses per frame.
    beam_size: int = 16
    # Values to try on dev: weights of the LM, of the source LM relative to it, prices of tokens outside the language,
    # and with an LM bonuses per token.
    lm_weights: list[float] = field(default_factory=lambda: [0.4, 0.7, 1.0, 1.3, 1.6, 1.9])
    ratios: list[float] = field(default_factory=lambda: [0.5])
    prices: list[float] = field(default_factory=lambda: [3.0, 6.0, math.inf])
    bonuses: list[float] = field(default_factory=lambda: [0.0, 0.5, 1.0, 1.5])
    # Rounds of the times; medians of ratios count.
    rounds: int = 15


OPTIONS = DriftOptions


class Setting(NamedTuple):
    """Weights of one decoding; None: without."""

    lm_weight: float | None = None
    ratio: float | None = None  # weight of the source LM relative to lm_weight
    price: float | None = None
    bonus: float = 0.0  # of each token, `beam_beta`


class Text:
    """Texts of all languages, and LMs and locks made from them."""

    def __init__(self, folder: Path) -> None:
        with gzip.open(folder / "text.tsv.gz", "rt", encoding="utf-8") as lines:
            rows = [line.rstrip("\n").split("\t") for line in lines]
        self._of: dict[str, list[str]] = {}
        for name, sentence in rows:
            self._of.setdefault(name, []).append(sentence)
        self.languages = [name for name in self._of if name != "train"]
        self.words = {name: {word for text in self._of[name] for word in text.split()} for name in self.languages}
        self._is_known: dict[tuple[str, str], bool] = {}  # results of `_is_foreign`

    def lm(self, name: str, order: int, vocabulary: Any) -> BackoffAutomaton:
        """The token LM of a language, or of "train"."""
        symbols = [nemo_symbol(i) for i in range(len(vocabulary))]
        spelled = [[symbols[i] for i in vocabulary.tokenize(text)] for text in self._of[name]]
        with TemporaryDirectory() as folder:
            file = Path(folder) / f"{name}.arpa"
            write_arpa(estimate_ngram_lm(spelled, order, symbols=symbols, min_counts=(1, 1, 2)[:order]), file)
            return load_ngram_lm(file, len(vocabulary))

    def lock(self, language: str, vocabulary: Any, price: float) -> Any:
        """The tokens of a language's text."""
        return allowed_tokens(vocabulary, texts=self._of[language], price=price)

    def foreign_share(self, texts: Sequence[str], language: str) -> float:
        """Percentage of written words that are foreign."""
        written = [word for text in texts for word in text.split()]
        for word in set(written):
            if (word, language) not in self._is_known:
                self._is_known[word, language] = self._is_foreign(word, language)
        return 100 * sum(self._is_known[word, language] for word in written) / max(1, len(written))

    def _is_foreign(self, word: str, language: str) -> bool:
        """Whether a word, right or misspelt, is closer to a word of another language than to all of its own."""
        nearest = {
            name: min(kaldialign.edit_distance(word, own)["total"] for own in words)
            for name, words in self.words.items()
        }
        return min(nearest.values()) < nearest[language]


class Part(NamedTuple):
    """Dev or test."""

    speech: DevSet
    languages: list[str]  # of each utterance

    def of(self, texts: Sequence[str], language: str) -> tuple[list[str], list[str]]:
        """References and texts of one language."""
        rows = zip(self.speech.references, texts, self.languages, strict=True)
        pairs = [(reference, text) for reference, text, own in rows if own == language]
        return [reference for reference, _ in pairs], [text for _, text in pairs]

    def wer(self, texts: Sequence[str], language: str) -> float:
        return 100 * word_errors(*self.of(texts, language)).wer


class Searched:
    """One head of one model with LMs and locks of all languages, on dev and test."""

    def __init__(self, head: Head, strategy: str, text: Text, options: DriftOptions, only_rare: bool) -> None:
        from nemo_gpu_decoding.cli.dev_set import encode

        self.head, self.text, self.options = head, text, options
        self.parts = {}
        for name in ("dev", "test"):
            file = Path(options.folder) / "speech" / f"{name}.json"
            utterances = read_manifest(Path(options.test) if name == "test" and options.test else file)
            rows = [(own, own.path.stem.partition("_")[0]) for own in utterances]
            if name == "dev" or only_rare:  # which only the rare language needs
                rows = [row for row in rows if row[1] == options.language]
            self.parts[name] = Part(encode(head, [own for own, _ in rows]), [language for _, language in rows])
        size = options.beam_size
        bonuses = {0.0, *options.bonuses}
        self.searches: dict[float, Search] = {
            bonus: head.search(decoding_config(strategy, None, {"beam_size": size, "beam_beta": bonus}))
            for bonus in bonuses
        }

    @cached_property
    def lms(self) -> tuple[dict[str, BackoffAutomaton], BackoffAutomaton]:
        """The LM of each language, and the source LM."""
        vocabulary = self.head.vocabulary()
        of_languages = {name: self.text.lm(name, 6, vocabulary) for name in self.text.languages}
        return of_languages, self.text.lm("train", 2, vocabulary)

    def decoder(self, setting: Setting) -> Search:
        """The decoder with LMs for requests."""
        search = self.searches[setting.bonus]
        if setting.lm_weight is None:
            return search
        pool, source = self.lms
        weights: dict[str, Any] = {"lm_weight": setting.lm_weight}
        if setting.ratio:
            weights |= {"source_lm": source, "source_lm_weight": setting.ratio * setting.lm_weight}
        return search.with_options(search.config, Fusion(lm_pool=pool, **weights))

    def requests(self, setting: Setting, languages: Sequence[str]) -> list[Request]:
        """The LM and lock of each utterance's language."""
        vocabulary, price = self.head.vocabulary(), setting.price
        own = {
            name: Request(
                lm=None if setting.lm_weight is None else name,
                allowed=None if price is None else self.text.lock(name, vocabulary, price),
            )
            for name in set(languages)
        }
        return [own[name] for name in languages]

    def decode(self, setting: Setting, part: str) -> list[str]:
        """The texts of dev or test."""
        speech, languages = self.parts[part]
        requests, decoder, texts = iter(self.requests(setting, languages)), self.decoder(setting), []
        for batch in speech.batches:
            own = list(itertools.islice(requests, len(batch.lengths)))
            texts += [self.head.text_of(n.best) for n in decoder.decode(batch.inputs, batch.lengths, own)]
        return texts

    def tuned(self, settings: Sequence[Setting], language: str) -> Setting:
        """The setting with the fewest errors in dev, of equal ones that with the fewest foreign words."""
        part = self.parts["dev"]

        def cost(setting: Setting) -> tuple[float, float]:
            texts = self.decode(setting, "dev")
            return part.wer(texts, language), self.text.foreign_share(texts, language)

        return min(settings, key=cost)

    def seconds(self, settings: Mapping[str, Setting]) -> dict[str, list[float]]:
        """CPU times of the search of test, in turn."""
        speech, languages = self.parts["test"]
        found: dict[str, list[float]] = {name: [] for name in settings}
        decoders = {name: self.decoder(setting) for name, setting in settings.items()}
        # made once: it reads the text of the languages, which would empty the processor's caches before each time
        requests_of = {name: self.requests(setting, languages) for name, setting in settings.items()}
        for _ in range(self.options.rounds + 1):
            for name, decoder in decoders.items():
                requests, total = iter(requests_of[name]), 0.0
                for batch in speech.batches:
                    own = list(itertools.islice(requests, len(batch.lengths)))
                    started = time.process_time()
                    decoder.decode(batch.inputs, batch.lengths, own)
                    total += time.process_time() - started
                found[name].append(total)
        return {name: times[1:] for name, times in found.items()}


def ways(options: DriftOptions) -> dict[str, list[Setting]]:
    """The rows of the table and the settings that dev chooses from."""
    lm, ratios, prices, bonuses = options.lm_weights, options.ratios, options.prices, options.bonuses
    products = itertools.product
    return {
        "beam": [Setting()],
        "lock": [Setting(price=price) for price in prices],
        "LM": [Setting(*row) for row in products(lm, [None], [None], bonuses)],
        "LM - source": [Setting(*row) for row in products(lm, ratios, [None], bonuses)],
        "lock, LM - source": [Setting(*row) for row in products(lm, ratios, prices, bonuses)],
    }


def rows_of(name: str, text: Text, options: DriftOptions) -> Iterator[list[Any]]:
    """The rows of a head: the drifting model and its twin."""
    from benchmarks.verify import wer_difference
    from nemo_gpu_decoding.nemo_plugin.model import Model

    kind, model, strategy = HEADS[name]
    folder, rare = Path(options.folder) / "models", options.language
    others = [own for own in text.languages if own != rare]
    best: dict[str, list[str]] = {}  # texts of the rare language in test, by role
    for role in ("drift", "twin"):
        file = folder / f"{role}_{model}.nemo"
        if not file.exists():
            continue
        head = Model.load(str(file), device="cpu").head(kind)
        searched = Searched(head, strategy, text, options, only_rare=role == "twin")
        test, tried = searched.parts["test"], ways(options)
        if role == "twin":
            tried = {way: tried[way] for way in ("beam", "LM")}
        yield [f"{name} {role}", "greedy", "", *cells(test, test.speech.greedy_texts, rare, others, text)]
        chosen = {}
        for way, settings in tried.items():
            chosen[way] = searched.tuned(settings, rare)
            setting = chosen[way]
            values = {"LM": setting.lm_weight, "ratio": setting.ratio, "price": setting.price, "bonus": setting.bonus}
            shown = " ".join(f"{key} {own:g}" for key, own in values.items() if own)
            texts = searched.decode(chosen[way], "test")
            yield [f"{name} {role}", way, shown, *cells(test, texts, rare, others, text)]
            references, best[role] = test.of(texts, rare)  # in the end those of the last way
        if role == "drift":
            ratio = chosen["lock, LM - source"]
            bare = {"beam": Setting(), "LM - source": ratio._replace(price=None)}
            report_times(name, searched, bare | {"lock": chosen["lock"], "lock, LM - source": ratio})
        elif "drift" in best:
            low, high = wer_difference(references, best["twin"], best["drift"])
            print(f"{name}: WER of 'lock, LM - source' minus that of the twin with the LM: {low:+.1f} .. {high:+.1f}")


def cells(part: Part, texts: Sequence[str], rare: str, others: Sequence[str], text: Text) -> list[str]:
    """Foreign words and WER of the rare language, and WER of the others; percentages."""
    shown = [f"{text.foreign_share(part.of(texts, rare)[1], rare):.1f}", f"{part.wer(texts, rare):.1f}"]
    return shown + [f"{part.wer(texts, own):.1f}" if own in part.languages else "" for own in others]


def report_times(name: str, searched: Searched, settings: Mapping[str, Setting]) -> None:
    """Print the time of the lock relative to the same search without it."""
    found = searched.seconds(settings)
    for way, base in (("lock", "beam"), ("lock, LM - source", "LM - source")):
        ratios = sorted(a / b for a, b in zip(found[way], found[base], strict=True))
        print(f"{name}: time of '{way}' relative to '{base}': {ratios[len(ratios) // 2]:.3f}", flush=True)


def run(options: DriftOptions) -> int:
    """Print the table."""
    for name in options.heads:
        if name not in HEADS:
            raise ValueError(f"heads holds {name}, expected any of {', '.join(HEADS)}")
    text = Text(Path(options.folder))
    if options.language not in text.languages:
        raise ValueError(f"language is {options.language}, expected one of {', '.join(text.languages)}")
    table = [row for name in options.heads for row in rows_of(name, text, options)]
    others = [own for own in text.languages if own != options.language]
    header = ["model", "search", "weights", "foreign %", f"WER {options.language}", *(f"WER {own}" for own in others)]
    print(format_table(header, table))
    return 0


def main() -> int:
    """The exit code of the program."""
    return guarded(PROGRAM, lambda: run_program(PROGRAM, SUMMARY, sys.modules[__name__], sys.argv[1:]), __name__)


if __name__ == "__main__":
    sys.exit(main())
