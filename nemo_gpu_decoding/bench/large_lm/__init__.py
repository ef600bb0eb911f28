"""Rows for large LMs on the fly: beside the small LM alone, and beside eager composition."""
