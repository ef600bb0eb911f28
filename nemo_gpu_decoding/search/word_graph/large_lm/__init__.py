"""The large LM of paged_biglm: LM score differences, LM contexts of tokens, compositions "lazy" and "let"."""
