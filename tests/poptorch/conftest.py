"""Settings for all tests of the PopTorch API."""

import itertools

import pytest

from popdist_py.poptorch.compilation import backend_choice

_numbers = itertools.count()


@pytest.fixture(autouse=True, scope="module")
def _every_back_end_is_tried():
    """Remove the time limit for compiling back ends, which other load on the machine exceeds."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(backend_choice, "_ENOUGH_SECONDS", float("inf"))
        yield


@pytest.fixture(autouse=True)
def _no_back_end_is_known_to_be_the_fastest(own_cache, tmp_path_factory, monkeypatch):
    """Give each test an empty cache: models of other tests may be the same to the cache.

    Otherwise the fastest back end of another test's model would be taken alone, without a trial.
    """
    folder = tmp_path_factory.getbasetemp() / f"cache-{next(_numbers)}"
    monkeypatch.setenv("XDG_CACHE_HOME", str(folder))
