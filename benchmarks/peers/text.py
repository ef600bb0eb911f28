"""CPU decoders without graphs: flashlight-text [Wav2letter++, Flashlight] and pyctcdecode."""

from __future__ import annotations

import logging
import math
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import torch

from benchmarks.options import BenchOptions
from benchmarks.peers.base import Output, Peer, Ready, Setting, collapse
from benchmarks.tasks import Task
from nemo_gpu_decoding.fusion.ngram import nemo_symbol

TOKENS_PER_FRAME = 16  # best tokens that each hypothesis is extended by (NeMo's beam_size_token)
THRESHOLD = 20.0  # natural log below the best hypothesis, as NeMo's and ours
SILENCE = 0  # flashlight wraps its result in this token, and wants it to be a real one
WORD_BEAM = 2500  # hypotheses of flashlight's search over words, as in [CUDA-WFST]


def flashlight(options: BenchOptions, task: Task, setting: Setting) -> Ready:
    """Lexicon-free CTC beam search, with KenLM over tokens."""
    from flashlight.lib.text.decoder import CriterionType, LexiconFreeDecoder, LexiconFreeDecoderOptions, ZeroLM
    from flashlight.lib.text.decoder.kenlm import KenLM
    from flashlight.lib.text.dictionary import Dictionary

    lm = ZeroLM()
    if setting.lm:
        tokens = Dictionary()
        for token in range(task.vocab_size):
            tokens.add_entry(nemo_symbol(token))
        tokens.add_entry("<blank>")
        lm = KenLM(str(task.lm), tokens)
    search = LexiconFreeDecoderOptions(
        beam_size=setting.beam_size,
        beam_size_token=min(TOKENS_PER_FRAME, task.vocab_size + 1),
        beam_threshold=THRESHOLD,
        # KenLM's scores are log10, the acoustic ones natural
        lm_weight=task.weights.flashlight_lm_weight * math.log(10) if setting.lm else 0.0,
        sil_score=0.0,
        log_add=True,
        criterion_type=CriterionType.CTC,
    )
    decoder = LexiconFreeDecoder(search, lm, SILENCE, task.vocab_size, [])

    def run(log_probs: torch.Tensor, lengths: torch.Tensor) -> list[Any]:
        found = []
        for utterance, length in zip(log_probs.numpy(), lengths.tolist(), strict=True):
            frames = np.ascontiguousarray(utterance[:length])
            found.append(decoder.decode(frames.ctypes.data, *frames.shape)[0])
        return found

    def read(found: list[Any]) -> list[Output]:
        return [collapse(list(best.tokens[1:-1]), task.vocab_size) for best in found]

    return Ready(run, read)


def flashlight_words(options: BenchOptions, task: Task, setting: Setting) -> Ready:
    """Lexicon CTC beam search, with KenLM over words: the scores, the beam and the LM of cuda_wfst's graph.

    Each thread decodes utterances of its own.
    """
    from flashlight.lib.text.decoder import CriterionType, LexiconDecoder, LexiconDecoderOptions, SmearingMode, Trie
    from flashlight.lib.text.decoder.kenlm import KenLM
    from flashlight.lib.text.dictionary import Dictionary

    words, blank = Dictionary(), task.vocab_size
    for word in (*task.lexicon, "<unk>"):
        words.add_entry(word)
    search = LexiconDecoderOptions(
        beam_size=WORD_BEAM,
        beam_size_token=min(TOKENS_PER_FRAME, task.vocab_size + 1),
        beam_threshold=setting.beam_size,
        lm_weight=math.log(10),  # KenLM's scores are log10
        word_score=0.0,
        unk_score=-math.inf,
        sil_score=0.0,
        log_add=False,  # the best path counts, as in a graph
        criterion_type=CriterionType.CTC,
    )

    def decoder() -> Any:
        """A search with an LM of its own, for one thread."""
        lm = KenLM(str(task.word_lm), words)
        trie, start = Trie(task.vocab_size + 1, blank), lm.start(False)
        for word, spelling in task.lexicon.items():
            index = words.get_index(word)
            trie.insert(list(spelling), index, lm.score(start, index)[1])
        trie.smear(SmearingMode.MAX)
        return LexiconDecoder(search, trie, lm, blank, blank, words.get_index("<unk>"), [], False)

    decoders = [decoder() for _ in range(setting.threads)]
    threads = ThreadPoolExecutor(setting.threads)

    def decode(share: int, scaled: list[Any]) -> list[Any]:
        own = decoders[share]
        return [own.decode(frames.ctypes.data, *frames.shape)[0] for frames in scaled[share :: len(decoders)]]

    def run(log_probs: torch.Tensor, lengths: torch.Tensor) -> list[Any]:
        rows = zip((log_probs * task.weights.acoustic_scale).numpy(), lengths.tolist(), strict=True)
        scaled = [np.ascontiguousarray(utterance[:length]) for utterance, length in rows]
        shares = list(threads.map(decode, range(len(decoders)), [scaled] * len(decoders)))
        return [shares[index % len(decoders)][index // len(decoders)] for index in range(len(scaled))]

    def read(found: list[Any]) -> list[Output]:
        return [" ".join(words.get_entry(word) for word in best.words if word >= 0) for best in found]

    return Ready(run, read)


def pyctcdecode(options: BenchOptions, task: Task, setting: Setting) -> Ready:
    """CTC prefix beam search in Python, with a word-level KenLM and hotwords."""
    from pyctcdecode import build_ctcdecoder

    logging.getLogger("pyctcdecode").setLevel(logging.ERROR)
    lm: dict[str, Any] = {}
    if setting.lm:
        lm = {
            "kenlm_model_path": str(task.word_lm),
            "unigrams": list(task.lexicon) or None,
            "alpha": task.weights.pyctcdecode_lm_weight,
            "beta": task.weights.pyctcdecode_beta,
        }
    decoder = build_ctcdecoder([*task.vocabulary.pieces, ""], **lm)  # "" is the blank
    search: dict[str, Any] = {"beam_width": setting.beam_size}
    if setting.phrases:
        search |= {"hotwords": task.phrases(setting.phrases), "hotword_weight": task.weights.hotword_weight}

    def run(log_probs: torch.Tensor, lengths: torch.Tensor) -> list[Output]:
        rows = zip(log_probs.numpy(), lengths.tolist(), strict=True)
        return [decoder.decode(utterance[:length], **search) for utterance, length in rows]

    return Ready(run, list)


FLASHLIGHT = Peer("flashlight", flashlight, ("flashlight.lib.text.decoder.kenlm",))
FLASHLIGHT_WORDS = Peer("flashlight_words", flashlight_words, FLASHLIGHT.needs, multithreaded=True)
# pyctcdecode asks for numpy < 2, which NeMo's own dependencies do not go with; newer ones work
PYCTCDECODE = Peer(
    "pyctcdecode", pyctcdecode, ("pyctcdecode", "kenlm"),
    "pip install kenlm && pip install --no-deps pyctcdecode pygtrie",
)  # fmt: skip
