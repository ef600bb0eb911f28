"""`nemo-gpu-decoding prune-lm`: prunes an n-gram LM to a subset of its n-grams."""

from __future__ import annotations

import sys
from dataclasses import dataclass

from omegaconf import MISSING

from nemo_gpu_decoding.cli.decoding import existing_file, writable_file

EXAMPLES = ("lm=large.arpa.gz out=small.arpa size=100000", "lm=large.arpa.gz out=small.arpa.gz threshold=1e-8")


@dataclass
class PruneLMOptions:
    """Options of `prune-lm`."""

    # n-gram LM over words or tokens: ARPA, plain or gzipped. It takes about 150 bytes of memory per n-gram.
    lm: str = MISSING
    # Output file: ARPA, gzipped if the name ends in .gz. Used with the unpruned LM, it saves paged_biglm one of two
    # look-ups per word.
    out: str = MISSING
    # Maximum number of n-grams, of all orders together. All words are kept.
    size: int | None = None
    # Instead of size: n-grams are removed if the perplexity then grows by less than this share, as with SRILM's
    # `ngram -prune`; 1e-8 is usual.
    threshold: float | None = None

    def __post_init__(self) -> None:
        if (self.size is None) == (self.threshold is None):
            raise ValueError("give either size=... or threshold=...")


OPTIONS = PruneLMOptions


def run(options: PruneLMOptions) -> int:
    """Prune the LM and write it, with the report on stderr."""
    lm, out = existing_file("lm", options.lm), writable_file("out", options.out)

    from nemo_gpu_decoding.lm.arpa import read_arpa
    from nemo_gpu_decoding.lm.estimate import write_arpa
    from nemo_gpu_decoding.lm.prune import prune_ngram_lm

    source = read_arpa(lm)
    small = prune_ngram_lm(source, size=options.size, threshold=options.threshold)
    write_arpa(small, out)
    sizes = [" + ".join(str(len(block.symbols)) for block in arpa.orders) for arpa in (source, small)]
    print(f"{sizes[1]} of {sizes[0]} n-grams written to {out}", file=sys.stderr)
    return 0
