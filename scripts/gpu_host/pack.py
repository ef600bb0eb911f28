"""Fetch the wheels for a GPU host without network (see README.md in this folder).

    python scripts/gpu_host/pack.py .whl [--with nvidia-cuda-sanitizer-api==13.0.85] [--check]

Wheels for Python 3.12 on x86-64 Linux, one for each line of wheels.txt; at most 64 MiB together with the source tree.
With --check nothing is written: pip only checks that the wheels exist.
"""

from __future__ import annotations

import argparse
import re
import subprocess
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

WHEELS = Path(__file__).with_name("wheels.txt")
PYTHON = "3.12"
# pip accepts only wheels of these platforms: all that the host's glibc supports
PLATFORMS = (
    *(f"manylinux_2_{minor}_x86_64" for minor in range(39, 16, -1)),
    *(f"{old}_x86_64" for old in ("manylinux2014", "manylinux_2_12", "manylinux2010", "manylinux_2_5")),
    "manylinux1_x86_64",
)
# These have no published wheels. They are pure Python, so that wheels built on this machine run on the host.
SOURCE_ONLY = frozenset({"antlr4-python3-runtime"})
MOST_BYTES = 46 << 20  # 64 MiB minus 18 MiB of the source tree

_EXACT = re.compile(r"[A-Za-z0-9._-]+==[A-Za-z0-9.+!_-]+")


def main(arguments: Sequence[str] | None = None) -> int:
    """Fetch the wheels and check their number and size; returns 0 if all are there."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0] if __doc__ else None)
    parser.add_argument("folder", type=Path, help="where the wheels go")
    parser.add_argument("--with", dest="more", nargs="+", default=[], help="further NAME==VERSION")
    parser.add_argument("--check", action="store_true", help="only ask pip whether there are such wheels")
    options = parser.parse_args(arguments)
    try:
        wanted = [*read_list(WHEELS), *(checked(line) for line in options.more)]
    except ValueError as error:
        print(error, file=sys.stderr)
        return 2
    for command in pip_commands(wanted, options.folder, options.check):
        done = subprocess.run(command, check=False)
        if done.returncode:
            print(f"pip failed: {' '.join(command)}", file=sys.stderr)
            return 1
    return 0 if options.check else report(options.folder, wanted)


def read_list(path: Path) -> list[str]:
    """The requirements of a file, without comments.

    Raises:
        ValueError: a line is not NAME==VERSION, or a name occurs twice.
    """
    lines = [line.partition("#")[0].strip() for line in path.read_text(encoding="utf-8").splitlines()]
    wanted = [checked(line) for line in lines if line]
    names = [name_of(requirement) for requirement in wanted]
    twice = sorted({name for name in names if names.count(name) > 1})
    if twice:
        raise ValueError(f"{path.name} names {', '.join(twice)} twice, expected one version of each")
    return wanted


def checked(requirement: str) -> str:
    if not _EXACT.fullmatch(requirement):
        raise ValueError(f"{requirement!r} is no exact requirement, expected NAME==VERSION")
    return requirement


def name_of(text: str) -> str:
    """The normalised name of a requirement, or of a wheel's file."""
    return re.sub(r"[-_.]+", "-", re.split(r"==|-\d", text)[0]).lower()


def pip_commands(wanted: Sequence[str], folder: Path, check: bool) -> Iterator[list[str]]:
    """The commands of pip: one download for all wheels, and one build per package without published wheels."""
    pip = [sys.executable, "-m", "pip"]
    built = [requirement for requirement in wanted if name_of(requirement) in SOURCE_ONLY]
    ready = [requirement for requirement in wanted if requirement not in built]
    target = ["--implementation", "cp", "--python-version", PYTHON]
    target += [word for platform in PLATFORMS for word in ("--platform", platform)]
    common = ["--no-deps", "--only-binary=:all:", *target]
    if check:
        dry = ["--dry-run", "--ignore-installed", "--target", str(folder)]
        yield [*pip, "install", "--quiet", *dry, *common, *ready]
        return
    yield [*pip, "download", "--quiet", *common, "--dest", str(folder), *ready]
    for requirement in built:
        yield [*pip, "wheel", "--quiet", "--no-deps", "--wheel-dir", str(folder), requirement]


def report(folder: Path, wanted: Sequence[str]) -> int:
    """Print the content of the folder; returns 1 if a wheel is missing or superfluous, or the size is too large."""
    wheels = sorted(folder.glob("*.whl"))
    size = sum(wheel.stat().st_size for wheel in wheels)
    print(f"{len(wheels)} wheels, {size / 2**20:.1f} MiB, in {folder}")
    there, expected = {name_of(wheel.name) for wheel in wheels}, {name_of(line) for line in wanted}
    problems = [f"missing: {name}" for name in sorted(expected - there)]
    problems += [f"not asked for: {name}" for name in sorted(there - expected)]
    if len(wheels) > len(there):
        problems.append("several versions of one package: empty the folder first")
    if size > MOST_BYTES:
        problems.append(f"more than {MOST_BYTES >> 20} MiB")
    for problem in problems:
        print(problem, file=sys.stderr)
    return 1 if problems else 0


if __name__ == "__main__":
    sys.exit(main())
