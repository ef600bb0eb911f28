"""Where transducer tasks come from: a model with its speech, or the synthetic ones."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import torch

from nemo_gpu_decoding.bench.cache import plain_file
from nemo_gpu_decoding.bench.options import BenchOptions
from nemo_gpu_decoding.bench.task import phrase_lexicon
from nemo_gpu_decoding.bench.transducer.synthetic import synthetic_transducer
from nemo_gpu_decoding.bench.transducer.task import TransducerTask


def transducer_tasks(options: BenchOptions) -> list[TransducerTask]:
    """The tasks that the options ask for: that of `model`, or a synthetic one of each kind.

    Raises:
        ValueError: the model has no transducer head, or the options contradict each other.
    """
    if options.data:
        raise ValueError(
            f"data is {options.data!r} with strategy={options.strategy}, expected model= and manifest="
        )
    if options.model:
        tasks = [_speech(options)]
    else:
        tasks = [synthetic_transducer(options, kind) for kind in options.transducers]
    return [task.first(options.utterances) for task in tasks]


def _speech(options: BenchOptions) -> TransducerTask:
    """Real speech, encoded once."""
    from nemo_gpu_decoding.manifest import read_manifest, references_of
    from nemo_gpu_decoding.nemo_plugin.model import Model, TransducerHead

    assert options.model
    assert options.manifest
    model = Model.load(options.model, device="cpu")
    head = model.head("rnnt")
    assert isinstance(head, TransducerHead)
    utterances = read_manifest(Path(options.manifest))[: options.utterances]
    texts = references_of(utterances)
    encoded = [e.inputs for e in head.encoded([utterance.path for utterance in utterances])]
    frames = np.zeros((len(encoded), max(map(len, encoded)), encoded[0].shape[1]), np.float32)
    for row, utterance in zip(frames, encoded, strict=True):
        row[: len(utterance)] = utterance
    vocabulary = head.vocabulary()
    word_lm = plain_file(options.word_lm) if options.word_lm else None
    return TransducerTask(
        name=Path(options.model).stem,
        lengths=torch.tensor([len(utterance) for utterance in encoded]),
        frame_seconds=model.frame_seconds,
        texts=texts,
        tokens=[vocabulary.tokenize(text) if text.strip() else [] for text in texts],
        vocabulary=vocabulary,
        lexicon=phrase_lexicon(texts, word_lm, vocabulary),
        lm=plain_file(options.lm) if options.lm else None,
        word_lm=word_lm,
        encoder_output=torch.from_numpy(frames),
        networks=head.networks(),
        nemo_modules=lambda: (model.model.decoder, model.model.joint),
    )
