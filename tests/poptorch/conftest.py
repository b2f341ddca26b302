"""Settings for all tests of the PopTorch API."""

import pytest

from popdist_py.poptorch.compilation import backend_choice


@pytest.fixture(autouse=True, scope="module")
def _every_back_end_is_tried():
    """Remove the time limit for compiling back ends, which other load on the machine exceeds."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(backend_choice, "_ENOUGH_SECONDS", float("inf"))
        yield
