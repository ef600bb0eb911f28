"""The toy keeps the contract: base classes and battery are enough for a strategy that nobody foresaw."""

from pathlib import Path

from tests.contract.checks import *
from tests.contract.subject import VOCAB, LogProbs, TokenFusion
from tests.sixth_strategy.toy import ToyBeam, ToyConfig


class Toy(LogProbs, TokenFusion):
    variants = ("plain",)
    n_best = 4
    calls_per_thread = 1
    tells_committed = keeps_heads = False

    def with_fusion(self, variant, fusion, **options):
        return ToyBeam(VOCAB, ToyConfig(backend=self.backend, **{"n_best": 4, **options}), fusion)


TABLE = [("toy", Toy, ("cpu",))]


def test_strategy_needs_fewer_than_150_lines():
    lines = Path(__file__).with_name("toy.py").read_text().splitlines()
    assert len(lines) < 150
