"""The arrays that the instances of a host keep after a call."""

import numpy as np
import pytest

from popdist_py.collectives.within_host import host_group
from popdist_py.errors import CollectiveMismatchError, InstanceLostError


def _kept():
    return [id(array) for array in host_group._exposed_arrays.values()]


def test_calls_of_two_groups_that_overlap_keep_their_own_arrays():
    first, second = np.zeros(1), np.zeros(1)
    before = _kept()
    outer, inner = host_group.exposed(first), host_group.exposed(second)
    with outer:
        inner.__enter__()
    assert _kept() == [*before, id(second)]
    inner.__exit__(None, None, None)
    assert _kept() == before


def test_the_array_of_a_lost_call_is_kept_and_that_of_a_mismatch_is_not():
    array, before = np.zeros(1), _kept()
    with pytest.raises(CollectiveMismatchError), host_group.exposed(array):
        raise CollectiveMismatchError("other calls")
    assert _kept() == before
    with pytest.raises(InstanceLostError), host_group.exposed(array):
        raise InstanceLostError("ended")
    assert _kept() == [*before, id(array)]
