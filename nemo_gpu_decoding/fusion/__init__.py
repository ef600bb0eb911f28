"""Add the scores of token n-gram LMs and phrase boosting trees to acoustic scores (shallow fusion)."""
