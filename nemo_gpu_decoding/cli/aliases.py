"""`nemo-gpu-decoding aliases` finds the texts that a model recognises for spoken phrases; they become aliases."""

from __future__ import annotations

import shlex
import subprocess
import sys
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any, NamedTuple

from omegaconf import MISSING, DictConfig
from tqdm import tqdm

from nemo_gpu_decoding.audio import AudioSource, part_of
from nemo_gpu_decoding.cli import decoding
from nemo_gpu_decoding.container import write_text
from nemo_gpu_decoding.metrics import PhraseWords
from nemo_gpu_decoding.plain_text import read_lines
from nemo_gpu_decoding.schema import checked_options, option

if TYPE_CHECKING:
    from nemo_gpu_decoding.fusion.phrases import Phrase

EXAMPLES = (
    "model=model.nemo phrases=names.txt manifest=dev.json out=heard.txt",
    "model=model.nemo phrases=names.txt command=./speak.sh texts=corpus.txt out=heard.txt",
)
FIRST = ("model", "phrases", "out", "manifest", "command", "sentences", "texts", "lm", "strategy", "most")
PLACE = "PHRASE"  # placeholder in `sentences`
CHARACTERS = 3  # least length of an alias
PUNCTUATION = ".,;:!?\"'()"


@checked_options
@dataclass
class AliasesOptions(decoding.DecodingOptions):
    """Options of `aliases`. Phrases are not boosted. null keeps the value of the preset, or NeMo's default."""

    topic = "recordings and aliases"

    # Phrase file to write: the phrases of `phrases`, with their weights and aliases, and the new aliases.
    out: str = MISSING
    # NeMo manifest of recordings in which the phrases are spoken, with their transcripts in `text`. A line with
    # `offset` is a part of the file, `duration` seconds long.
    manifest: str | None = None
    # Instead of manifest: a command of a speech synthesiser, or a list of commands with different voices, such as
    # 'espeak-ng -v en-us -w {wav} {text}'. {wav} is the file to write and {text} the text to speak. A command without
    # both gets them as its last arguments. It is run without a shell.
    command: Any = None
    # Sentences that the commands speak, with PHRASE in place of the phrase.
    sentences: list[str] = option(["PHRASE"])
    # Text file of ordinary sentences, such as the text of the LM. Words that occur in it are no alias. The transcripts
    # and sentences always count.
    texts: str | None = None
    # Hypotheses of each recording that are looked at, >= 1.
    n_best: int = option(1, low=1, high=1000)
    # Maximum number of new aliases per phrase, the most frequent ones, >= 1.
    most: int = option(4, low=1, high=1000)
    # Number of times that an alias has to be heard, >= 1.
    min_count: int = option(1, low=1, high=1000)

    def check_rules(self) -> None:
        for sentence in self.sentences:
            if PLACE not in sentence:
                raise ValueError(f"sentences holds {sentence!r}, expected texts with {PLACE}")
        for command in self.commands:
            if ("{wav}" in command) != ("{text}" in command):
                raise ValueError(f"command is {command!r}, expected one with {{wav}} and {{text}}, or without both")

    @property
    def commands(self) -> list[str]:
        if self.command is None:
            return []
        return [str(word) for word in (self.command if isinstance(self.command, list) else [self.command])]


OPTIONS = AliasesOptions


class Spoken(NamedTuple):
    """A recording with its reference text and the phrases to look for in the text."""

    audio: AudioSource
    text: str
    phrases: tuple[str, ...]  # the phrases to look for


def run(options: AliasesOptions) -> int:
    """Write the phrase file with the new aliases; print the aliases of each phrase and their counts to stdout."""
    from nemo_gpu_decoding.fusion.phrases import read_phrases

    if options.phrases is None:
        raise ValueError("phrases is not set, expected a phrase file")
    if (options.manifest is None) == (options.command is None):
        raise ValueError("give either manifest=FILE or command=COMMAND")
    phrases = read_phrases(decoding.existing_file("phrases", options.phrases))
    texts = read_lines(decoding.existing_file("texts", options.texts)) if options.texts else []
    out = decoding.writable_file("out", options.out)
    with TemporaryDirectory() as folder:
        spoken = list(recordings(options, phrases, Path(folder)))
        decoding.check_outputs(options, [("manifest", part_of(utterance.audio).path) for utterance in spoken])
        counts = heard_phrases(spoken, transcribed(options, [utterance.audio for utterance in spoken]))
    ordinary = [utterance.text for utterance in spoken] if options.manifest else list(options.sentences)
    ordinary += texts
    chosen = choose(phrases, counts, ordinary, options.most, options.min_count)
    write_text(out, "".join(f"{line_of(phrase)}\n" for phrase in chosen))
    for phrase, with_aliases in zip(phrases, chosen, strict=True):
        new = with_aliases.aliases[len(phrase.aliases) :]
        shown = [f"{alias} ({counts[phrase.text][alias]})" for alias in new]
        print(f"{phrase.text}: {', '.join(shown) or 'no new alias'}")
    return 0


def recordings(options: AliasesOptions, phrases: Sequence[Phrase], folder: Path) -> Iterator[Spoken]:
    """Yield the recordings of the manifest, or recordings that speech synthesis commands write to `folder`."""
    if options.manifest is not None:
        from nemo_gpu_decoding.manifest import read_manifest, usable

        names = tuple(phrase.text for phrase in phrases)
        for utterance in usable(read_manifest(Path(decoding.existing_file("manifest", options.manifest)))):
            yield Spoken(utterance.audio, utterance.text or "", names)
        return
    wanted = [
        (phrase.text, sentence.replace(PLACE, phrase.text), command)
        for phrase in phrases
        for sentence in options.sentences
        for command in options.commands
    ]
    shown = tqdm(wanted, unit="wav", desc="speech", disable=None, file=sys.stderr)
    for number, (phrase, text, command) in enumerate(shown):
        wav = folder / f"{number}.wav"
        speak(command, text, wav)
        yield Spoken(wav, text, (phrase,))


def speak(command: str, text: str, wav: Path) -> None:
    """Run a command that speaks a text into a WAV file; raise a ValueError if the command writes no file."""
    command = command if "{wav}" in command else f"{command} {{wav}} {{text}}"
    words = [part.replace("{text}", text).replace("{wav}", str(wav)) for part in shlex.split(command)]
    done = subprocess.run(words, capture_output=True, text=True, check=False)
    if done.returncode or not wav.is_file():
        last = (done.stderr or done.stdout).strip().splitlines()[-1:] or ["no message"]
        raise ValueError(f"command {shlex.join(words)} made no WAV file (exit status {done.returncode}): {last[0]}")


def transcribed(options: AliasesOptions, recordings: Sequence[AudioSource]) -> Iterator[list[str]]:
    """Decode without boosting and yield for each recording the texts of its hypotheses, best first."""
    model = decoding.load_model(options, build_decoding)
    with tqdm(total=len(recordings), unit="utt", desc="decoding", disable=None, file=sys.stderr) as shown:
        for outputs in model.encode(recordings, options.batch_size):
            for transcript in model.decode(outputs):
                shown.update()
                yield [text for text, _ in transcript.n_best] or [transcript.text]


def build_decoding(options: AliasesOptions, default_head: str) -> DictConfig:
    """Return NeMo's decoding section for an n-best list, without boosted phrases."""
    config = decoding.config_with_n_best(options, default_head, options.n_best, phrases=None)
    config[decoding.section_of(str(config.strategy))].pop("boosting_tree", None)
    return decoding.with_decoding(config, options)


def heard_phrases(spoken: Iterable[Spoken], texts: Iterable[Sequence[str]]) -> dict[str, Counter[str]]:
    """Count, for each phrase, the texts that the model has recognised where the phrase was spoken."""
    counts: dict[str, Counter[str]] = {}
    wanted: dict[tuple[str, ...], PhraseWords] = {}
    for utterance, n_best in zip(spoken, texts, strict=True):
        phrase_words = wanted.setdefault(utterance.phrases, PhraseWords.of(utterance.phrases))
        names = {tuple(phrase.casefold().split()): phrase for phrase in utterance.phrases}
        reference = plain_words(utterance.text)
        for start, words in phrase_words.found_in(reference):
            counter = counts.setdefault(names[words], Counter())
            counter.update({alias for text in n_best if (alias := heard(reference, text, start, start + len(words)))})
    return counts


def heard(reference: Sequence[str], text: str, begin: int, end: int) -> str:
    """Return the words of `text` aligned with reference words [begin, end); "" if none, or if a neighbour is wrong."""
    from kaldialign import align

    pairs = align(list(reference), plain_words(text), "")
    places = [n for n, (word, _) in enumerate(pairs) if word]
    first, last = places[begin], places[end - 1] + 1
    while first > 0 and not pairs[first - 1][0]:
        first -= 1
    while last < len(pairs) and not pairs[last][0]:
        last += 1
    sides = [pairs[n] for n in (first - 1, last) if 0 <= n < len(pairs)]
    if any(said != recognised for said, recognised in sides):
        return ""
    return " ".join(word for _, word in pairs[first:last] if word)


def plain_words(text: str) -> list[str]:
    """Return the words of a text in lower case, without punctuation around them."""
    return [word for part in text.lower().split() if (word := part.strip(PUNCTUATION))]


def choose(
    phrases: Sequence[Phrase], counts: Mapping[str, Counter[str]], ordinary: Iterable[str], most: int, min_count: int
) -> list[Phrase]:
    """Add aliases to phrases: words that the model recognised for one phrase only, and that ordinary texts lack."""
    owners = Counter(alias for counter in counts.values() for alias in counter)
    taken = {" ".join(plain_words(text)) for phrase in phrases for text in (phrase.text, *phrase.aliases)}
    known = PhraseWords.of(owners)
    common = {" ".join(words) for line in ordinary for _, words in known.found_in(plain_words(line))}
    chosen = []
    for phrase in phrases:
        ranked = sorted(counts.get(phrase.text, Counter()).items(), key=lambda item: (-item[1], item[0]))
        new = [
            alias
            for alias, count in ranked
            if count >= min_count and owners[alias] == 1 and len(alias) >= CHARACTERS and alias not in taken | common
        ]
        chosen.append(replace(phrase, aliases=(*phrase.aliases, *new[:most])))
    return chosen


def line_of(phrase: Phrase) -> str:
    """Return a phrase as a line of a phrase file: text, weight and aliases, with tabs between."""
    weight = "" if phrase.weight is None else f"{phrase.weight:g}"
    return "\t".join([phrase.text, weight, *phrase.aliases]).rstrip("\t")
