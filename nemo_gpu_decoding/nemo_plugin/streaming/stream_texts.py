"""Make the texts of NeMo's pipelines: words without spaces between them, phrases for aliases, partial transcripts."""

import re
from typing import Any

from nemo.collections.asr.inference.utils.pipeline_utils import ids_to_text_without_stripping

from nemo_gpu_decoding.fusion.phrases import Aliases
from nemo_gpu_decoding.vocabulary import Vocabulary
from nemo_gpu_decoding.words import JOINT, is_border


def divide_words(pipeline: Any) -> None:
    """Make a pipeline divide words in scripts without spaces; a word without a space before it begins with JOINT."""
    decoder = pipeline.bpe_decoder
    vocabulary, group = Vocabulary(tuple(decoder.vocabulary), "bpe"), decoder.group_tokens_into_words

    def divided(tokens: list[int], *of_tokens: list[float]) -> tuple[list[Any], bool]:
        if not vocabulary.has_unspaced(tokens):
            return group(tokens, *of_tokens)
        words: list[Any] = []
        for span in vocabulary.words(tokens):
            tokens_of_word = slice(span.first_token, span.end_token)
            new, follows = group(tokens[tokens_of_word], *(values[tokens_of_word] for values in of_tokens))
            if new and follows and (words or is_border("a", span.text[0])):
                new[0].text = JOINT + new[0].text
            words += new
        return words, not decoder.start_of_word_cache[tokens[0]] and not words[0].text.startswith(JOINT)

    decoder.group_tokens_into_words = divided


def remove_joints(output: Any, separator: str) -> None:
    """Remove each JOINT, and the space before it, from the texts in an output of a pipeline."""
    output.final_transcript = output.final_transcript.replace(separator + JOINT, "").replace(JOINT, "")
    for segment in output.final_segments or ():
        segment.text = segment.text.replace(separator + JOINT, "").replace(JOINT, "")


def write_aliases(output: Any, aliases: Aliases, bpe_decoder: Any) -> None:
    """Replace aliases by their phrases in the texts of a pipeline's output."""
    output.final_transcript = aliases.written(output.final_transcript)
    output.partial_transcript = aliases.written(output.partial_transcript)
    output.committed_transcript = aliases.committed(output.committed_transcript)
    output.final_segments = written_segments(output.final_segments or [], aliases, bpe_decoder)


def written_segments(segments: list[Any], aliases: Aliases, bpe_decoder: Any) -> list[Any]:
    """Return a copy of NeMo's segments (one per word) in which phrases replace their aliases."""
    written = []
    for first, end, text in aliases.words([segment.text for segment in segments]):
        segment = segments[first].copy()
        segment.text, segment.end = text, segments[end - 1].end
        if end > first + 1:
            segment.conf = bpe_decoder.confidence_aggregator([part.conf for part in segments[first:end]])
        written.append(segment)
    return written


def transcript(pipeline: Any, tokens: list[int]) -> str:
    """Return the text of tokens as NeMo writes it in partial transcripts."""
    text = re.sub(" {2,}", " ", ids_to_text_without_stripping(tokens, pipeline.tokenizer, pipeline.get_sep()))
    return re.sub(pipeline.leading_regex_pattern, r"\1", text) if pipeline.leading_regex_pattern else text
