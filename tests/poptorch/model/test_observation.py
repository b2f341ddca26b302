"""What a program can see of a compiled model: names, anchors, times, cycles."""

from __future__ import annotations

import pytest
from support.models import Mlp, classified, quiet_options

import popdist_py.poptorch as poptorch


def test_names():
    model = Mlp()
    training = poptorch.trainingModel(model, quiet_options())
    with pytest.raises(AssertionError, match="must be compiled"):
        training.getTensorNames()
    training.compile(*classified(2))
    names = training.getTensorNames()
    for name in ("layers.0.weight", "Gradient___layers.0.weight", "UpdatedVar___layers.2.bias"):
        assert name in names
    for start in ("input", "loss", "scaledLearningRate", "weightDecayScaleFactor"):
        assert any(name.startswith(start) for name in names)


def test_names_are_those_of_the_optimizers_settings():
    model = Mlp()
    optimizer = poptorch.optim.Adam(model.parameters())
    training = poptorch.trainingModel(model, quiet_options(), optimizer)
    training.compile(*classified(2))
    names = training.getTensorNames()
    assert "learningRate___specific___layers.0.weight" in names
    assert set(optimizer.state_dict()["ipu_param"]) <= set(names)
    assert not any("scaledLearningRate" in name for name in names)
