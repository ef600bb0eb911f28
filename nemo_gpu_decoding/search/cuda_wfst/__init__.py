"""cuda_wfst: word-graph decoding of CTC log-probs [CUDA-WFST]. Read `cpu.py` for the algorithm."""
