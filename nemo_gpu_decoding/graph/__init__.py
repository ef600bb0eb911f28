"""Word graphs: what cuda_wfst and paged_biglm search. `build.py` makes one from an LM and a lexicon."""
