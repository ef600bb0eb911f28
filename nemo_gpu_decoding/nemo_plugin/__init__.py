"""The only folder of the package that imports NeMo.

Start with `register.py`.

register       strategy names; finding them in a config; `register()`
constructors   what happens when NeMo makes a decoding object for one of our names
adapters       the subclasses that these objects get
section        NeMo's config sections, read strictly; beam_sections and word_graph_sections: ours
ctc, word_graph, transducer
               the objects that NeMo calls with log-probs or encoder output, on `infer`
continuation   NeMo's `partial_hypotheses`, and the same for CTC
streaming      NeMo's streaming of CTC models, which knows greedy decoding only
pipelines, searching_pipelines, searching_transducers
               NeMo's inference pipelines, searched
transducer_networks
               NeMo's prediction networks and joints as the search takes them
hypotheses     results in NeMo's form
requests       phrases and weights per utterance
model          a model and its heads, as the command line uses it
"""
