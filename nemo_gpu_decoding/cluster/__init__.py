"""Transcription of a corpus in partitions, in this process or on Ray; each partition is decoded once.

`corpus` cuts the input into partitions, `folder` stores the state and the output of a run, `workers` decodes a
partition, `run` assigns partitions to workers. Only `run` imports Ray, and only if the run uses it.
"""
