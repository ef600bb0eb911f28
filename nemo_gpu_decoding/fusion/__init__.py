"""Back-off automata for shallow fusion: token-level n-gram LMs, phrase boosting trees and their look-up."""
