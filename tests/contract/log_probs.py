"""What decoders of log-probs keep beyond the battery; the last column is the blank's."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from tests.contract.battery import DecoderContract
from tests.contract.subject import LENGTHS
from tests.random_models import random_log_probs


class LogProbsContract(DecoderContract):
    """flexctc_beam, cuda_wfst, paged_biglm."""

    def random_inputs(self, batch, frames, *, seed):
        return random_log_probs(batch, frames, self.width, seed=seed)

    def blank_only(self, variant):
        blanks = torch.full((1, 20, self.width), -30.0, device=self.device)
        blanks[:, :, -1] = 0.0
        return self.bare(variant), blanks

    def without_preference(self, variant):
        flat = torch.full((3, 6, self.width), -float(np.log(self.width - 1)), device=self.device)
        flat[:, :, -1] = -30.0  # or word graphs would hear nothing
        return self.bare(variant), flat

    def test_impossible_labels_are_fine(self, decoder, inputs):
        inputs[:, :, 2] = -float("inf")
        found = decoder.decode(inputs, LENGTHS)
        assert all(2 not in path.tokens for nbest in found for path in nbest)

    def test_a_frame_without_any_label_is_named(self, decoder, inputs):
        inputs[1, 6] = -float("inf")
        with pytest.raises(ValueError, match=r"log_probs\[1, 6\] leaves no label possible"):
            decoder.decode(inputs, LENGTHS)
