"""Use a NeMo inference pipeline as recognizer of a live server; a step reads one chunk from each of many streams.

    recognizer = PipelineRecognizer.build("model.nemo", decoding, PipelineOptions(max_streams=64))
    options = recognizer.prepare(StreamOptions())
    steps = recognizer.step([Chunk(0, samples, is_first=True, options=options), Chunk(7, other, options=options)])

Offline checkpoints use NeMo's buffered pipelines, which encode each chunk with audio on both sides of it.
Cache-aware checkpoints use NeMo's cache-aware pipelines. `hooks.py` makes both kinds decode with our searches.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from nemo.collections.asr.inference.factory.pipeline_builder import PipelineBuilder
from nemo.collections.asr.inference.streaming.framing.request import Frame
from nemo.collections.asr.inference.streaming.framing.request_options import ASRRequestOptions
from omegaconf import DictConfig, OmegaConf

from nemo_gpu_decoding.checks import FieldError, check_choice, check_int
from nemo_gpu_decoding.fusion.fusion import Request
from nemo_gpu_decoding.graph.word_boosting import configured_phrases
from nemo_gpu_decoding.live import interface as live
from nemo_gpu_decoding.live.interface import PipelineOptions
from nemo_gpu_decoding.metrics import ConfidenceMap, calibrated
from nemo_gpu_decoding.nemo_plugin.register import GREEDY, STRATEGIES, head_of
from nemo_gpu_decoding.nemo_plugin.requests import confidence_map, request_of
from nemo_gpu_decoding.nemo_plugin.restore import check_model_file, heads_of, import_nemo, model_config, usable_device
from nemo_gpu_decoding.nemo_plugin.section import nemo_config
from nemo_gpu_decoding.nemo_plugin.streaming import stream_texts
from nemo_gpu_decoding.nemo_plugin.streaming.searching_pipelines import StreamRequest
from nemo_gpu_decoding.nemo_plugin.streaming.stream_state import all_or_nothing
from nemo_gpu_decoding.search.alternatives import word_alternatives
from nemo_gpu_decoding.search.result import NBest, places_in_seconds
from nemo_gpu_decoding.search.result import Path as SearchPath
from nemo_gpu_decoding.transcript import Alternative, Transcript, Word, boosted_phrases
from nemo_gpu_decoding.words import JOINT, single_spaced

N_BEST = 5  # of searches that have it anyway


class PipelineRecognizer:
    """A recognizer that decodes many live streams in one NeMo pipeline. Only `prepare` is thread-safe.

    Args:
        pipeline: a pipeline that NeMo's `PipelineBuilder` made.
        strategy: name of its decoding strategy.
        model: name of its model.
    """

    def __init__(self, pipeline: Any, strategy: str, model: str) -> None:
        self.pipeline, self.strategy, self.model = pipeline, strategy, model
        self.sample_rate = int(pipeline.sample_rate)
        self.is_cache_aware = hasattr(pipeline, "context_manager")
        seconds = pipeline.chunk_size_in_secs if self.is_cache_aware else pipeline.chunk_size
        self.chunk_samples = int(seconds * self.sample_rate)
        # cache-aware encoders read their chunk only
        self.right_context_seconds = 0.0 if self.is_cache_aware else float(pipeline.right_padding_size)
        self.max_n_best = int(getattr(pipeline, "n_best", 1))
        self.infer: Any = getattr(pipeline, "infer", None)  # the search; None for strategies of NeMo
        self.confidence_map = confidence_map(self.infer)
        if strategy not in STRATEGIES:
            stream_texts.divide_words(pipeline)
        pipeline.open_session()

    @classmethod
    def build(
        cls, model: str, decoding: DictConfig, options: PipelineOptions, *, device: str = "auto", verbose: bool = False
    ) -> PipelineRecognizer:
        """Load a model and build its pipeline.

        Args:
            model: a .nemo file or the name of a pretrained model.
            decoding: NeMo's decoding section.
            options: options of the pipeline.

        Raises:
            ValueError: the model cannot be found, or does not support the strategy or the pipeline.
        """
        check_model_file(model)
        where = usable_device(device)
        import_nemo(verbose)
        config, name = model_config(model), str(decoding.strategy)
        head, kind = head_of(name, heads_of(config)), _kind_of(config, options.pipeline)
        if name not in STRATEGIES:
            check_choice("strategy", name, [*GREEDY, *STRATEGIES])
            if options.rules is not None:
                raise FieldError("rules", options.rules, f"null with strategy {name}, which uses end_silence")
            if (options.max_n_best or 1) > 1:
                raise FieldError("max_n_best", options.max_n_best, f"1 with strategy {name}, which has one hypothesis")
        if options.max_n_best is None:
            options = replace(options, max_n_best=_cheap_n_best(decoding, f"{kind} {head}"))
        try:
            pipeline = PipelineBuilder.build_pipeline(_config_of(model, decoding, options, kind, head, where))
        except FieldError as error:
            raise error.named("max_n_best") if error.field == "streaming.n_best" else error from None
        return cls(pipeline, name, Path(model).stem if Path(model).is_file() else model)

    def prepare(self, wanted: live.StreamOptions) -> tuple[Any, int, list[str]]:
        """Return NeMo's options of a stream, its number of hypotheses, and phrases that cannot be boosted.

        For an invalid field, a ValueError that names it is raised.

        The phrases and the grammar of the stream are compiled here, so that their compilation does not delay the
        chunks of other streams.
        """
        request = self._request(wanted)
        options: dict[str, Any] = {"biasing_cfg": None if request is None else StreamRequest(request=request)}
        if wanted.end_silence is not None:
            options["stop_history_eou"] = milliseconds(wanted.end_silence)
        if wanted.language is not None:
            languages = self.languages
            if wanted.language not in languages:
                known = f"one of {', '.join(languages)}" if languages else "none: this model takes no language"
                raise FieldError("language", wanted.language, known)
            options["language_code"] = wanted.language
        check_int("n_best", wanted.n_best, 1, self.max_n_best)
        tree: Any = None if request is None else request.boosting
        boosted = set() if tree is None else {text.lower() for text in tree.table.texts}
        phrases = (wanted.request and wanted.request.phrases) or ()
        left_out = [phrase.text for phrase in phrases if " ".join(phrase.text.lower().split()) not in boosted]
        return ASRRequestOptions(**options), wanted.n_best, left_out

    def left_out(self, options: Any) -> list[str]:
        return options[2]

    @property
    def languages(self) -> list[str]:
        """Return the languages that a stream may choose; [] if the model has no choice of languages."""
        config = getattr(self.pipeline, "_prompt_config", None) or {}
        return sorted(config.get("prompt_dict") or ())

    @property
    def phrases(self) -> list[str]:
        """Return the default phrases of streams, from the decoding config; [] for a boosting tree that NeMo made."""
        phrases = [] if self.infer is None else configured_phrases(self.infer.options.fusion.boosting)
        return [phrase.text for phrase in phrases]

    def step(self, chunks: Sequence[live.Chunk]) -> list[live.StepOutput]:
        """Decode one chunk of each of several streams; NaN in one stream does not affect the other streams.

        Raises:
            Exception: all streams are unchanged.
        """
        with torch.inference_mode(), all_or_nothing(self.pipeline, [chunk.stream for chunk in chunks]):
            outputs = self.pipeline.transcribe_step([self._frame(chunk) for chunk in chunks])
            for output in outputs:
                stream_texts.remove_joints(output, self.pipeline.get_sep())
            return [self._step(chunk, output) for chunk, output in zip(chunks, outputs, strict=True)]

    def drop(self, streams: Iterable[int]) -> None:
        """Remove streams from the pipeline without results."""
        for stream in streams:
            self.pipeline.delete_state(stream)
            bufferer = self.pipeline.bufferer
            if not self.is_cache_aware:
                bufferer.rm_bufferer(stream)
                continue
            if stream in bufferer.streamidx2slotidx:
                bufferer.free_slots([bufferer.streamidx2slotidx[stream]])
            context = self.pipeline.context_manager
            if stream in context.streamidx2slotidx:
                context.reset_slots([stream], [True])

    def _frame(self, chunk: live.Chunk) -> Frame:
        samples = torch.zeros(self.chunk_samples)
        samples[: len(chunk.samples)] = torch.from_numpy(chunk.samples)
        return Frame(
            samples, chunk.stream, is_first=chunk.is_first, is_last=chunk.is_last, length=len(chunk.samples),
            options=chunk.options[0] if chunk.is_first else None,
        )  # fmt: skip

    def _step(self, chunk: live.Chunk, output: Any) -> live.StepOutput:
        final, wanted = None, chunk.options[1]
        ended = getattr(output, "n_best", None)  # of pipelines that search
        if output.final_transcript or (ended is not None and ended.in_grammar is False):
            final = self._final(chunk, output, ended, wanted)
        error = getattr(output, "error", None)  # of pipelines that search
        if error is not None or chunk.is_last:
            return live.StepOutput(final=final, error=error and str(error))
        state = self.pipeline.get_state(chunk.stream)
        decoder = self.pipeline.bpe_decoder
        words, _ = decoder.group_tokens_into_words(state.tokens, state.timesteps, state.confidences)
        for word in words:
            word.text = word.text.removeprefix(JOINT)
        aliases = getattr(state, "aliases", None)
        if aliases is not None:
            words = stream_texts.written_segments(words, aliases, decoder)
        committed = getattr(output, "committed_transcript", None)
        if committed is None:  # greedy tokens stay
            committed = stream_texts.transcript(self.pipeline, state.tokens)
        alternatives: tuple[Alternative, ...] = ()
        if wanted > 1 and state.slot is not None:
            (nbest,) = self.pipeline.slots.partial([state.slot], self.infer.candidates(wanted))
            alternatives = self._alternatives(nbest, wanted)
        text = single_spaced(output.partial_transcript)
        partial = Transcript(
            text, words=_words(words, self.confidence_map), committed=committed.strip(), n_best=alternatives
        )
        return live.StepOutput(partial, final)

    def _final(self, chunk: live.Chunk, output: Any, ended: NBest | None, n_best: int) -> Transcript:
        """Return the final transcript of an utterance that ended in a chunk; `ended`: None for NeMo's strategies."""
        text, words = output.final_transcript, _words(output.final_segments, self.confidence_map)
        is_joined = bool(text) and not chunk.is_first and not text.startswith(self.pipeline.get_sep())
        final = Transcript(single_spaced(text), words=words, is_joined=is_joined)
        if ended is None:
            return final
        alternatives = self._alternatives(ended, n_best) if n_best > 1 else ()
        places = word_alternatives(ended.paths, self.infer.vocabulary()) if alternatives else ()
        return replace(
            final,
            n_best=alternatives,
            alternatives=places_in_seconds(places, words, self.pipeline.model_stride_in_secs),
            phrases=boosted_phrases(ended.phrases),
            outside_share=ended.best.outside_share,
            in_grammar=ended.in_grammar,
        )

    def _alternatives(self, nbest: NBest, n: int) -> tuple[Alternative, ...]:
        """Return the `n` best hypotheses that have different texts, best first."""

        def text_of(path: SearchPath) -> str:
            return stream_texts.transcript(self.pipeline, path.tokens.tolist()).strip()

        paths = nbest.distinct(text_of, n)
        texts = paths.texts(text_of)
        return tuple(Alternative(text, round(float(path.score), 4)) for text, path in zip(texts, paths, strict=True))

    def _request(self, wanted: live.StreamOptions) -> Request | None:
        """Return a stream's compiled request, or None to use the decoding config's phrases and LM."""
        if wanted.request is None:
            return None
        if self.infer is None:
            name, value = next(iter(wanted.request.shown.items()))
            raise FieldError(name, value, f"none: strategy {self.strategy} takes no requests")
        return request_of(self.infer, wanted.request, live.MAX_LETTERS)


def milliseconds(seconds: float) -> int:
    """Convert seconds of silence to milliseconds for NeMo's `stop_history_eou`; -1: silence never ends utterances."""
    return -1 if seconds < 0 else round(1000 * seconds)


def _kind_of(config: DictConfig, kind: str) -> str:
    if kind != "auto":
        return kind
    encoder = config.encoder
    causal = encoder.get("att_context_style") == "chunked_limited" or encoder.get("causal_downsampling", False)
    return "cache_aware" if causal else "buffered"


def _cheap_n_best(decoding: DictConfig, pipeline: str) -> int:
    """Return the longest n-best list without extra time: 1 for word graphs and for decoding every buffer anew."""
    spec = STRATEGIES.get(str(decoding.strategy))
    if spec is None or spec.section != "beam" or pipeline == "buffered rnnt":
        return 1
    return min(N_BEST, int(OmegaConf.select(decoding, "beam.beam_size", default=1)))


def _config_of(
    model: str, decoding: DictConfig, options: PipelineOptions, kind: str, head: str, device: torch.device
) -> DictConfig:
    """Return a pipeline config from NeMo's YAML files for streaming inference."""
    streaming: dict[str, Any] = {
        "sample_rate": 16000, "batch_size": options.max_streams, "num_slots": options.max_streams,
        "request_type": "frame", "word_boundary_tolerance": 4, "padding_mode": "right", "att_context_size": None,
        "use_cache": True, "use_feat_cache": True, "stateful": False, "left_padding_size": options.left_seconds,
        "right_padding_size": options.right_seconds, "chunk_size": options.chunk_seconds,
        "n_best": options.max_n_best or 1,
    }  # fmt: skip
    if OmegaConf.select(decoding, "beam.confidence_map") is not None:  # transducers compute confidence on request
        OmegaConf.update(decoding, "confidence_cfg.preserve_frame_confidence", True, force_add=True)
    confidence = OmegaConf.merge(nemo_config(head)["confidence_cfg"], decoding.get("confidence_cfg") or {})
    return OmegaConf.create(
        {
            "asr": {
                "model_name": model, "device": device.type, "device_id": device.index or 0, "decoding": decoding,
                "compute_dtype": "float32", "use_amp": False,
            },
            "pipeline_type": kind, "asr_decoding_type": head, "streaming": streaming,
            "confidence": {**confidence, "exclude_blank": True},
            "endpointing": {
                "stop_history_eou": milliseconds(options.end_silence), "residue_tokens_at_end": 2,
                "rules": options.rules,
            },
            "itn": {"left_padding_size": 4, "batch_size": 32, "n_jobs": 1},
            "enable_pnc": False, "enable_itn": False, "enable_nmt": False, "asr_output_granularity": "word",
            "cache_dir": None, "lang": None, "return_tail_result": False, "matmul_precision": "high",
            "log_level": logging.ERROR,
        }
    )  # fmt: skip


def _words(segments: Sequence[Any] | None, fitted: ConfidenceMap | None) -> tuple[Word, ...]:
    segments = segments or ()
    raw = [float(segment.conf) for segment in segments]
    # NeMo sets 0 where it has no confidence
    values = calibrated(raw, fitted) if fitted and any(raw) else [None] * len(raw)
    return tuple(
        Word(
            segment.text.strip(), max(round(float(segment.start), 3), 0.0), round(float(segment.end), 3),
            confidence=value,
        )
        for segment, value in zip(segments, values, strict=True)
    )  # fmt: skip
