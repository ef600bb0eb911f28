"""A corpus in, transcripts out: partitions that are decoded here or on Ray, each once. No command line here.

`corpus` lists what is to be transcribed, `folder` is what a run leaves behind, `workers` decodes a partition,
`run` hands partitions to workers. Ray is imported by `run` alone, and only where it is asked for.
"""
