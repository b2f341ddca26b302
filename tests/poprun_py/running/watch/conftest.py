"""A fixture that counts calls of functions, because times depend on the machine."""

from __future__ import annotations

import sys

import pytest


@pytest.fixture(scope="session")
def calls():
    """Give a function that counts all calls of functions within a call."""

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
