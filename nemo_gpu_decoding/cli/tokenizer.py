"""The tokens of a model, for commands that need nothing else of it."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from nemo_gpu_decoding.cli.decoding import existing_file

if TYPE_CHECKING:
    from nemo_gpu_decoding.vocabulary import Vocabulary


def vocabulary_of_model(name: str, language: str | None = None, *, verbose: bool = False) -> Vocabulary:
    """The tokens of a model's CTC head, as NeMo itself has them.

    `language` picks the tokenizer that spells words, in a model with one per language.

    Raises:
        ValueError: there is no such model, it has no CTC head, or no such language.
    """
    from nemo_gpu_decoding.nemo_plugin.model import Model

    vocabulary = Model.load(name, device="cpu", verbose=verbose).head("ctc").vocabulary()

    from nemo_gpu_decoding.graph.load import in_language  # imports NeMo

    return in_language(vocabulary, language)


def vocabulary_of_file(name: str) -> Vocabulary:
    """The tokens of a SentencePiece model (*.model) or of a text file with one piece per line.

    Raises:
        ValueError: there is no such file, or it is neither.
    """
    file = Path(existing_file("tokenizer", name))
    return _sentencepiece(file) if file.suffix == ".model" else _listed_pieces(file)


def _sentencepiece(file: Path) -> Vocabulary:
    from nemo_gpu_decoding.vocabulary import Vocabulary

    try:
        return Vocabulary.from_sentencepiece(file)
    except (RuntimeError, OSError) as error:
        raise ValueError(f"tokenizer={file} cannot be read as a SentencePiece model: {error}") from error


def _listed_pieces(file: Path) -> Vocabulary:
    from nemo_gpu_decoding.vocabulary import Vocabulary

    sibling = file.with_name("tokenizer.model")
    if file.name == "vocab.txt" and sibling.is_file():
        raise ValueError(
            f"tokenizer={file}: the vocab.txt that NeMo writes beside a SentencePiece model leaves out "
            f"<unk>, so that its lines are not the ids; give tokenizer={sibling}"
        )
    try:
        # not splitlines(), which splits at characters that are pieces, such as U+2028
        lines = file.read_text(encoding="utf-8").rstrip("\r\n").split("\n")
        pieces = [line.rstrip("\r").split("\t")[0] for line in lines]
    except UnicodeDecodeError as error:
        raise ValueError(
            f"tokenizer={file} is neither *.model nor text with a piece per line"
        ) from error
    if "" in pieces:
        raise ValueError(
            f"tokenizer={file}, line {pieces.index('') + 1}: no piece, expected one per line"
        )
    try:
        return Vocabulary.from_pieces(pieces)
    except ValueError as error:
        raise ValueError(f"tokenizer={file}: {error}") from error
