"""NeMo's transducer decoders: `malsd_batch`, `maes_batch` and `greedy_batch`, for RNN-T and TDT.

They are timed on the batch, but compared by utterances decoded alone.
"""

from __future__ import annotations

from contextlib import nullcontext
from functools import partial
from typing import Any

import torch

from nemo_gpu_decoding import LSTMNetworks
from nemo_gpu_decoding.bench.options import BenchOptions
from nemo_gpu_decoding.bench.peers.base import Hypothesis, Peer, Ready, Setting
from nemo_gpu_decoding.bench.peers.nemo import NEMO, NemoTokenizer, ngram_lm, silence_nemo
from nemo_gpu_decoding.bench.tasks import Task, Transducer


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


def beam(search: str, options: BenchOptions, task: Task, setting: Setting) -> Ready:
    """`search` is NeMo's name of the strategy; options are NeMo's defaults, late pruning for all."""
    silence_nemo()
    from nemo.collections.asr.parts.submodules.rnnt_beam_decoding import BeamBatchedRNNTInfer
    from nemo.collections.asr.parts.submodules.tdt_beam_decoding import BeamBatchedTDTInfer

    on_gpu = options.device != "cpu"
    durations = _durations(task)
    decoder = (BeamBatchedTDTInfer if durations else BeamBatchedRNNTInfer)(
        *_modules(options, task),
        blank_index=task.vocab_size,
        beam_size=setting.beam_size,
        search_type=search,
        max_symbols_per_step=options.max_symbols,
        blank_lm_score_mode="lm_weighted_full",
        pruning_mode="late",
        allow_cuda_graphs=on_gpu,
        **durations,
        **_fusion(options, task, setting),
    )
    patched, note = nullcontext, ""
    if search == "maes_batch":
        patched, note = _patched_maes()

    def hypotheses(inputs: torch.Tensor, lengths: torch.Tensor) -> list[list[Hypothesis]]:
        decoder.return_best_hypothesis = False
        with patched(decoder):
            found = _run(decoder, inputs, lengths)
        decoder.return_best_hypothesis = True
        return [
            [Hypothesis(h.y_sequence.tolist(), float(h.score)) for h in n_best.n_best_hypotheses] for n_best in found
        ]

    return Ready(partial(_run, decoder), _tokens, hypotheses, note)


def _patched_maes() -> tuple[Any, str]:
    """What makes NeMo's `maes_batch` right where it is not, for comparing; it is timed as it is."""
    try:
        from tests.oracles.nemo_patched import mended
    except ImportError:  # an installed package has no tests
        return nullcontext, "; compared with maes_batch as it is, whose mask of hypotheses is wrong"
    return mended, "; compared with maes_batch after mending its mask of hypotheses to expand"


def greedy(options: BenchOptions, task: Task, setting: Setting) -> Ready:
    silence_nemo()
    from nemo.collections.asr.parts.submodules.rnnt_greedy_decoding import (
        GreedyBatchedRNNTInfer,
        GreedyBatchedTDTInfer,
    )

    durations = _durations(task)
    decoder = (GreedyBatchedTDTInfer if durations else GreedyBatchedRNNTInfer)(
        *_modules(options, task),
        blank_index=task.vocab_size,
        max_symbols_per_step=options.max_symbols,
        use_cuda_graph_decoder=options.device != "cpu",
        **durations,
    )
    return Ready(partial(_run, decoder), _tokens)


def _tokens(found: Any) -> list[Any]:
    return [h.y_sequence.tolist() for h in found]


def _durations(task: Task) -> dict[str, list[int]]:
    durations = _transducer(task).durations
    return {"durations": list(durations)} if durations else {}


def _modules(options: BenchOptions, task: Task) -> list[Any]:
    return [module.to(options.device) for module in _transducer(task).nemo()]


def _transducer(task: Task) -> Transducer:
    assert task.transducer is not None
    return task.transducer


def _fusion(options: BenchOptions, task: Task, setting: Setting) -> dict[str, Any]:
    models, weights = [], []
    if setting.lm:
        from nemo.collections.asr.parts.submodules.ngram_lm import NGramGPULanguageModel

        file = str(ngram_lm(task))
        models.append(NGramGPULanguageModel.from_file(file, vocab_size=task.vocab_size))
        weights.append(task.weights.lm_weight)
    if setting.phrases:
        from nemo.collections.asr.parts.context_biasing import BoostingTreeModelConfig, GPUBoostingTreeModel

        config = BoostingTreeModelConfig(key_phrases_list=task.phrases(setting.phrases))
        tokenizer = NemoTokenizer(task.vocabulary)
        models.append(GPUBoostingTreeModel.from_config(config, tokenizer=tokenizer))
        weights.append(task.weights.boosting_weight)
    models = [model.to(options.device) for model in models]
    return {"fusion_models": models, "fusion_models_alpha": weights} if models else {}


def _run(decoder: Any, inputs: torch.Tensor, lengths: torch.Tensor) -> Any:
    from nemo.core.classes import typecheck

    with typecheck.disable_checks(), torch.inference_mode():  # as NeMo's models call it
        return decoder(encoder_output=inputs.transpose(1, 2), encoded_lengths=lengths)[0]


MALSD = Peer("nemo_malsd", partial(beam, "malsd_batch"), **NEMO)
MAES = Peer("nemo_maes", partial(beam, "maes_batch"), **NEMO)
GREEDY = Peer("nemo_greedy", greedy, **NEMO)
