"""Which tests run, and how those of a whole run are shared among processes (`-n 2 --dist loadgroup`)."""

from __future__ import annotations

import pytest

# strategy -> another whose compiled code it shares
COMPILED_WITH = {"paged_biglm": "cuda_wfst", "aes_pp": "alsd_pp"}


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """A file stays in one process, which keeps its models; the contract is divided by strategies, but those that
    share compiled code stay together: otherwise both processes would compile it at the same time.

    Checks of the contract that a table has no subject for are no tests.
    """
    items[:] = [item for item in items if not _without_subject(item)]
    for item in items:
        name = str(item.path)
        case = getattr(item, "callspec", None)
        if case is not None and isinstance(case.params.get("case"), tuple):
            strategy = item.callspec.id.split("-")[0].split()[0]
            name += f" {COMPILED_WITH.get(strategy, strategy)} {case.params['case'][0].backend}"
        item.add_marker(pytest.mark.xdist_group(name))


def _without_subject(item: pytest.Item) -> bool:
    if "subject" not in getattr(item, "fixturenames", ()):  # other tests have cases of their own
        return False
    return not isinstance(item.callspec.params["case"], tuple)
