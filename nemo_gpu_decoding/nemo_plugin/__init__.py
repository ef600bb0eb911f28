"""The only folder that imports NeMo. Start with `register.py`.

register       strategy names; finding them in a config; `register()`
constructors   what happens when NeMo makes a decoding object for one of our names
adapters       the subclasses that these objects get
config         NeMo's `beam` section -> options, strictly; on strict.py
ctc            the object that NeMo calls with log-probs
hypotheses     results in NeMo's form
loading        vocabulary, LM and phrases of a model
requests       phrases and weights per utterance
session        a model as the command line uses it
"""
