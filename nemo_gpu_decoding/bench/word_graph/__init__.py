"""Rows for word graphs: the graph of a task, our search of it, and what stands beside it."""
