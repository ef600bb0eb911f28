"""CUDA kernels through cuda-python: compiled at run time, launched on torch's streams, no build step.

Decoders use `launch.py`. The modules of this folder can be imported without a GPU, a driver or cuda-python.
"""
