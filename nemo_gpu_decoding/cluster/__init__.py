"""Transcribe a corpus in partitions, in this process or on Ray.

`corpus` cuts the input into partitions, and stores the state and the transcripts of a run. `run` assigns partitions to
workers, which decode them. Only `run` imports Ray, and only if a run uses Ray.
"""
