"""Search in NeMo's streaming, where audio or encoder output arrives in chunks.

stream_state   running searches in NeMo's `partial_hypotheses`, and the same for CTC; undo of a pipeline's step
hooks          wrappers of NeMo's streaming methods: `conformer_stream_step`, and the pipelines, which become
               subclasses of searching_pipelines
recognizer     NeMo's pipelines as recognizer of a live server
"""
