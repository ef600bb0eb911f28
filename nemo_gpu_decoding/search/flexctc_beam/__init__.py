"""flexctc_beam: batched CTC beam search with n-gram LM and phrase boosting [FlexCTC]."""
