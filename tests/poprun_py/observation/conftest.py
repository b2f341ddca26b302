"""Counting calls of functions: times depend on the machine and on what else it does."""

from __future__ import annotations

import sys

import pytest


@pytest.fixture(scope="session")
def calls():
    """Count the functions that are called in a call, Python's own and resumed generators too."""

    def counted(what) -> int:
        count = 0

        def count_calls(_, event, __):
            nonlocal count
            count += event in ("call", "c_call")

        before = sys.getprofile()
        sys.setprofile(count_calls)
        try:
            what()
        finally:
            sys.setprofile(before)
        return count

    return counted
