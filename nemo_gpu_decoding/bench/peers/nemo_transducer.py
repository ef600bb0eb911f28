"""NeMo's transducer decoders: `malsd_batch`, `maes_batch` and `greedy_batch`, for RNN-T and TDT.

They are timed on the batch, but compared by utterances decoded alone.
"""

from __future__ import annotations

from typing import Any

import torch

from nemo_gpu_decoding.bench.peers.base import Hypothesis, Output, Peer, ScoringPeer, Setting
from nemo_gpu_decoding.bench.peers.nemo import NemoTokenizer, ngram_lm, silence_nemo
from nemo_gpu_decoding.bench.transducer.task import TransducerTask
from nemo_gpu_decoding.search.transducer.networks import LSTMNetworks


def nemo_modules(networks: LSTMNetworks) -> tuple[Any, Any]:
    """NeMo's prediction network and joint with the weights of these networks."""
    from nemo.collections.asr.modules.rnnt import RNNTDecoder, RNNTJoint

    vocab_size, hidden = networks.vocab_size, networks.lstm.hidden_size
    decoder = RNNTDecoder(
        {"pred_hidden": hidden, "pred_rnn_layers": networks.lstm.num_layers}, vocab_size=vocab_size
    )
    sizes = {
        "encoder_hidden": networks.encoder_size,
        "pred_hidden": hidden,
        "joint_hidden": networks.encoder_projection.out_features,
        "activation": "relu",
    }
    joint = RNNTJoint(sizes, num_classes=vocab_size, num_extra_outputs=len(networks.durations))
    for theirs, ours in (
        (decoder.prediction["embed"], networks.embedding),
        (decoder.prediction["dec_rnn"].lstm, networks.lstm),
        (joint.enc, networks.encoder_projection),
        (joint.pred, networks.prediction_projection),
        (joint.joint_net[-1], networks.output[-1]),
    ):
        theirs.load_state_dict(ours.state_dict())
    return decoder.eval(), joint.eval()


class _NemoTransducer(Peer):
    needs = ("nemo",)
    install = "pip install 'nemo-gpu-decoding[nemo]'"
    multithreaded = True
    _decoder: Any

    def results(self, inputs: torch.Tensor, lengths: torch.Tensor) -> Any:
        from nemo.core.classes import typecheck

        encoded = inputs.transpose(1, 2)
        with typecheck.disable_checks(), torch.inference_mode():  # as NeMo's models call it
            return self._decoder(encoder_output=encoded, encoded_lengths=lengths)[0]


class NemoTransducerBeam(_NemoTransducer, ScoringPeer):
    """`search` is NeMo's name of the strategy; options are NeMo's defaults, late pruning for all."""

    search: str

    def prepare(self, task: TransducerTask, setting: Setting) -> None:
        silence_nemo()
        from nemo.collections.asr.parts.submodules.rnnt_beam_decoding import BeamBatchedRNNTInfer
        from nemo.collections.asr.parts.submodules.tdt_beam_decoding import BeamBatchedTDTInfer

        durations = {"durations": list(task.networks.durations)} if task.networks.durations else {}
        self._decoder = (BeamBatchedTDTInfer if durations else BeamBatchedRNNTInfer)(
            *task.nemo_modules(),
            blank_index=task.vocab_size,
            beam_size=setting.beam_size,
            search_type=self.search,
            max_symbols_per_step=self.options.max_symbols,
            blank_lm_score_mode="lm_weighted_full",
            pruning_mode="late",
            allow_cuda_graphs=False,
            **durations,
            **self._fusion(task, setting),
        )

    def _fusion(self, task: TransducerTask, setting: Setting) -> dict[str, Any]:
        models, weights = [], []
        if setting.lm:
            from nemo.collections.asr.parts.submodules.ngram_lm import NGramGPULanguageModel

            assert task.lm is not None
            file = str(ngram_lm(task.lm, task.vocab_size))
            models.append(NGramGPULanguageModel.from_file(file, vocab_size=task.vocab_size))
            weights.append(self.options.lm_weight)
        if setting.phrases:
            from nemo.collections.asr.parts.context_biasing import (
                BoostingTreeModelConfig,
                GPUBoostingTreeModel,
            )

            config = BoostingTreeModelConfig(key_phrases_list=task.phrases(setting.phrases))
            tokenizer = NemoTokenizer(task.vocabulary)
            models.append(GPUBoostingTreeModel.from_config(config, tokenizer=tokenizer))
            weights.append(self.options.boosting_weight)
        return {"fusion_models": models, "fusion_models_alpha": weights} if models else {}

    def hypotheses(self, inputs: torch.Tensor, lengths: torch.Tensor) -> list[Hypothesis]:
        found = self.results(inputs, lengths)
        return [Hypothesis(h.y_sequence.tolist(), float(h.score)) for h in found]

    def n_best_alone(self, inputs: torch.Tensor, lengths: torch.Tensor) -> list[list[Hypothesis]]:
        """All hypotheses of every utterance by itself, best first."""
        self._decoder.return_best_hypothesis = False
        found = []
        for utterance, length in zip(inputs, lengths.tolist(), strict=True):
            (n_best,) = self.results(utterance[None, :length].contiguous(), torch.tensor([length]))
            found.append(
                [Hypothesis(h.y_sequence.tolist(), float(h.score)) for h in n_best.n_best_hypotheses]
            )
        self._decoder.return_best_hypothesis = True
        return found


class NemoMALSD(NemoTransducerBeam):
    name = "nemo_malsd"
    search = "malsd_batch"


class NemoMAES(NemoTransducerBeam):
    """NeMo has it for RNN-T only, with an LM or with boosting: of several it takes the first one."""

    name = "nemo_maes"
    search = "maes_batch"

    def n_best_alone(self, inputs: torch.Tensor, lengths: torch.Tensor) -> list[list[Hypothesis]]:
        from tests.oracles.nemo_patched import mended

        with mended(self._decoder):
            return super().n_best_alone(inputs, lengths)


class NemoTransducerGreedy(_NemoTransducer):
    name = "nemo_greedy"

    def prepare(self, task: TransducerTask, setting: Setting) -> None:
        silence_nemo()
        from nemo.collections.asr.parts.submodules.rnnt_greedy_decoding import (
            GreedyBatchedRNNTInfer,
            GreedyBatchedTDTInfer,
        )

        durations = {"durations": list(task.networks.durations)} if task.networks.durations else {}
        self._decoder = (GreedyBatchedTDTInfer if durations else GreedyBatchedRNNTInfer)(
            *task.nemo_modules(),
            blank_index=task.vocab_size,
            max_symbols_per_step=self.options.max_symbols,
            use_cuda_graph_decoder=False,
            **durations,
        )

    def decode(self, inputs: torch.Tensor, lengths: torch.Tensor) -> list[Output]:
        return [h.y_sequence.tolist() for h in self.results(inputs, lengths)]
