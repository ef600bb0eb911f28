"""Make the files of this folder from speech, two checkpoints and LM text (see README.md).

    python assets/hard_speech/recipe.py RNNT.nemo TDT.nemo MANIFEST LM_TEXT OUT

Both checkpoints are hybrid models with one encoder, one CTC head and one tokenizer; the first has an
RNN-T head, the second a TDT head, each with one LSTM layer. MANIFEST is NeMo's, LM_TEXT one sentence a
line. Tensors of all utterances stand one after the other: N frames in all.
"""

from __future__ import annotations

import gzip
import hashlib
import json
import sys
from pathlib import Path

import numpy as np
from safetensors.numpy import save_file

from nemo_gpu_decoding.manifest import read_manifest, references_of
from nemo_gpu_decoding.nemo_plugin.model import Model, TransducerHead


def main(rnnt: Path, tdt: Path, manifest: Path, lm_text: Path, out: Path) -> None:
    utterances = read_manifest(manifest)
    texts, files = references_of(utterances), [utterance.path for utterance in utterances]
    models = {kind: Model.load(str(path), device="cpu") for kind, path in (("rnnt", rnnt), ("tdt", tdt))}
    ctc, transducer = models["rnnt"].head("ctc"), models["rnnt"].head("rnnt")
    # each utterance alone: nothing depends on the others
    emissions = [encoded.inputs for encoded in ctc.encoded(files, batch_size=1)]
    frames = [encoded.inputs for encoded in transducer.encoded(files, batch_size=1)]
    vocabulary = ctc.vocabulary()
    sentences = lm_text.read_text(encoding="utf-8").splitlines()
    assert not set(sentences) & set(texts), "the LM text holds a reference"
    metadata = {
        "origin": "LJ Speech 1.1, https://keithito.com/LJ-Speech-Dataset/",
        "licence": "public domain (speech and texts); numbers computed from it are ours, Apache-2.0",
        "checkpoints": json.dumps({path.name: digest(path) for path in (rnnt, tdt)}),
        "utterances": json.dumps([Path(file).stem.partition("_")[2] for file in files]),
        "texts": json.dumps(texts),
        "pieces": json.dumps(vocabulary.pieces, ensure_ascii=False),
        "frame_seconds": json.dumps(models["rnnt"].frame_seconds),
    }
    lengths = np.array([len(rows) for rows in emissions], np.int64)
    log_probs = np.concatenate(emissions).astype(np.float16)  # [N, V + 1]
    save_file({"lengths": lengths, "log_probs": log_probs}, out / "emissions.safetensors", metadata)
    tensors = {"lengths": lengths, "encoder_output": np.concatenate(frames).astype(np.float16)}  # [N, D]
    for kind, model in models.items():
        head = model.head("rnnt")
        assert isinstance(head, TransducerHead)
        networks = head.networks()
        parts = {
            "embedding": networks.embedding, "lstm": networks.lstm,
            "encoder": networks.encoder_projection, "output": networks.output[-1],
            "prediction": networks.prediction_projection,
        }  # fmt: skip
        tensors |= {
            f"{kind}.{part}.{name}": value.numpy().astype(np.float16)
            for part, module in parts.items()
            for name, value in module.state_dict().items()
        }
        metadata[f"{kind}.durations"] = json.dumps(networks.durations)
    save_file(tensors, out / "transducers.safetensors", metadata)
    words = sorted({word for text in (*sentences, *texts) for word in text.split()})
    spelled = (" ".join(vocabulary.pieces[token] for token in vocabulary.tokenize(w)) for w in words)
    lexicon = "".join(f"{w}\t{pieces}\n" for w, pieces in zip(words, spelled, strict=True))
    for name, content in (("lexicon.txt.gz", lexicon), ("lm_text.txt.gz", "\n".join(sentences) + "\n")):
        (out / name).write_bytes(gzip.compress(content.encode(), 9, mtime=0))


def digest(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()


if __name__ == "__main__":
    main(*map(Path, sys.argv[1:]))
