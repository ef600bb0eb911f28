"""Which tests run, and how those of a whole run are shared among processes (`-n 2 --dist loadscope`)."""

from __future__ import annotations

import re

import pytest

# strategy -> another whose compiled code it shares
COMPILED_WITH = {"paged_biglm": "cuda_wfst", "aes_pp": "alsd_pp"}
# The contract compiles what others load, one process one part of it; then what takes long, so that all processes end
# at about the same time
FIRST = ("contract", "benchmarks", "test_readme.py", "scripts", "cluster", "nemo_plugin", "search")
COMPILES_LONGEST = "cuda_wfst cpu"  # of the contract's groups
# Tests that share nothing with the rest of their file, and take long
ALONE = ("test_tutorial_runs", "test_the_gpu_tests_pass_on_the_emulator")
CASE = re.compile(r"\b([a-z_]+)[^-[]*-(cpu|cuda)\b")  # in an id of the contract: strategy, variant, backend


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Checks of the contract that a table has no subject for are no tests."""
    items[:] = sorted((item for item in items if not _without_subject(item)), key=lambda item: _turn(item.nodeid))


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log):
    """xdist's own groups (`--dist loadgroup`) are lost with pytest 9.2, where ids of tests have another shape."""
    from xdist.scheduler import LoadScopeScheduling

    class Groups(LoadScopeScheduling):
        def _split_scope(self, nodeid: str) -> str:
            return group_of(nodeid)

    return Groups(config, log) if config.getvalue("dist") == "loadscope" else None


def group_of(nodeid: str) -> str:
    """A file stays in one process, which keeps its models; the contract is divided by strategies, but those that
    share compiled code stay together: otherwise both processes would compile it at the same time."""
    file, _, test = nodeid.partition("::")
    name = test.partition("[")[0]
    if name in ALONE:
        return f"{file} {name}"
    case = CASE.search(test.partition("[")[2])
    return file if case is None else f"{file} {COMPILED_WITH.get(case[1], case[1])} {case[2]}"


def _turn(nodeid: str) -> tuple[int, bool]:
    part = nodeid.partition("::")[0].split("/")[1]
    return FIRST.index(part) if part in FIRST else len(FIRST), not group_of(nodeid).endswith(COMPILES_LONGEST)


def _without_subject(item: pytest.Item) -> bool:
    if "subject" not in getattr(item, "fixturenames", ()):  # other tests have cases of their own
        return False
    return not isinstance(item.callspec.params["case"], tuple)
