"""NeMo integration. No other folder of the package imports NeMo. Start with `register.py`.

register       strategy names, their detection in a config, and `register()`
adapters       subclasses of NeMo's decoding classes, and wrappers of their constructors
section        strict reader of NeMo's config sections; beam_sections and word_graph_sections use it
infer          base class of the decoding objects that NeMo calls with log-probs or encoder output
ctc, word_graph, transducer
               decoding objects (`owner.decoding`) of each search
transcript     the transcript of an utterance, its row and totals
hypotheses     results in NeMo's form
requests       LM, phrases and weights per utterance
streaming/     searches in NeMo's streaming interfaces
restore        load models from .nemo files or by name
model          a model and its heads, for the command line
cutting, long_audio
               recordings of any length: cuts at pauses, files of segments, their joined transcript
transcribing   from utterances to transcripts in batches, and the log of a run
"""
