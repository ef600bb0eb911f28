"""The integration with NeMo; the only folder of the package that imports NeMo. Start with `register.py`.

register       strategy names; finding them in a config; `register()`
constructors   wrappers of the constructors of NeMo's decoding objects
adapters       subclasses of NeMo's decoding classes
section        strict reader of NeMo's config sections; beam_sections and word_graph_sections use it
ctc, word_graph, transducer
               the objects that NeMo calls with log-probs or encoder output, on `infer`
continuation   NeMo's `partial_hypotheses`, and the same for CTC
streaming      search in NeMo's streaming of CTC models, which is greedy in NeMo
pipelines, searching_pipelines, searching_transducers
               search in NeMo's inference pipelines
transducer_networks
               NeMo's prediction networks and joints in the form of the search
hypotheses     results in NeMo's form
requests       phrases and weights per utterance
model          a model and its heads, for the command line
"""
