"""Fixtures of the tests of the examples."""

import pytest
from examples.forks import forks
from support.processes import remove_surroundings
from support.repository import ROOT


@pytest.fixture(scope="module")
def processes():
    """Run programs in processes that are forked from one with torch."""
    with pytest.MonkeyPatch.context() as patch:
        remove_surroundings(patch)
        with forks(ROOT) as found:
            yield found
