"""Collections: small files with the forms and faults that public files have.

    python -m tests.wild                     all collections, with totals
    python -m tests.wild cases=1000 seed=3 arpa audio

A file must be read as its peer reads it (KenLM, soundfile, the json module), or be refused by an error that names it.
What is not read needs a warning, an error or a fault. `tests/test_fuzz.py` runs each collection.
"""

import bz2
import contextlib
import gzip
import io
import json
import logging
import lzma
import math
import random
import re
import sys
import tempfile
import unicodedata
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import soundfile
from omegaconf import OmegaConf

from nemo_gpu_decoding.audio import MonoReader, checked_seconds
from nemo_gpu_decoding.checks import warn_once
from nemo_gpu_decoding.fusion.phrases import read_phrases
from nemo_gpu_decoding.lm.pack import pack_arpa_in_memory
from nemo_gpu_decoding.manifest import read_manifest
from nemo_gpu_decoding.presets import load_preset
from tests.assets import ASSETS
from tests.fuzz import RAISED
from tests.oracles.ngram import arpa_text, closed_table

logger = logging.getLogger("nemo_gpu_decoding")

Change = Callable[[random.Random, bytes], bytes]


class Collection(NamedTuple):
    """How a file is made, in what ways it is changed, and how it is read."""

    cases: int
    make: Callable[[random.Random, Path], bytes]
    changes: Sequence[Change]
    read: Callable[[Path, bytes], str]  # file and content before the changes -> what is lost, or ""


def replaced(old: str, new: str, count: int = -1) -> Change:
    return lambda draw, content: content.replace(old.encode(), new.encode(), count)


def line_changed(change: Callable[[random.Random, str], str], of: str = "") -> Change:
    """A change of one random line that matches the expression `of`."""

    def changed(draw: random.Random, content: bytes) -> bytes:
        lines = content.decode("utf-8", "surrogateescape").split("\n")
        matching = [n for n, line in enumerate(lines) if line and re.search(of, line)]
        if matching:
            n = draw.choice(matching)
            lines[n] = change(draw, lines[n])
        return "\n".join(lines).encode("utf-8", "surrogateescape")

    return changed


def recoded(encoding: str) -> Change:
    return lambda draw, content: content.decode("utf-8", "replace").encode(encoding, "replace")


TEXTS: list[Change] = [  # of any text file
    replaced("\n", "\r\n"),
    lambda draw, content: b"\xef\xbb\xbf" + content,
    recoded("utf-16"),
    recoded("latin-1"),
    line_changed(lambda draw, line: line + draw.choice(["  ", "\t", " \t "])),
    line_changed(lambda draw, line: f"\n{line}\n"),
    line_changed(lambda draw, line: f"# {line}"),
    line_changed(lambda draw, line: line.upper()),
    line_changed(lambda draw, line: unicodedata.normalize("NFD", line)),
    line_changed(lambda draw, line: line.replace(" ", "\u00a0")),
    line_changed(lambda draw, line: f"{line}\n{line}"),
    lambda draw, content: content.rstrip(b"\n"),
    lambda draw, content: content + b"\n\n",
    lambda draw, content: content[: draw.randrange(len(content) or 1)],
]


# ------------------------------------------------------------------------------------------------ ARPA
NUMBER, ENTRY = r"-?\d+\.\d+", r"^-\d\S*\t"


def make_arpa(draw: random.Random, folder: Path) -> bytes:
    return arpa_text(closed_table(seed=draw.randrange(1000), order=draw.choice([2, 3]))).encode()


def _number(new: str) -> Change:
    return line_changed(lambda draw, line: re.sub(NUMBER, new, line, count=1), ENTRY)


ARPA_CHANGES: list[Change] = [
    *TEXTS,
    *(lambda draw, content, pack=pack: pack(content) for pack in (gzip.compress, lzma.compress, bz2.compress)),
    replaced("\t", " "),
    replaced("\t", "\t\t"),
    replaced("\\data\\", "written by a tool\n\n\\data\\"),
    replaced("ngram 1=", "ngram 1 = "),
    replaced("\\end\\", ""),
    replaced("\\end\\", "\\end\\\nmore"),
    replaced("<s>", "<S>"),
    replaced("\tx\t", "\t<unk>\t"),
    line_changed(lambda draw, line: re.sub(r"\d+$", lambda m: str(int(m[0]) + draw.choice([-1, 1])), line), "^ngram"),
    line_changed(lambda draw, line: "", ENTRY),
    line_changed(lambda draw, line: line.rsplit("\t", 1)[0], ENTRY),
    line_changed(lambda draw, line: f"{line}\t-0.5", ENTRY),
    line_changed(lambda draw, line: line.replace(".", ",", 1), ENTRY),
    line_changed(lambda draw, line: line.replace("x", "q", 1), ENTRY),
    *map(_number, ("-99", "-inf", "nan", "0", "0.25", "-1e-3", "-1.5E+0", "+0", "-1e400")),
]


def read_arpa_file(path: Path, before: bytes) -> str:
    """Compares scores with KenLM's, if it reads the file."""
    import kenlm

    lm = pack_arpa_in_memory(path)
    config = kenlm.Config()
    config.show_progress, config.arpa_complain = False, kenlm.ARPALoadComplain.NONE
    try:
        theirs = kenlm.Model(str(path), config)
    except OSError:
        return ""
    words = [word for word in lm.words if word not in ("<s>", "</s>", "<S>", "<unk>", "<UNK>")]
    draw = random.Random(0)
    for _ in range(20):
        text = [draw.choice(words) for _ in range(draw.randint(1, 6))]
        ours, expected = -lm.score(text) / math.log(10), theirs.score(" ".join(text))
        if not (math.isclose(ours, expected, rel_tol=1e-4, abs_tol=1e-4) or max(ours, expected) < -60):
            return f"score of {text}: {ours}, KenLM {expected}"
    return ""


# --------------------------------------------------------------------------------------------- phrases
NAMES = ("Gdańsk", "teresa okonkwo", "Müller & Söhne", "x-ray", "São Paulo", "naïve café", "O'Neill", "東京")


def make_phrases(draw: random.Random, folder: Path) -> bytes:
    lines = [name + draw.choice(["", "", "\t2.5", "\t0.5\talias of it"]) for name in draw.sample(NAMES, 6)]
    return "".join(f"{line}\n" for line in lines).encode()


PHRASE_CHANGES: list[Change] = [
    *TEXTS,
    *(
        line_changed(lambda draw, line, end=end: line.split("\t")[0] + end)
        for end in (" :2.0", " 2.0", ",2.0", "\t2,5", "\t40", "\t-3", "\tinf", "\tnan", "\tx", ";3", "\t\t\t")
    ),
    line_changed(lambda draw, line: f'"{line}"'),
    line_changed(lambda draw, line: line + "\u200b"),
    line_changed(lambda draw, line: line + "\0"),
    line_changed(lambda draw, line: line.replace("\t", "    ")),
]


def _plain(text: str) -> str:
    return " ".join(unicodedata.normalize("NFC", text.replace("\ufeff", "")).split()).lower()


def read_phrase_file(path: Path, before: bytes) -> str:
    """Looks for each line in the phrases; a line of a comment is a phrase, too."""
    found = _plain(" ".join(phrase.text for phrase in read_phrases(path)))
    content = path.read_bytes()
    encoding = "utf-16" if content[:2] in (b"\xff\xfe", b"\xfe\xff") else "utf-8-sig"
    lines = [re.split(r"\t| :(?=\d)", line)[0] for line in content.decode(encoding, "replace").split("\n")]
    return "; ".join(line for line in lines if _plain(line) not in found)


# ----------------------------------------------------------------------------------------------- audio
FORMS = [("WAV", "FLOAT"), ("WAV", "ULAW"), ("WAV", "PCM_24"), ("OGG", "VORBIS")]
FORMS += [(kind, "PCM_16") for kind in ("WAV", "WAV", "WAVEX", "RF64", "AIFF", "AU", "CAF", "W64", "FLAC")]
RATE = 8000


def make_audio(draw: random.Random, folder: Path) -> bytes:
    file, (kind, subtype) = io.BytesIO(), draw.choice(FORMS)
    samples = np.random.default_rng(draw.randrange(1000)).uniform(-0.5, 0.5, (RATE, draw.choice([1, 1, 2])))
    soundfile.write(file, samples, RATE, format=kind, subtype=subtype)
    return file.getvalue()


def _number_at(where: bytes, offset: int, *values: int, size: int = 4) -> Change:
    """A number behind the first `where` is replaced."""

    def changed(draw: random.Random, content: bytes) -> bytes:
        at, value = content.find(where), draw.choice(values) % (1 << 8 * size)
        if at < 0:
            return content
        at += len(where) + offset
        return content[:at] + value.to_bytes(size, "little") + content[at + size :]

    return changed


def _chunk(before: bytes, name: bytes) -> Change:
    return lambda draw, content: content.replace(before, name + (64).to_bytes(4, "little") + bytes(64) + before, 1)


AUDIO_CHANGES: list[Change] = [
    _number_at(b"data", 0, 0, -1, 0x7FFFFFFF, 100, 1 << 20),
    _number_at(b"RIFF", 0, 0, -1, 36, 1 << 20),
    _number_at(b"fmt ", 6, 0, 3, 65535, size=2),  # channels
    _number_at(b"fmt ", 8, 0, 1, 7999, 192000, -1),  # sample rate
    _number_at(b"fmt ", 12, 0, -1),  # bytes per second
    _number_at(b"fmt ", 16, 0, 3, size=2),  # bytes per frame
    _number_at(b"fmt ", 18, 0, 12, 17, size=2),  # bits per sample
    _number_at(b"fmt ", 4, 0, 2, 0x55, 0xFFFE, size=2),  # code of the format
    *(_chunk(b"data", name) for name in (b"LIST", b"bext", b"JUNK", b"fact")),
    *(_chunk(b"fmt ", name) for name in (b"JUNK", b"bext")),
    lambda draw, content: content + draw.choice([b"\0" * 7, b"LIST\4\0\0\0abcd", b"TAG" + bytes(125), b"junk" * 5000]),
    lambda draw, content: draw.choice([b"ID3\4\0\0\0\0\0\5abcde", b"\0\0", b"\r\n"]) + content,
    lambda draw, content: content[: draw.randrange(len(content) or 1)],
    lambda draw, content: content[: len(content) * 2 // 3],
    lambda draw, content: content + content,
    lambda draw, content: b"",
    lambda draw, content: content[:4] + content[:4] + content[8:],
]


def _samples(source: Any) -> np.ndarray:
    return soundfile.read(source, dtype="float32", always_2d=True)[0].mean(axis=1)


def read_audio_file(path: Path, before: bytes) -> str:
    """Compares samples with those of soundfile; less than the file had before needs a fault."""
    checked_seconds(path)
    with MonoReader(path, None) as reader:
        found, fault = np.zeros(0, np.float32), ""
        while not fault and (block := reader.read_readable(1 << 20))[0].size:
            found, fault = np.append(found, block[0]), block[1] or reader.fault
        fault = fault or reader.read_readable(1)[1]
    with contextlib.suppress(RuntimeError):  # soundfile reads the headers of joined files as samples
        theirs = _samples(path) if path.read_bytes().count(before[:4]) == 1 else found
        if len(found) < len(theirs) and not fault:
            return f"{len(theirs) - len(found)} samples that soundfile reads"
        both = min(len(found), len(theirs))
        if both and not np.allclose(found[:both], theirs[:both], atol=1e-4) and not fault:
            return "other samples than those of soundfile"
    if fault:
        logger.warning("%s", fault)
    original = soundfile.info(io.BytesIO(before))
    if (original.samplerate, original.channels, original.subtype) != (reader.rate, reader.channels, reader.subtype):
        return ""  # all that the header says
    missing = original.frames - len(found)
    return "" if fault or missing < 0.1 * reader.rate else f"{missing} samples without a fault"


# ------------------------------------------------------------------------------------------- manifests
def make_manifest(draw: random.Random, folder: Path) -> bytes:
    for name in ("a.wav", "ü b.wav"):
        soundfile.write(folder / name, np.zeros(800, np.float32), RATE)
    names = ("a.wav", "ü b.wav", f"{folder}/a.wav", (folder / "a.wav").as_uri(), "none.wav")
    rows = [{"audio_filepath": draw.choice(names), "text": draw.choice(NAMES), "duration": 0.1} for _ in range(4)]
    return "".join(json.dumps(row, ensure_ascii=draw.random() < 0.5) + "\n" for row in rows).encode()


MANIFEST_CHANGES: list[Change] = [
    *TEXTS,
    *(
        line_changed(lambda draw, line, new=new: line.replace('"duration": 0.1', new))
        for new in ('"duration": "0.1"', '"duration": null', '"duration": -1', '"duration": NaN', '"duration": 1e999',
                    '"offset": 0.05', '"offset": -1', '"offset": "x"', '"offset": 0.02, "duration": 0', '"lang": "de"',
                    '"text": null', '"text": 7', '"phrases": "x"', '"phrases": ["x"]', '"phrases": [["x", "y"]]',
                    '"lm": 3', '"audio_filepath": 5', '"offset": 1' + "0" * 400, '"duration": true')
    ),
    line_changed(lambda draw, line: line.replace('"', "'")),
    line_changed(lambda draw, line: line.replace("}", ",}")),
    line_changed(lambda draw, line: line.replace("audio_filepath", "audio_file")),
    line_changed(lambda draw, line: line.replace("/", "\\\\")),
    line_changed(lambda draw, line: line.replace('"text": "', '"text": "\\ud800')),
    line_changed(lambda draw, line: f"[{line}]"),
    line_changed(lambda draw, line: line + line),
]  # fmt: skip


def read_manifest_file(path: Path, before: bytes) -> str:
    """A row per line, with the text that the json module reads, or a fault that names the line or the file."""
    content = path.read_bytes()
    content = content.decode("utf-16", "replace").encode() if content[:2] == b"\xff\xfe" else content
    lines = [(n, line) for n, line in enumerate(content.split(b"\n"), 1) if line.strip()]
    for (number, line), utterance in zip(lines, read_manifest(path), strict=True):
        if utterance.fault:
            if f"line {number}:" not in utterance.fault and utterance.name not in utterance.fault:
                return f"fault without a place: {utterance.fault}"
            logger.warning("%s", utterance.fault)
            continue
        row = json.loads(line.removeprefix(b"\xef\xbb\xbf"))
        if row.get("text") != utterance.text or row["audio_filepath"] != utterance.name:
            return f"line {number} has other values: {utterance}"
    return ""


# -------------------------------------------------------------------------------------------- sections
STRATEGIES = ("flexctc_beam", "alsd_pp", "aes_pp")


def make_section(draw: random.Random, folder: Path) -> bytes:
    config: Any = OmegaConf.to_container(load_preset(draw.choice(STRATEGIES)))
    config["beam"] |= {
        "ngram_lm_model": str(ASSETS / "lm" / "tok3.arpa"),
        "n_best": 2,
        "return_best_hypothesis": False,
    }
    config["beam"]["boosting_tree"]["key_phrases_list"] = ["acme", "gdansk"]
    return json.dumps(config).encode()


def _in_section(change: Callable[[random.Random, dict[str, Any], str], Any]) -> Change:
    """A change of a random key of `beam` or `boosting_tree` that has a value."""

    def changed(draw: random.Random, content: bytes) -> bytes:
        config = json.loads(content)
        beam = config["beam"]
        section = draw.choice([beam, beam, beam.get("boosting_tree")])
        section = section if isinstance(section, dict) else beam
        change(draw, section, draw.choice([key for key, value in section.items() if value is not None]))
        return json.dumps(config).encode()

    return changed


def _at_top(**more: Any) -> Change:
    return lambda draw, content: json.dumps(json.loads(content) | more).encode()


def _set(value: Callable[[Any], Any]) -> Change:
    return _in_section(lambda draw, section, key: section.update({key: value(section[key])}))


SECTION_CHANGES: list[Change] = [
    *map(
        _set,
        (
            str, lambda value: [value], lambda value: {"value": value}, lambda value: -1, lambda value: math.nan,
            lambda value: math.inf, lambda value: True, lambda value: None, lambda value: "", lambda value: "${x.y}",
            lambda value: "???", lambda value: "none", lambda value: 7,
            lambda value: value.upper() if isinstance(value, str) else 0.5,
        ),
    ),
    _in_section(lambda draw, section, key: section.update({key[:-1]: section.pop(key)})),
    _in_section(lambda draw, section, key: section.update({key.upper(): section.pop(key)})),
    _in_section(lambda draw, section, key: section.update({key.replace("_", "-"): section.pop(key)})),
    *(
        _in_section(lambda draw, section, key, more=more: section.update(more))
        for more in ({"beam_width": 5}, {"merge": "sum"}, {"maes_num_steps": 3}, {"max_symbols": 5}, {"nbest": 4},
                     {"kenlm_path": "x"}, {"beam_alpha": 0.2}, {"hotwords": ["a"]}, {"language_model": "x"},
                     {"tsd_max_sym_exp": 3}, {"alsd_max_target_len": 3.0}, {"hat_ilm_weight": 0.3}, {"threads": 2})
    ),
    *(
        _at_top(**more)
        for more in ({"beam_size": 4}, {"ngram_lm_alpha": 0.1}, {"greedy": {"max_symbol": 3}}, {"gready": {"a": 3}},
                     {"greedy": {"ngram_lm_alpha": 0.2, "ngram_lm_model": "x"}}, {"wfst": {"beam_width": 3}},
                     {"confidence_cfg": {"aggregate": "min"}}, {"preserve_alignment": True}, {"n_best": 3})
    ),
]  # fmt: skip


def _flat(config: Any, prefix: str = "") -> dict[str, str]:
    if not isinstance(config, dict):
        return {prefix: repr(config)}
    return {name: text for key, value in config.items() for name, text in _flat(value, f"{prefix}.{key}").items()}


def read_section(path: Path, before: bytes) -> str:
    """Looks whether other values give other options; an error names the key."""
    from nemo_gpu_decoding.nemo_plugin.beam_sections import read_aes, read_alsd, read_flexctc

    read = dict(zip(STRATEGIES, (read_flexctc, read_alsd, read_aes), strict=True))[json.loads(before)["strategy"]]
    old, new = _flat(json.loads(before)), _flat(json.loads(path.read_bytes()))
    changed = {name: new.get(name) for name in old | new if old.get(name) != new.get(name)}
    try:
        options = read(load_preset(str(path)))
    except RAISED as error:
        if not any(part in str(error) for name in changed for part in name.split(".")[-2:] if part):
            return f"{type(error).__name__} without the key of {changed}: {error}"
        raise ValueError(f"{path.name}: {error}") from error
    is_same = options == read(OmegaConf.create(json.loads(before)))
    return f"{changed} has no effect" if is_same and set(changed.values()) - {"None", None} else ""


COLLECTIONS = {
    "arpa": Collection(200, make_arpa, ARPA_CHANGES, read_arpa_file),
    "phrases": Collection(200, make_phrases, PHRASE_CHANGES, read_phrase_file),
    "audio": Collection(200, make_audio, AUDIO_CHANGES, read_audio_file),
    "manifests": Collection(100, make_manifest, MANIFEST_CHANGES, read_manifest_file),
    "sections": Collection(100, make_section, SECTION_CHANGES, read_section),
}


class _Messages(logging.Handler):
    def __init__(self) -> None:
        super().__init__(logging.WARNING)
        self.texts: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.texts.append(record.getMessage())


def outcomes(name: str, cases: int, seed: int, folder: Path) -> tuple[Counter[str], list[str]]:
    """How often files were read, warned of and refused by name; and what is wrong with the others."""
    collection, totals, wrong = COLLECTIONS[name], Counter[str](), list[str]()
    messages = _Messages()
    logger.addHandler(messages)
    for case in range(cases):
        draw = random.Random(f"{name} {seed} {case}")
        content = before = collection.make(draw, folder)
        # each change occurs first
        for change in (collection.changes[case % len(collection.changes)], *draw.sample(collection.changes, case % 2)):
            content = change(draw, content)
        path = folder / f"case{case}{'.wav' if name == 'audio' else ''}"
        path.write_bytes(content)
        messages.texts.clear()
        warn_once.cache_clear()
        try:
            lost = collection.read(path, before)
            outcome = "warned" if messages.texts else "lost" if lost else "read"
        except RAISED as error:
            lost = f"{type(error).__name__}: {error}"
            outcome = "refused" if path.name in lost and not isinstance(error, UnicodeError) else "unnamed"
        except Exception as error:
            lost, outcome = f"{type(error).__name__}: {error}", "traceback"
        totals[outcome] += 1
        if outcome in ("lost", "unnamed", "traceback"):
            wrong.append(f"{name}, case {case}: {outcome}: {lost[:300]}")
    logger.removeHandler(messages)
    return totals, wrong


def main(arguments: list[str]) -> int:
    options = dict(argument.split("=") for argument in arguments if "=" in argument)
    wrong: list[str] = []
    for name in [argument for argument in arguments if "=" not in argument] or COLLECTIONS:
        with tempfile.TemporaryDirectory() as folder:
            cases = int(options.get("cases", COLLECTIONS[name].cases))
            totals, faults = outcomes(name, cases, int(options.get("seed", 0)), Path(folder))
        print(name, dict(totals), *faults, sep="\n    ")
        wrong += faults
    return int(bool(wrong))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
