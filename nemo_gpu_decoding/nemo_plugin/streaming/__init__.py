"""Decode with this package's searches in NeMo's streaming code, where audio arrives in chunks.

stream_state   running searches of transducers and CTC in NeMo's `partial_hypotheses`; undo of a pipeline's step
stream_texts   words, aliases and partial transcripts of pipelines
hooks          wrappers of NeMo's streaming methods: `conformer_stream_step`, and the pipelines, which become
               subclasses of searching_pipelines
recognizer     NeMo's pipelines as recognizer of a live server
"""
