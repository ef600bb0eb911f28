"""Use the large LM of paged_biglm: score differences, LM contexts of tokens, compositions "lazy" and "let"."""
