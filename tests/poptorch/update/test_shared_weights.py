"""Instances of one host have the weights together, and train, load and save as if each had them."""

from __future__ import annotations

import pytest
from poptorch.update import shared_weights_program

pytestmark = pytest.mark.mpi
CHECKS = [
    check for name, check in vars(shared_weights_program).items() if name.startswith("check_")
]


@pytest.mark.parametrize("count", [2, pytest.param(3, marks=pytest.mark.sweep)])
@pytest.mark.parametrize("check", CHECKS, ids=lambda check: check.__name__)
def test_each_instance_updates_a_slice_for_all(instances, check, count):
    instances.run(check, count=count)
