"""`FlexCTCBeam` decodes with flexctc_beam: it checks inputs and builds results."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

from nemo_gpu_decoding.checks import check_int, given_or_default
from nemo_gpu_decoding.fusion.batch import FusionArrays, FusionLabels
from nemo_gpu_decoding.fusion.fusion import Fusion
from nemo_gpu_decoding.search.committed import joined
from nemo_gpu_decoding.search.decoder import Decoder
from nemo_gpu_decoding.search.engine import Engine, Streams
from nemo_gpu_decoding.search.flexctc_beam import cuda_engine
from nemo_gpu_decoding.search.flexctc_beam.config import FlexCTCConfig
from nemo_gpu_decoding.search.flexctc_beam.cpu_engine import CPUEngine
from nemo_gpu_decoding.search.flexctc_beam.finish import FlexCTCNBest, without_gaps
from nemo_gpu_decoding.search.flexctc_beam.records import MERGE, SearchParams
from nemo_gpu_decoding.search.numerics import TEXT_SCORES
from nemo_gpu_decoding.search.result import NBest, Path, ScoreParts, new_frozen

NO_END = "the LM gives no hypothesis a finite end-of-sentence weight; scores are without it"


class FlexCTCBeam(Decoder[FlexCTCConfig, NBest]):
    """A decoder that runs CTC beam search in batches, with n-gram LM and phrase boosting [FlexCTC].

    Args:
        vocab_size: V, number of tokens without the blank.
        blank_id: column of the blank in the log-probs, 0 .. V. In NeMo's models it is V.
        config: see `FlexCTCConfig`.
        fusion: LM and boosting tree, whose labels number the tokens without the blank. If blank_id is V, a label is
            the token's id; with a smaller blank_id, the ids above it are shifted down by one.

    Example:
        >>> decoder = FlexCTCBeam(2, blank_id=2, config=FlexCTCConfig(beam_size=4))
        >>> log_probs = torch.log_softmax(torch.randn(1, 50, 3), dim=-1)
        >>> tokens = decoder.decode(log_probs, [50])[0].best.tokens

    Raises:
        ValueError: an argument is out of range or does not fit the other arguments.
    """

    strategy = "flexctc_beam"

    def __init__(
        self, vocab_size: int, blank_id: int, config: FlexCTCConfig | None = None, fusion: Fusion | None = None
    ) -> None:
        check_int("vocab_size", vocab_size, 1)
        check_int("blank_id", blank_id, 0, vocab_size)
        config = given_or_default("config", config, FlexCTCConfig)
        super().__init__(config, fusion, FusionLabels(vocab_size, blank_id=blank_id))
        self.vocab_size, self.blank_id = vocab_size, blank_id
        self._params = SearchParams(
            blank_id=blank_id,
            vocab_size=vocab_size,
            merge=MERGE[self.config.merge],
            beam_beta=np.float32(self.config.beam_beta),
            threshold=np.float32(self.config.beam_threshold),
            recombines=False,
        )

    def with_options(self, config: FlexCTCConfig, fusion: Fusion) -> FlexCTCBeam:
        return FlexCTCBeam(self.vocab_size, self.blank_id, config, fusion)

    def _cpu_engine(self, streams: Streams) -> Engine:
        return CPUEngine(self.config, self._params, streams)

    def _cuda_engine(self, streams: Streams, device: torch.device) -> Engine:
        return cuda_engine.CUDAEngine(self.config, self._params, streams, device)

    def _why_not_cuda(self, streams: Streams, device: torch.device) -> str | None:
        return cuda_engine.why_not(self.config.beam_size, self.vocab_size + 1, device)

    def _most_partial(self) -> tuple[int, str]:
        return self.config.beam_size, " (beam_size)"

    def _results(
        self, streams: Streams, engine: Engine, rows: Sequence[int], n_best: int, *, final: bool
    ) -> list[NBest]:
        hypotheses: FlexCTCNBest = engine.results(rows, n_best, final=final)
        ended = final & ~hypotheses.without_final
        paths = self._paths(hypotheses, ended, streams.fusion.arrays)
        frames, forbidden = hypotheses.frames.tolist(), (final & hypotheses.without_final).tolist()
        return [
            new_frozen(
                NBest,
                paths=paths[r],
                num_frames=frames[r],
                notes=(NO_END,) if forbidden[r] else (),
                committed=None if final else self._committed(hypotheses, r),
            )
            for r in range(len(rows))
        ]

    def _committed(self, hypotheses: FlexCTCNBest, r: int) -> int:
        """Return the number of tokens of the best hypothesis that all live hypotheses share."""
        frames = hypotheses.traces.frames[r, 0, : hypotheses.traces.lengths[r, 0]]
        return len(hypotheses.committed[r]) + int(np.searchsorted(frames, hypotheses.shared[r]))

    def _paths(self, hypotheses: FlexCTCNBest, ended: np.ndarray, fusions: FusionArrays) -> list[tuple[Path, ...]]:
        """Return each utterance's hypotheses; scores include final weights where `ended` [R] is True."""
        fused = np.zeros(hypotheses.order.shape, TEXT_SCORES)
        for r, committed in enumerate(hypotheses.committed):
            if committed.frames:
                fused[r] = committed.scores
        heads = [tokens.head() for tokens in hypotheses.committed]
        before = np.array(list(map(len, hypotheses.committed)))
        arrays = hypotheses.rows, hypotheses.order, hypotheses.scores, hypotheses.traces, fused, before, ended
        numbers, tokens, confidence = without_gaps(*arrays, float(self.config.beam_beta), self._params, fusions)
        results: list[list[Path]] = [[] for _ in heads]
        for r, n, begin, end, score, acoustic, lm, boosting, insertion in numbers.tolist():
            path = new_frozen(
                Path,
                tokens=tokens[0, begin:end],
                frames=tokens[1, begin:end],
                repeats=tokens[2, begin:end],
                token_confidence=confidence[begin:end],
                score=score,
                parts=new_frozen(ScoreParts, acoustic=acoustic, lm=lm, boosting=boosting, insertion=insertion),
                **self._alignment(hypotheses, r, n),
            )
            results[r].append(joined(heads[r], path))
        return [tuple(paths) for paths in results]

    def _alignment(self, hypotheses: FlexCTCNBest, r: int, n: int) -> dict[str, np.ndarray]:
        """Return a path's alignment after the committed frames, or {} if the config lacks `alignments`."""
        if not self.config.alignments:
            return {}
        traces, part = hypotheses.traces, slice(int(hypotheses.frames[r]) - hypotheses.committed[r].frames)
        return {
            "alignment": traces.alignment[r, n, part].copy(),
            "alignment_log_probs": traces.alignment_log_probs[r, n, part].copy(),
        }
