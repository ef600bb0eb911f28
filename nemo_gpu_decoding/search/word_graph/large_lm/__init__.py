"""The large LM of paged_biglm: both LMs and their difference, LM contexts of tokens, and composition "let"."""
