"""The searches in NeMo's streaming: audio or encoder output that arrives in chunks.

continuation   running searches in NeMo's `partial_hypotheses`, and the same for CTC
stream_step    search in `conformer_stream_step`, which decodes CTC greedily in NeMo
pipelines      search in NeMo's inference pipelines, by subclasses of
               searching_pipelines (CTC) and searching_transducers
recognizer     NeMo's pipelines as recognizer of a live server
rollback       undo of a pipeline's step after an error
"""
