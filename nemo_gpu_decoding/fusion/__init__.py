"""Shallow fusion with back-off automata: token n-gram LMs, phrase boosting trees and look-ups."""
