"""How far paged_biglm reaches: an LM of any size is made up, packed and decoded with. See `run.py`."""
