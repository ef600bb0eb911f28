"""Which tests run, and how those of a whole run are shared among processes (`-n 2 --dist loadgroup`)."""

from __future__ import annotations

from pathlib import Path

import pytest

# strategy -> another whose compiled code it shares
COMPILED_WITH = {"paged_biglm": "cuda_wfst", "aes_pp": "alsd_pp"}
# The contract compiles what others load, one process one part of it; then what takes long, so that all processes end
# at about the same time
FIRST = ("contract", "bench", "test_readme.py", "scripts", "cluster", "nemo_plugin", "search")
COMPILES_LONGEST = "cuda_wfst cpu"  # of the contract's groups
# Tests that share nothing with the rest of their file, and take long
ALONE = {"test_tutorial_runs", "test_the_gpu_tests_pass_on_the_emulator"}


@pytest.hookimpl(tryfirst=True)  # before xdist reads the groups
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """A file stays in one process, which keeps its models; the contract is divided by strategies, but those that
    share compiled code stay together: otherwise both processes would compile it at the same time.

    Checks of the contract that a table has no subject for are no tests.
    """
    items[:] = [item for item in items if not _without_subject(item)]
    for item in items:
        name = item.nodeid if getattr(item, "originalname", None) in ALONE else str(item.path)
        case = getattr(item, "callspec", None)
        if case is not None and isinstance(case.params.get("case"), tuple):
            strategy = item.callspec.id.split("-")[0].split()[0]
            name += f" {COMPILED_WITH.get(strategy, strategy)} {case.params['case'][0].backend}"
        item.add_marker(pytest.mark.xdist_group(name))
    items.sort(key=_turn)


def _turn(item: pytest.Item) -> tuple[int, bool]:
    part = item.path.relative_to(Path(__file__).parent).parts[0]
    group = item.get_closest_marker("xdist_group")
    assert group is not None
    return FIRST.index(part) if part in FIRST else len(FIRST), not group.args[0].endswith(COMPILES_LONGEST)


def _without_subject(item: pytest.Item) -> bool:
    if "subject" not in getattr(item, "fixturenames", ()):  # other tests have cases of their own
        return False
    return not isinstance(item.callspec.params["case"], tuple)
