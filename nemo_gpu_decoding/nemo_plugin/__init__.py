"""The only folder of the product that imports NeMo (`bench/peers` does, to measure it).

Start with `register.py`.

register           strategy names; finding them in a config; `register()`
constructors       what happens when NeMo makes a decoding object for one of our names
adapters           the subclasses that these objects get
ctc_config, transducer_config
                   NeMo's `beam` section -> options, strictly; on beam_options and strict
wfst_config        the same for NeMo's `wfst` section
ctc, wfst          the objects that NeMo calls with log-probs, on ctc_infer

                   the word graph and the phrases of words that a config asks for
wfst_adapter       what NeMo's object does with words that come from a graph
transducer         the object that NeMo calls with encoder output; on transducer_networks,
                   continuation (NeMo's `partial_hypotheses`) and step_log_probs
infer, confidence  what these objects share
hypotheses         results in NeMo's form
loading            vocabulary, LM and phrases of a model
requests           phrases and weights per utterance
session            a model as the command line uses it
"""
