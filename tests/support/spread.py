"""Groups of tests for one process where several processes share a run (``--dist loadgroup``).

A process takes a group at a time. So fixtures that are made once for a module, or for all modules, are made
in one process; what remains goes in pieces that are small enough for all processes to end at about the same
time.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

import pytest

SHARED = {"pool": "gloo"}
"""Fixtures of a run that one process alone is to have, and the group of all tests that use one."""
PIECE = 40
"""Most tests of a group that no fixture keeps together."""


def _kept(item: pytest.Item) -> bool:
    """Whether a test uses a fixture of these tests that lives longer than one test."""
    definitions = getattr(item, "_fixtureinfo").name2fixturedefs.values()  # noqa: B009
    return any(found[-1].scope != "function" and found[-1].baseid for found in definitions)


def groups_of(items: Sequence[pytest.Item]) -> list[str]:
    """The group of each test; those that others have to wait for longest sort first."""
    pieces: Counter[str] = Counter()
    groups = []
    for item in items:
        module = item.nodeid.split("::")[0]
        shared = [group for fixture, group in SHARED.items() if fixture in getattr(item, "fixturenames", ())]
        if shared:
            groups.append(shared[0])
        elif _kept(item):
            groups.append(f"kept-{module}")
        else:
            groups.append(f"piece-{module}-{pieces[module] // PIECE}")
            pieces[module] += 1
    return groups


def in_groups(items: Sequence[pytest.Item]) -> list[pytest.Item]:
    """The same tests, marked with their groups, those groups first that take long."""
    groups = groups_of(items)
    for item, group in zip(items, groups, strict=True):
        item.add_marker(pytest.mark.xdist_group(group))
    ranks = {"gloo": 0, "kept": 1, "piece": 2}
    order = sorted(range(len(items)), key=lambda i: ranks[groups[i].split("-")[0]])
    return [items[i] for i in order]


def without_group(name: str) -> str:
    """The name of a test without that of its group, as the next run knows it."""
    at = name.rfind("@")
    return name[:at] if at > name.rfind("]") and at > name.rfind("::") else name
