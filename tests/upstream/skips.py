"""Marks of suites of others that say what is not so here."""

from __future__ import annotations

from collections.abc import Iterable

import pytest


def unskip(items: Iterable[pytest.Item], words: str) -> None:
    """Takes the marks off tests that are skipped for a reason with these words."""
    for item in items:
        for node in item.listchain():
            node.own_markers = [
                mark
                for mark in node.own_markers
                if mark.name != "skipif" or words not in str(mark.kwargs.get("reason"))
            ]
