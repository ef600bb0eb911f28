"""Closed grammars: false acceptance and false rejection by price; and the time that a language lock takes.

Commands and other utterances are sentences of an artificial language (`language.py`). Of the utterances outside of the
grammar, half are commands with another word in them; the others are random sentences of the same words.
"""

from __future__ import annotations

import math
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
import torch
from torch import nn

from benchmarks.language import EmissionModel, Language, draw_confusions, make_language
from benchmarks.tasks import PADDED, spelling_vocabulary
from nemo_gpu_decoding import (
    AllowedTokens,
    BackoffAutomaton,
    FlexCTCBeam,
    FlexCTCConfig,
    Fusion,
    Vocabulary,
    build_grammar,
    estimate_ngram_lm,
    load_ngram_lm,
    write_arpa,
)
from nemo_gpu_decoding.cli.main import guarded, run_program
from nemo_gpu_decoding.fusion.ngram import nemo_symbol
from nemo_gpu_decoding.plain_text import format_table

PROGRAM = "python -m benchmarks.grammar"
SUMMARY = "false acceptance and false rejection of closed grammars; time of a language lock"
EXAMPLES = ("utterances=1000 commands=200",)
WORDS = 2, 5  # of a command
WORDS_OF_COMMANDS = 150  # that the commands share


@dataclass
class GrammarOptions:
    """Options of the tables."""

    # Sentences of the grammar.
    commands: int = 200
    # Utterances; a third of them is outside of the grammar.
    utterances: int = 1000
    # Prices of tokens outside of the grammar, natural log.
    prices: list[float] = field(default_factory=lambda: [1.0, 2.0, 3.0, 4.0, 6.0, math.inf])
    # Tokens of the language.
    vocab_size: int = 256
    # Hypotheses per frame.
    beam_size: int = 16
    # Runs that are timed, in turn: medians of ratios of CPU times.
    repeats: int = 25
    # Random seed.
    seed: int = 0


OPTIONS = GrammarOptions


def run(options: GrammarOptions) -> int:
    """Print both tables."""
    rng = np.random.default_rng(options.seed)
    language = make_language(options.vocab_size, rng)
    commands = commands_of(language, options.commands, rng)
    near = others(commands, options.utterances // 6, rng)
    random = [w for w in drawn(commands, options.utterances, rng) if w not in commands][: options.utterances // 6]
    inside = [commands[i] for i in rng.integers(0, len(commands), options.utterances - len(near) - len(random))]
    emissions = EmissionModel(draw_confusions(language.pieces, rng), rng)
    rows = [torch.from_numpy(emissions.emit(language.spell(words))) for words in (*inside, *near, *random)]
    batch = nn.utils.rnn.pad_sequence(rows, batch_first=True, padding_value=PADDED)
    lengths = [len(row) for row in rows]
    vocabulary = spelling_vocabulary(language.pieces, language.lexicon)
    config = FlexCTCConfig(beam_size=options.beam_size, threads=1)

    def decoder(fusion: Fusion | None = None) -> FlexCTCBeam:
        return FlexCTCBeam(len(vocabulary), len(vocabulary), config, fusion)

    sentences = [" ".join(words) for words in commands]
    spoken = [" ".join(words) for words in inside]
    free = [vocabulary.text(n.best.tokens.tolist()) for n in decoder().decode(batch, lengths)[: len(inside)]]
    wrong = np.mean([text != said for text, said in zip(free, spoken, strict=True)])
    print(f"{len(inside)} commands and {len(near)} + {len(random)} other utterances; without a grammar "
          f"{100 * wrong:.1f} % of the commands have an error")  # fmt: skip
    table = []
    for price in options.prices:
        found = decoder(Fusion(grammar=build_grammar(sentences, vocabulary, price))).decode(batch, lengths)
        table.append([f"{price:g}", *rates(found, spoken, len(near), vocabulary)])
    print(format_table(["price", "rejected %", "wrong command %", "accepted: near %", "accepted: random %"], table))
    lm = token_lm([language.spell(words) for words in commands], options.vocab_size)
    tokens = {token for words in (*inside, *near, *random) for token in language.spell(words)}
    report_lock(decoder, lm, batch, lengths, tokens, options)
    return 0


def token_lm(sentences: Sequence[Sequence[int]], vocab_size: int) -> BackoffAutomaton:
    """A 6-gram of sentences of tokens."""
    symbols = [nemo_symbol(i) for i in range(vocab_size)]
    spelled = [[symbols[i] for i in sentence] for sentence in sentences]
    with TemporaryDirectory() as folder:
        write_arpa(estimate_ngram_lm(spelled, 6, symbols=symbols), Path(folder) / "lm.arpa")
        return load_ngram_lm(Path(folder) / "lm.arpa", vocab_size)


def commands_of(language: Language, count: int, rng: np.random.Generator) -> list[list[str]]:
    """Different sentences of a few words."""
    words = list(rng.choice(list(language.lexicon), WORDS_OF_COMMANDS, replace=False))
    found: dict[str, list[str]] = {}
    while len(found) < count:
        sentence = [str(word) for word in rng.choice(words, rng.integers(WORDS[0], WORDS[1] + 1))]
        found.setdefault(" ".join(sentence), sentence)
    return list(found.values())


def drawn(commands: Sequence[list[str]], count: int, rng: np.random.Generator) -> list[list[str]]:
    """Random sentences of the commands' words."""
    words = sorted({word for command in commands for word in command})
    return [[str(word) for word in rng.choice(words, rng.integers(WORDS[0], WORDS[1] + 1))] for _ in range(count)]


def others(commands: Sequence[list[str]], count: int, rng: np.random.Generator) -> list[list[str]]:
    """Commands with one word replaced, which are no commands."""
    words = sorted({word for command in commands for word in command})
    found: list[list[str]] = []
    while len(found) < count:
        changed = list(commands[int(rng.integers(len(commands)))])
        changed[int(rng.integers(len(changed)))] = words[int(rng.integers(len(words)))]
        if changed not in commands:
            found.append(changed)
    return found


def rates(found: Sequence[Any], spoken: Sequence[str], near: int, vocabulary: Vocabulary) -> list[str]:
    """Percentages: commands that are rejected, or taken for others; other utterances that are accepted."""
    inside = found[: len(spoken)]
    rejected = [not nbest.in_grammar for nbest in inside]
    pairs = zip(inside, spoken, strict=True)
    wrong = [nbest.in_grammar and vocabulary.text(nbest.best.tokens.tolist()) != said for nbest, said in pairs]
    accepted = [nbest.in_grammar for nbest in found[len(spoken) :]]
    return [f"{100 * np.mean(values):.1f}" for values in (rejected, wrong, accepted[:near], accepted[near:])]


def report_lock(
    decoder: Any,
    lm: BackoffAutomaton,
    batch: torch.Tensor,
    lengths: Sequence[int],
    spoken: set[int],
    options: GrammarOptions,
) -> None:
    """Print the time of the search with the unspoken tokens counted, at a price or forbidden, relative to without."""
    allowed = tuple(i in spoken for i in range(options.vocab_size))
    prices = {"none": None, "counted": 0.0, "price 4": 4.0, "forbidden": math.inf}
    locks = {name: None if price is None else AllowedTokens(allowed, price) for name, price in prices.items()}
    rows = []
    for title, fusion in (("", Fusion()), (" + LM", Fusion(lm=lm, lm_weight=0.5))):
        decoders = {name: decoder(replace(fusion, allowed=lock)) for name, lock in locks.items()}
        seconds: dict[str, list[float]] = {name: [] for name in locks}
        shares = {}
        for _ in range(options.repeats + 1):  # the first run is not timed
            for name, own in decoders.items():
                started = time.process_time()
                found = own.decode(batch, lengths)
                seconds[name].append(time.process_time() - started)
                shares[name] = [nbest.best.outside_share or 0.0 for nbest in found]
        for name, times in seconds.items():
            ratios = [own / base for own, base in zip(times[1:], seconds["none"][1:], strict=True)]
            each, outside = 1e6 * min(times[1:]) / len(lengths), 100 * np.mean(shares[name])
            rows.append([name + title, f"{each:.1f}", f"{np.median(ratios):.3f}", f"{outside:.1f}"])
    title = f"{allowed.count(False)} of {len(allowed)} tokens"
    print(format_table([title, "us per utterance", "relative", "outside %"], rows))


def main() -> int:
    """The exit code of the program."""
    return guarded(PROGRAM, lambda: run_program(PROGRAM, SUMMARY, sys.modules[__name__], sys.argv[1:]), __name__)


if __name__ == "__main__":
    sys.exit(main())
