"""LMs for the tests of paged_biglm behind NeMo."""

from __future__ import annotations


def write_lower_orders(arpa, target, most):
    """An LM of the n-grams of an ARPA file with at most `most` words, with their weights."""
    sections = arpa.read_text().split("\n\n")
    counts = [line for line in sections[0].splitlines() if not line.startswith("ngram ")]
    counts += [line for line in sections[0].splitlines() if line.startswith("ngram ")][:most]
    kept = [section for section in sections[1:] if section[1:2].isdigit() and int(section[1]) <= most]
    kept = [_without_backoffs(section) if int(section[1]) == most else section for section in kept]
    target.write_text("\n\n".join(["\n".join(counts), *kept, "\\end\\\n"]))
    return target


def write_without_unknown(arpa, target):
    """The LM of an ARPA file of 1-grams without <unk>."""
    lines = [line for line in arpa.read_text().splitlines() if "<unk>" not in line]
    count = sum(line[:1] in "-0" for line in lines if line)
    target.write_text("\n".join(f"ngram 1={count}" if "ngram 1" in line else line for line in lines))
    return target


def _without_backoffs(section):
    return "\n".join("\t".join(line.split("\t")[:2]) for line in section.splitlines())
