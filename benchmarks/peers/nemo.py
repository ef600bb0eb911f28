"""NeMo's own decoders: `beam_batch` and `greedy_batch` of CTC; `malsd_batch`, `maes_batch` and `greedy_batch` of RNN-T
and TDT; on a GPU with CUDA graphs. And its encoders.

NeMo's beams go on adding scores in padded frames, so that a result may depend on the batch. They are
therefore timed on the batch, but compared by utterances decoded alone.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from torch.nn.utils.rnn import pad_sequence

from benchmarks.files import cached, content_key
from benchmarks.options import BenchOptions
from benchmarks.peers.base import Hypothesis, Peer, Ready, Setting, collapse, device_of
from benchmarks.tasks import Task
from nemo_gpu_decoding import LSTMNetworks


def ctc_beam(options: BenchOptions, task: Task, setting: Setting) -> Ready:
    silence_nemo()
    from nemo.collections.asr.parts.submodules.ctc_beam_decoding import BeamBatchedCTCInfer

    fusion = _ctc_fusion(task, setting)
    if setting.lm:
        fusion["beam_beta"] = task.weights.beam_beta
    decoder = BeamBatchedCTCInfer(
        blank_index=task.vocab_size, beam_size=setting.beam_size, allow_cuda_graphs=options.device != "cpu", **fusion
    )
    run, mode = _runner(decoder, task), decoder.search_algorithm.cuda_graphs_mode

    def hypotheses(log_probs: torch.Tensor, lengths: torch.Tensor) -> list[list[Hypothesis]]:
        return [[Hypothesis(h.y_sequence.tolist(), float(h.score))] for h in run(log_probs, lengths)]

    return Ready(run, _tokens, hypotheses, graphs=None if mode is None else mode.value)


def ctc_greedy(options: BenchOptions, task: Task, setting: Setting) -> Ready:
    silence_nemo()
    from nemo.collections.asr.parts.submodules.ctc_greedy_decoding import GreedyBatchedCTCInfer

    decoder = GreedyBatchedCTCInfer(blank_id=task.vocab_size, **_ctc_fusion(task, setting))
    run = _runner(decoder, task)
    return Ready(run, lambda found: [collapse(labels, task.vocab_size) for labels in _tokens(found)])


def _ctc_fusion(task: Task, setting: Setting) -> dict[str, Any]:
    fusion: dict[str, Any] = {}
    if setting.lm:
        fusion |= {"ngram_lm_model": str(ngram_lm(task)), "ngram_lm_alpha": task.weights.lm_weight}
    if setting.phrases:
        fusion |= {
            "boosting_tree": _phrases(task, setting), "boosting_tree_alpha": task.weights.boosting_weight,
            "tokenizer": _tokenizer(task),
        }  # fmt: skip
    return fusion


def transducer_beam(search: str, options: BenchOptions, task: Task, setting: Setting) -> Ready:
    """`search` is NeMo's name of the strategy; options are NeMo's defaults, late pruning for all."""
    silence_nemo()
    from nemo.collections.asr.parts.submodules.rnnt_beam_decoding import BeamBatchedRNNTInfer
    from nemo.collections.asr.parts.submodules.tdt_beam_decoding import BeamBatchedTDTInfer

    decoder = _transducer(
        BeamBatchedRNNTInfer, BeamBatchedTDTInfer, options, task, beam_size=setting.beam_size, search_type=search,
        blank_lm_score_mode="lm_weighted_full", pruning_mode="late", allow_cuda_graphs=options.device != "cpu",
        **_fusion_models(options, task, setting),
    )  # fmt: skip
    corrected: Any = nullcontext
    run, note = _runner(decoder, task), ""
    if search == "maes_batch":  # is timed as it is, but compared after a correction
        from tests.oracles.nemo_patched import patched

        corrected, note = patched, "; compared with maes_batch after mending its mask of hypotheses to expand"

    def hypotheses(inputs: torch.Tensor, lengths: torch.Tensor) -> list[list[Hypothesis]]:
        decoder.return_best_hypothesis = False
        with corrected(decoder):
            found = run(inputs, lengths)
        decoder.return_best_hypothesis = True
        return [
            [Hypothesis(h.y_sequence.tolist(), float(h.score)) for h in n_best.n_best_hypotheses] for n_best in found
        ]

    return Ready(run, _tokens, hypotheses, note)


def transducer_unbatched(search: str, options: BenchOptions, task: Task, setting: Setting) -> Ready:
    """`alsd` and `maes`, which decode one utterance after the other, with early pruning and `no_score` for blanks.

    The LM is KenLM's. `alsd` takes none.
    """
    silence_nemo()
    from nemo.collections.asr.parts.submodules.rnnt_beam_decoding import BeamRNNTInfer
    from nemo.collections.asr.parts.submodules.tdt_beam_decoding import BeamTDTInfer

    assert task.transducer is not None
    lm: dict[str, Any] = {}
    if setting.lm:
        import kenlm

        lm = {"ngram_lm_model": kenlm.Model(str(task.lm)), "ngram_lm_alpha": task.weights.lm_weight}
    chosen = {"beam_size": setting.beam_size, "search_type": search, **lm}
    modules, durations = task.transducer.nemo(), task.transducer.durations
    if durations:
        decoder = BeamTDTInfer(*modules, durations=list(durations), **chosen)
    else:
        decoder = BeamRNNTInfer(*modules, **chosen)
    decoder.set_decoding_type("subword")
    return Ready(_runner(decoder, task), _tokens)


def transducer_greedy(options: BenchOptions, task: Task, setting: Setting) -> Ready:
    silence_nemo()
    from nemo.collections.asr.parts.submodules.rnnt_greedy_decoding import (
        GreedyBatchedRNNTInfer,
        GreedyBatchedTDTInfer,
    )

    decoder = _transducer(
        GreedyBatchedRNNTInfer, GreedyBatchedTDTInfer, options, task, use_cuda_graph_decoder=options.device != "cpu",
        **_fusion_models(options, task, setting),
    )  # fmt: skip
    return Ready(_runner(decoder, task), _tokens)


def live_greedy(options: BenchOptions, task: Task) -> LiveCTC | LiveTransducer:
    """Greedy decoding of live streams in NeMo's pipelines; see `Live` in live.py."""
    silence_nemo()
    return LiveCTC(task) if task.transducer is None else LiveTransducer(options, task)


class LiveCTC:
    """As in `CacheAwareCTCPipeline`: in a step one stream after the other, without confidences."""

    at_once: int | None = None

    def __init__(self, task: Task) -> None:
        from nemo.collections.asr.inference.streaming.decoders.greedy.greedy_ctc_decoder import CTCGreedyDecoder

        self._decoder = CTCGreedyDecoder(list(task.vocabulary.pieces))

    def begin(self) -> dict[str, Any]:
        return {"tokens": [], "last": None}

    def step(self, streams: Sequence[Any], chunks: Sequence[torch.Tensor], over: Sequence[bool]) -> list[Any]:
        for stream, chunk in zip(streams, chunks, strict=True):
            found = self._decoder(chunk, compute_confidence=False, previous=stream["last"])
            stream["tokens"] += found["tokens"]
            stream["last"] = found["labels"][-1]
        return self.end([stream for stream, is_over in zip(streams, over, strict=True) if is_over])

    def end(self, streams: Sequence[Any]) -> list[Any]:
        return [stream["tokens"] for stream in streams]

    def whole(self, utterances: Sequence[torch.Tensor]) -> list[Any]:
        streams = [self.begin() for _ in utterances]
        return self.step(streams, utterances, [True] * len(streams))

    def same(self, result: Any, other: Any) -> bool:
        return result == other


class LiveTransducer(LiveCTC):
    """As in `CacheAwareRNNTPipeline`: the streams of a step are a batch; hypotheses carry their state."""

    def __init__(self, options: BenchOptions, task: Task) -> None:
        from nemo.collections.asr.parts.submodules.rnnt_greedy_decoding import (
            GreedyBatchedRNNTInfer,
            GreedyBatchedTDTInfer,
        )

        use_graphs = {"use_cuda_graph_decoder": options.device != "cpu"}
        self._decode = _transducer(GreedyBatchedRNNTInfer, GreedyBatchedTDTInfer, options, task, **use_graphs)

    def step(self, streams: Sequence[Any], chunks: Sequence[torch.Tensor], over: Sequence[bool]) -> list[Any]:
        from nemo.core.classes import typecheck

        inputs, lengths = pad_sequence(list(chunks), batch_first=True), torch.tensor([len(chunk) for chunk in chunks])
        with typecheck.disable_checks(), torch.inference_mode():
            (found,) = self._decode(
                encoder_output=inputs.transpose(1, 2), encoded_lengths=lengths.to(inputs.device),
                partial_hypotheses=[stream["last"] for stream in streams],
            )  # fmt: skip
        for stream, hypothesis in zip(streams, found, strict=True):
            stream["last"] = hypothesis
        return self.end([stream for stream, is_over in zip(streams, over, strict=True) if is_over])

    def end(self, streams: Sequence[Any]) -> list[Any]:
        return [stream["last"].y_sequence.tolist() for stream in streams]


def _transducer(rnnt: Any, tdt: Any, options: BenchOptions, task: Task, **chosen: Any) -> Any:
    """NeMo's decoder of RNN-T, or of TDT, as the task asks, with its networks."""
    assert task.transducer is not None
    durations = task.transducer.durations
    modules = [module.to(device_of(options, task)) for module in task.transducer.nemo()]
    common = {"blank_index": task.vocab_size, "max_symbols_per_step": options.max_symbols}
    if durations:
        return tdt(*modules, durations=list(durations), **common, **chosen)
    return rnnt(*modules, **common, **chosen)


def _fusion_models(options: BenchOptions, task: Task, setting: Setting) -> dict[str, Any]:
    models, weights = [], []
    if setting.lm:
        from nemo.collections.asr.parts.submodules.ngram_lm import NGramGPULanguageModel

        models.append(NGramGPULanguageModel.from_file(str(ngram_lm(task)), vocab_size=task.vocab_size))
        weights.append(task.weights.lm_weight)
    if setting.phrases:
        from nemo.collections.asr.parts.context_biasing import GPUBoostingTreeModel

        models.append(GPUBoostingTreeModel.from_config(_phrases(task, setting), tokenizer=_tokenizer(task)))
        weights.append(task.weights.boosting_weight)
    models = [model.to(device_of(options, task)) for model in models]
    return {"fusion_models": models, "fusion_models_alpha": weights} if models else {}


def _phrases(task: Task, setting: Setting) -> Any:
    from nemo.collections.asr.parts.context_biasing import BoostingTreeModelConfig

    return BoostingTreeModelConfig(key_phrases_list=task.phrases(setting.phrases))


def _tokenizer(task: Task) -> Any:
    """The two members of a tokenizer that NeMo's boosting tree asks for."""
    return SimpleNamespace(vocab_size=task.vocab_size, text_to_ids=task.vocabulary.tokenize)


def _runner(decoder: Any, task: Task) -> Callable[[torch.Tensor, torch.Tensor], Any]:
    """What decodes a batch as NeMo's models do."""
    from nemo.core.classes import typecheck

    def run(inputs: torch.Tensor, lengths: torch.Tensor) -> Any:
        with typecheck.disable_checks(), torch.inference_mode(task.transducer is not None):
            if task.transducer is None:
                return decoder(decoder_output=inputs, decoder_lengths=lengths)[0]
            return decoder(encoder_output=inputs.transpose(1, 2), encoded_lengths=lengths)[0]

    return run


def _tokens(found: Any) -> list[Any]:
    return [h.y_sequence.tolist() for h in found]


def ngram_lm(task: Task) -> Path:
    """The token LM in NeMo's own format: reading an ARPA takes NeMo 20 s, so it is converted once."""

    def convert(path: Path) -> None:
        from nemo.collections.asr.parts.submodules.ngram_lm import NGramGPULanguageModel

        NGramGPULanguageModel.from_file(str(task.lm), vocab_size=task.vocab_size).save_to(str(path))

    assert task.lm is not None
    return cached(f"{content_key(task.lm)}-{task.vocab_size}.nemo", convert)


def silence_nemo() -> None:
    from nemo.utils import logging as nemo_logging

    nemo_logging.setLevel(logging.ERROR)


# ----------------------------------------------------------------------------------------- networks


def nemo_modules(networks: LSTMNetworks) -> tuple[Any, Any]:
    """NeMo's prediction network and joint with the weights of these networks."""
    from nemo.collections.asr.modules.rnnt import RNNTDecoder, RNNTJoint

    vocab_size, hidden = networks.vocab_size, networks.lstm.hidden_size
    decoder = RNNTDecoder({"pred_hidden": hidden, "pred_rnn_layers": networks.lstm.num_layers}, vocab_size=vocab_size)
    sizes = {
        "encoder_hidden": networks.encoder_size,
        "pred_hidden": hidden,
        "joint_hidden": networks.encoder_projection.out_features,
        "activation": "relu",
    }
    joint = RNNTJoint(sizes, num_classes=vocab_size, num_extra_outputs=len(networks.durations))
    output: Any = networks.output
    for theirs, ours in (
        (decoder.prediction["embed"], networks.embedding),
        (decoder.prediction["dec_rnn"].lstm, networks.lstm),
        (joint.enc, networks.encoder_projection),
        (joint.pred, networks.prediction_projection),
        (joint.joint_net[-1], output[-1]),
    ):
        theirs.load_state_dict(ours.state_dict())
    return decoder.eval(), joint.eval()


def random_conformer(
    layers: int, width: int, vocab_size: int | None, bands: int, subsampling: int, device: torch.device
) -> Callable[[torch.Tensor, torch.Tensor], torch.Tensor]:
    """A FastConformer, as NeMo's published ones are built, untrained.

    Args:
        vocab_size: of its CTC head; None: it has none.

    Returns:
        what makes log-probs [B, T, V + 1], or without a head [B, width, T], of features [B, mel bands, frames] and
        their lengths [B].
    """
    from nemo.collections.asr.modules import ConformerEncoder, ConvASRDecoder

    encoder = ConformerEncoder(
        feat_in=bands, feat_out=-1, n_layers=layers, d_model=width, subsampling="dw_striding",
        subsampling_factor=subsampling, subsampling_conv_channels=min(256, width),
        self_attention_model="rel_pos", n_heads=8, conv_kernel_size=9, xscaling=False,
    )  # fmt: skip
    encoder = encoder.eval().to(device)
    if vocab_size is None:
        return lambda features, lengths: encoder(audio_signal=features, length=lengths)[0]
    head = ConvASRDecoder(feat_in=width, num_classes=vocab_size).eval().to(device)
    return lambda features, lengths: head(encoder_output=encoder(audio_signal=features, length=lengths)[0])


NEMO: dict[str, Any] = {
    "needs": ("nemo",), "install": "pip install '.[nemo]'", "multithreaded": True,
}  # fmt: skip
BEAM_BATCH, GREEDY_BATCH = Peer("nemo", ctc_beam, **NEMO), Peer("nemo_greedy", ctc_greedy, **NEMO)
MALSD = Peer("nemo_malsd", partial(transducer_beam, "malsd_batch"), **NEMO)
MAES = Peer("nemo_maes", partial(transducer_beam, "maes_batch"), **NEMO)
ALSD_UNBATCHED, MAES_UNBATCHED = (
    Peer(f"nemo_{search}_unbatched", partial(transducer_unbatched, search), ("nemo", "kenlm"), NEMO["install"], True)
    for search in ("alsd", "maes")
)
GREEDY = Peer("nemo_greedy", transducer_greedy, **NEMO)
GREEDY_FUSION_CTC, GREEDY_FUSION = (Peer("greedy_fusion", p, **NEMO) for p in (ctc_greedy, transducer_greedy))
