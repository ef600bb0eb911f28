"""CUDA kernels through cuda-python: compiled at run time, launched on torch's streams, no build step.

`launch.py` is what decoders use; importing any module of this folder needs neither a GPU, a driver
nor cuda-python.
"""
