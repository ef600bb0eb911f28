"""Decode CTC log-probs by batched beam search with n-gram LM and phrase boosting (flexctc_beam) [FlexCTC]."""
