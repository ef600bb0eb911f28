"""Fuzzing of all that reads files: valid files with random faults in them.

    python -m tests.fuzz                          a minute, all readers
    python -m tests.fuzz cases=5000 seed=7 packed fst

A reader may read a damaged file (most faults change a number) or raise a ValueError that names the
file; anything else is a fault of ours, and so are more than `MOST_SECONDS` and `MOST_BYTES`. The
damaged file of a fault is kept and named. `tests/test_fuzz.py` runs a few cases of each reader.
"""

import gzip
import random
import sys
import tempfile
import time
import tracemalloc
import zlib
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from nemo_gpu_decoding import container
from nemo_gpu_decoding.fusion.boosting import read_phrases
from nemo_gpu_decoding.fusion.ngram import load_nemo_automaton, load_ngram_lm
from nemo_gpu_decoding.graph.build import build_graph, load_fst_graph
from nemo_gpu_decoding.graph.lexicon import Lexicon
from nemo_gpu_decoding.graph.openfst import Fst, write_fst
from nemo_gpu_decoding.graph.store import load_graph, save_graph
from nemo_gpu_decoding.lm.pack import pack_arpa_in_memory
from nemo_gpu_decoding.lm.packed import load_packed_lm
from nemo_gpu_decoding.manifest import read_manifest
from nemo_gpu_decoding.presets import load_preset
from nemo_gpu_decoding.search.word_graph.config import WFSTConfig
from nemo_gpu_decoding.search.word_graph.decoder import CudaWFST
from tests.fusion.test_ngram import CONFIG, bigram_tensors, write_nemo
from tests.graph.toy import LEXICON, PIECES, toy_arpa, toy_lexicon
from tests.oracles.ngram import save_packed_lm
from tests.random_models import random_log_probs

MOST_SECONDS = 5.0
MOST_BYTES = 200_000_000
RAISED = (ValueError, OSError)


class Reader(NamedTuple):
    """How a valid file is made, and read."""

    make: Callable[[Path], Any]
    read: Callable[[Path], Any]
    suffix: str = ""
    sign: Callable[[bytes], bytes] = bytes  # makes the checksums of a damaged file right again


def signed(content: bytes) -> bytes:
    """A file of `container.py` with the right checksums, if its header can still be found."""
    begin = 8 + int.from_bytes(content[:8], "little")
    header = content[8:begin]
    if begin > len(content) or not all(header.count(b'"%s":"' % name) == 1 for name in (b"header", b"body")):
        return content
    header = container._with_checksum(header, b"body", zlib.crc32(content[begin:]))
    header = container._with_checksum(header, b"header", 0)
    header = container._with_checksum(header, b"header", zlib.crc32(header))
    return content[:8] + header + content[begin:]


def _look_up(path: Path) -> None:
    """Follows every arc and every back-off of a packed LM."""
    lm = load_packed_lm(path)
    for state in range(lm.num_states):
        for label in range(lm.vocab_size):
            lm.advance(state, label)
    lm.score(lm.words)


def _search(path: Path) -> None:
    """Searches a graph, if it can be loaded; a decoder may refuse it, and names the graph then."""
    graph = load_graph(path)
    with suppress(ValueError):
        decoder = CudaWFST(graph, len(PIECES), len(PIECES), WFSTConfig(n_best=3, backend="cpu"))
        decoder.decode(random_log_probs(1, 12, len(PIECES) + 1, seed=0))


def _lines(*lines: str) -> Callable[[Path], Any]:
    return lambda path: path.write_text("".join(f"{line}\n" for line in lines), encoding="utf-8")


def _small_arpa(path: Path) -> None:
    toy_arpa(path, seed=1, order=2, keep=0.2)


def _zipped(path: Path) -> None:
    _small_arpa(path)
    path.write_bytes(gzip.compress(path.read_bytes()))


def _packed(path: Path) -> None:
    _small_arpa(arpa := path.with_name("source.arpa"))
    save_packed_lm(pack_arpa_in_memory(arpa), path)


def _graph(path: Path) -> None:
    _small_arpa(arpa := path.with_name("source.arpa"))
    save_graph(build_graph(arpa, toy_lexicon(), cache=False), path)


def _fst(path: Path) -> None:
    arcs = [(0, 1, 1, 0.5, 1), (0, 2, 0, 0.25, 2), (1, 3, 2, 1.5, 2)]
    columns = [np.array(column) for column in zip(*arcs, strict=True)]
    write_fst(Fst.from_arcs(0, np.array([np.inf, np.inf, 0.0], np.float32), *columns), path)


def _read_words(path: Path) -> Any:
    _fst(fst := path.with_name(f"{path.name}.fst"))  # messages about both name the graph
    return load_fst_graph(fst, path)


def _audio_manifest(path: Path) -> None:
    import soundfile

    soundfile.write(path.parent / "a.wav", np.zeros(160, np.float32), 16000)
    _lines(*['{"audio_filepath": "a.wav", "text": "één twee", "duration": 0.01}'] * 3)(path)


def _read_arpa(path: Path) -> None:
    """Packs it, and looks at what came of it: a damaged number may be another one, but not beyond all numbers."""
    lm = pack_arpa_in_memory(path)
    assert [lm.label(word) for word in lm.words] == list(range(lm.vocab_size))
    costs = [lm.advance(state, label)[0] for state in range(lm.num_states) for label in range(lm.vocab_size)]
    assert all(cost > -np.inf for cost in costs), "a cost of -inf or NaN"  # what cannot be costs inf


READERS = {
    "arpa": Reader(_small_arpa, _read_arpa, ".arpa"),
    "gz": Reader(_zipped, _read_arpa, ".arpa.gz"),
    "nemo": Reader(
        lambda path: write_nemo(path, CONFIG, bigram_tensors()),
        lambda path: load_nemo_automaton(path, 2, with_final_weights=True),
        ".nemo",
    ),
    "token-arpa": Reader(
        lambda path: path.write_text("\\data\\\nngram 1=4\n\n\\1-grams:\n-1 <s>\n-1 </s>\n-1 d\n-2 e\n\n\\end\\\n"),
        lambda path: load_ngram_lm(path, 2),
        ".arpa",
    ),
    "packed": Reader(_packed, load_packed_lm),
    "graph": Reader(_graph, load_graph),
    "signed-packed": Reader(_packed, _look_up, sign=signed),
    "signed-graph": Reader(_graph, _search, sign=signed),
    "fst": Reader(_fst, lambda path: load_fst_graph(path, ["<eps>", "a", "b"]), ".fst"),
    "words": Reader(_lines("<eps> 0", "één 1", "twee 2", "drie 3"), _read_words, ".txt"),
    "phrases": Reader(_lines("één twee\t2.5", "drie", "vier vijf\t-1"), read_phrases, ".txt"),
    "lexicon": Reader(
        _lines(*(f"{word} {' '.join(s)}" for word, spellings in LEXICON.items() for s in spellings)),
        lambda path: Lexicon.from_file(path, PIECES),
        ".txt",
    ),
    "manifest": Reader(_audio_manifest, read_manifest, ".json"),
    "preset": Reader(
        _lines("strategy: flexctc_beam", "beam:", "  beam_size: 8", "  ngram_lm_model: é.arpa", "  beam_beta: 1.0"),
        lambda path: load_preset(str(path)),
        ".yaml",
    ),
}


_INSERTED = (b"\xff", b"\0", b"\n", b"\t", b" ", b"nan", b"-inf", b"9" * 5000, b"[", b"1e999", b"-1", b"\xef\xbb\xbf")
_NUMBERS = (b"\xff" * 8, b"\xff" * 4, b"\xff" * 7 + b"\x7f", b"\0" * 8, b"\0\0\0\x7f", b"\0" * 6 + b"\x01\0")


class Fault(NamedTuple):
    """A damaged file that a reader does not cope with."""

    reader: str
    case: int
    what: str
    content: bytes


def damaged(content: bytes, draw: random.Random) -> bytes:
    """The content with one to three random faults."""
    data = bytearray(content)
    for _ in range(draw.randint(1, 3)):
        begin = draw.randrange(len(data) + 1)
        end = min(len(data), begin + draw.choice((1, 1, 4, 8, 64)))
        kind = draw.randrange(7)
        if kind == 0:  # bits
            for at in range(begin, end):
                data[at] ^= 1 << draw.randrange(8)
        elif kind == 1:  # bytes, often no UTF-8
            data[begin:end] = draw.randbytes(end - begin)
        elif kind == 2:
            del data[begin:end]
        elif kind == 3:  # what is there twice
            data[begin:begin] = data[begin:end]
        elif kind == 4:
            data[begin:begin] = draw.choice(_INSERTED)
        elif kind == 5:  # numbers of 4 or 8 bytes that are too large or too small
            data[begin : begin + 8] = draw.choice(_NUMBERS)
        else:
            del data[begin:]
    return bytes(data)


def fuzz(name: str, cases: int, seed: int, folder: Path) -> Iterator[Fault]:
    """The faults of one reader, in `cases` damaged files."""
    reader = READERS[name]
    path = folder / f"file{reader.suffix}"
    reader.make(path)
    valid = path.read_bytes()
    reader.read(path)  # a valid file is read
    for case in range(cases):
        content = reader.sign(damaged(valid, random.Random(f"{name} {seed} {case}")))
        path.unlink()
        path.write_bytes(content)
        if what := _fault_of(reader, path):
            yield Fault(name, case, what, content)


def _fault_of(reader: Reader, path: Path) -> str | None:
    tracemalloc.start()
    begin = time.perf_counter()
    try:
        reader.read(path)
    except RAISED as error:
        if path.name not in str(error):
            return f"{type(error).__name__} without the name of the file: {error}"
        if isinstance(error, UnicodeError):
            return f"{type(error).__name__}, expected a ValueError: {error}"
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    finally:
        (_, peak), seconds = tracemalloc.get_traced_memory(), time.perf_counter() - begin
        tracemalloc.stop()
    if peak > MOST_BYTES or seconds > MOST_SECONDS:
        return f"took {peak / 1e6:.0f} MB and {seconds:.1f} s"
    return None


def main(arguments: list[str]) -> int:
    options = dict(argument.split("=") for argument in arguments if "=" in argument)
    names = [argument for argument in arguments if "=" not in argument] or list(READERS)
    cases, seed = int(options.get("cases", 500)), int(options.get("seed", 0))
    kept = Path(tempfile.mkdtemp(prefix="fuzz-"))
    faults = 0
    for name in names:
        with tempfile.TemporaryDirectory() as folder:
            seen: dict[str, int] = {}
            for fault in fuzz(name, cases, seed, Path(folder)):
                faults += 1
                kind = fault.what[:60]
                seen[kind] = seen.get(kind, 0) + 1
                if seen[kind] == 1:
                    file = kept / f"{name}-{fault.case}"
                    file.write_bytes(fault.content)
                    print(f"{name}, case {fault.case}: {fault.what[:300]}\n    {file}")
            print(f"{name}: {cases} cases, {sum(seen.values())} faults")
    return int(faults > 0)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
