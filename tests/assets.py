"""Where the shipped speech, checkpoints and LMs are."""

import tarfile
from pathlib import Path

ROOT = Path(__file__).parent.parent
ASSETS = ROOT / "assets" / "self"
CTC_MODEL = ASSETS / "models" / "self_ctc.nemo"
HYBRID_MODEL = ASSETS / "models" / "self_hybrid_rnnt.nemo"


def quoted(value) -> str:
    """A value as Hydra's overrides take it: quoted, because paths may have spaces or accents."""
    from hydra.core.override_parser.types import Quote, QuotedString

    return QuotedString(str(value), Quote.single).with_quotes()


def sentencepiece_processor():
    """The tokenizer of the shipped checkpoints."""
    import sentencepiece

    with tarfile.open(CTC_MODEL) as archive:
        name = next(n for n in archive.getnames() if n.endswith("tokenizer.model"))
        return sentencepiece.SentencePieceProcessor(model_proto=archive.extractfile(name).read())
