"""NeMo's confidence measures."""

from __future__ import annotations

from typing import Any

import torch
from nemo.collections.asr.parts.utils.asr_confidence_utils import ConfidenceMethodMixin


class FrameConfidence(ConfidenceMethodMixin):
    """NeMo's confidence of a frame, by the method that `confidence_cfg.method_cfg` names."""

    def __init__(self, blank_id: int, method: dict[str, Any]) -> None:
        self.blank_id = blank_id
        self._init_confidence_method(method)

    def of(self, log_probs: torch.Tensor) -> list[float]:
        """Confidences in [0, 1] of log-probs [T, V + 1]."""
        return self._get_confidence(log_probs)
