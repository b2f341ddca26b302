"""PopART's names, as PopTorch programs use them."""

from __future__ import annotations

import pickle

import pytest

from popdist_py import popart


def test_every_public_name_is_there_and_can_be_pickled():
    for name in popart.__all__:
        assert pickle.loads(pickle.dumps(getattr(popart, name))) is getattr(popart, name)


def test_members_are_numbers_of_session_options():
    assert int(popart.SyntheticDataMode.RandomNormal) == 2
    assert int(popart.SubgraphCopyingStrategy.JustInTime) == 1
    assert int(popart.RecomputationType.NormOnly) == 2
    assert int(popart.VirtualGraphMode.Auto) == 2
    assert int(popart.BatchSerializationBatchSchedule.OverlapOnCompute) == 3
    assert int(popart.AccumulateOuterFragmentSchedule.OverlapMemoryOptimized) == 3


def test_what_is_not_here_says_what_to_do():
    with pytest.raises(AttributeError, match=r"popart\.Builder is not available, .*PyTorch"):
        _ = popart.Builder
    assert not hasattr(popart, "__no_such__")
