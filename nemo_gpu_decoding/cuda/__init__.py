"""Run CUDA kernels: NVRTC compiles kernels at run time, and cuda-python launches them on torch's streams.

Decoders use `launch.py`. Importing these modules needs no GPU, driver or cuda-python.
"""
