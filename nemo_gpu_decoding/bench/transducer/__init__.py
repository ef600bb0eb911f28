"""Rows for RNN-T and TDT: their tasks, our strategies, and what stands beside them."""
