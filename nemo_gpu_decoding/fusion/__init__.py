"""Add the scores of token n-gram LMs and phrase boosting trees in a search (shallow fusion)."""
