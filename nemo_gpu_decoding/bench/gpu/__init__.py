"""`bench device=cuda`: decoders on one GPU, alone and behind an encoder, beside NeMo's.

Start with `run.py`. `place.py` is the GPU and its clock, `cases.py` says what is measured, `verify.py`
what is checked before, `encoder.py` what stands before the decoders, `probes.py` measures first uses.
"""
