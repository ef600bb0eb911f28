"""The integration with NeMo; the only folder of the package that imports NeMo. Start with `register.py`.

register       strategy names; finding them in a config; `register()`
constructors   wrappers of the constructors of NeMo's decoding objects
adapters       subclasses of NeMo's decoding classes
section        strict reader of NeMo's config sections; beam_sections and word_graph_sections use it
infer          base class of the objects that NeMo calls with log-probs or encoder output
ctc, word_graph, transducer
               these objects, `owner.decoding`, by search
transducer_networks
               NeMo's prediction networks and joints in the form of the search
hypotheses     results in NeMo's form
requests       LM, phrases and weights per utterance
streaming/     search in NeMo's streaming
restore        models from .nemo files or by name
model          a model and its heads, for the command line
cutting, long_audio
               recordings of any length: cuts at pauses, and segments decoded and joined
"""
