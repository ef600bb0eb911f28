"""What a decoder loads when its first batch comes: the model's vocabulary, the LM and the phrases."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from nemo.collections.asr.parts.utils.tokenizer_utils import define_spe_tokenizer_type

from nemo_gpu_decoding.fusion.boosting import load_boosting_tree
from nemo_gpu_decoding.fusion.fusion import Fusion
from nemo_gpu_decoding.fusion.ngram import load_ngram_lm
from nemo_gpu_decoding.vocabulary import Vocabulary

if TYPE_CHECKING:
    from nemo_gpu_decoding.nemo_plugin.section import FusionOptions


def nemo_vocabulary(decoding: Any) -> Vocabulary:
    """The tokens of a NeMo model, as one of its decoding objects has them: its `tokenizer` (monolingual or
    aggregate), or for a character model `labels_map`, number -> character."""
    tokenizer = getattr(decoding, "tokenizer", None)
    if tokenizer is None:
        return Vocabulary(tuple(decoding.labels_map[i] for i in range(len(decoding.labels_map))), "char")
    # not its `vocab`, whose order is not always that of the ids
    all_pieces = tokenizer.ids_to_tokens(list(range(tokenizer.tokenizer.vocab_size)))
    kind = define_spe_tokenizer_type(all_pieces)
    if hasattr(tokenizer, "tokenizers_dict"):  # an aggregate
        by_language = {language: _EncodeIn(tokenizer, language) for language in tokenizer.tokenizers_dict}
        return Vocabulary(tuple(all_pieces), kind, encode_by_language=by_language)
    return Vocabulary(tuple(all_pieces), kind, encode=tokenizer.text_to_ids)


@dataclass(frozen=True)
class _EncodeIn:
    """An aggregate tokenizer with its language set. Unlike lambdas, equal ones compare equal, so that a
    vocabulary finds in the cache what an equal one left there."""

    tokenizer: Any
    language: str

    def __call__(self, text: str) -> list[int]:
        return self.tokenizer.text_to_ids(text, self.language)


def load_fusion(options: FusionOptions, vocab_size: int, vocabulary: Vocabulary) -> Fusion:
    """LM and boosting tree as the config wants them; both come from a cache where they can."""
    lm = None
    if options.lm_path is not None and options.lm_weight > 0:
        lm = load_ngram_lm(options.lm_path, vocab_size, vocabulary=vocabulary, encoding=options.lm_encoding)
    boosting = None
    if options.has_phrases:
        boosting = load_boosting_tree(options.boosting, vocabulary)
    return Fusion(lm, options.lm_weight, boosting, options.boosting_weight)
