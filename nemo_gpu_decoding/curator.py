"""NeMo Curator: an adapter of its `ASRStage` that decodes as `nemo-gpu-decoding transcribe` does.

The stage reads and resamples audio, resolves languages and writes columns; the adapter is handed waveforms.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

import numpy as np

from nemo_gpu_decoding.cluster.transcripts import details_of

if TYPE_CHECKING:
    from nemo_curator.models.asr.base import ASRResult

    from nemo_gpu_decoding.cluster.workers import Loaded


@dataclass
class BeamASRAdapter:
    """Curator's `ASRAdapter` with the strategies, LMs, phrases and second pass of this package.

    Args:
        model_id: a .nemo file, at the same path on all machines, or the name of a pretrained model.
        options: those of `transcribe` that are about decoding, by their names: strategy, preset, lm, beam_size,
            n_best, timestamps, rescore, decoding and so on.

    Raises:
        ValueError: an option is not what it should be.
    """

    model_id: str
    options: dict[str, Any] = field(default_factory=dict)
    _loaded: Loaded | None = field(default=None, init=False, repr=False)

    def __post_init__(self) -> None:
        from nemo_gpu_decoding.cli.decoding import DecodingOptions
        from nemo_gpu_decoding.cli.transcribe import TranscribeOptions

        of_decoding = [*DecodingOptions.__dataclass_fields__, "head", "n_best", "timestamps"]
        known = {*of_decoding, "rescore", "rescore_weight", "rescore_lm_share"} - {"model", "device", "batch_size"}
        for name in self.options:
            if name not in known:
                raise ValueError(f"options has {name}, expected some of {', '.join(sorted(known))}")
        self._checked = TranscribeOptions(model=self.model_id, **self.options)

    def download_weights_on_node(self) -> None:
        """Fetch a pretrained model into NeMo's cache."""
        from nemo_gpu_decoding.nemo_plugin.model import check_model_file, import_nemo

        if not check_model_file(self.model_id):
            import_nemo(self._checked.verbose).from_pretrained(self.model_id, return_model_file=True)

    def load_model(self, *, num_gpus: int) -> None:
        """Load the model with its decoding onto the GPU of this worker, or the CPU if it has none."""
        from nemo_gpu_decoding.cli.transcribe import load

        if num_gpus not in (0, 1):
            raise ValueError(f"num_gpus is {num_gpus}, expected 0 or 1")
        if self._loaded is None:
            self._loaded = load(replace(self._checked, device="cuda" if num_gpus else "cpu"))

    def unload_model(self) -> None:
        """Forget the model, and give the memory of a GPU back."""
        import torch

        self._loaded = None
        if torch.cuda.is_available():
            torch.cuda.empty_cache()

    def transcribe_batch(self, items: list[dict[str, Any]]) -> list[ASRResult]:
        """The result of each item, from its `waveform`, [N] float32 at the model's `sample_rate`, in order.

        `extras` are what a line of `transcribe` has besides the text: score, and n_best and words if asked for.

        Raises:
            RuntimeError: no model is loaded.
            ValueError: a waveform has channels or another sample rate.
        """
        from nemo_curator.models.asr.base import ASRResult

        if self._loaded is None:
            raise RuntimeError("no model is loaded; call load_model first")
        rate = int(self._loaded.model.model.cfg.preprocessor.sample_rate)
        waveforms = []
        for item in items:
            waveform = np.ascontiguousarray(item["waveform"], np.float32)
            if waveform.size and (waveform.ndim != 1 or item["sample_rate"] != rate):
                seen = f"{list(waveform.shape)} at {item['sample_rate']} Hz"
                raise ValueError(f"waveform of {item.get('task_id')} is {seen}, expected [N] at {rate} Hz")
            waveforms.append(waveform)
        spoken = [waveform for waveform in waveforms if waveform.size]
        found = self._loaded.model.transcribe(spoken, batch_size=len(spoken), second=self._loaded.second)
        transcripts = list(found) if spoken else []
        results = iter([ASRResult(text=each.text, extras=details_of(each)) for each in transcripts])
        nothing = ASRResult(text="", skipped=True, skip_reason="empty_audio")
        return [next(results) if waveform.size else nothing for waveform in waveforms]
