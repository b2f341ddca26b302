"""Plain attributes of modules on the device: changes of the first forward pass are undone."""

from __future__ import annotations

import torch
from torch import nn

from popdist_py.poptorch.weights.module_attributes import ModuleAttributes


def on_device(**attributes):
    module = nn.Module()
    view = {**vars(module), **attributes}
    return module, view, ModuleAttributes([(module, view)])


def test_restore_undoes_each_recorded_change():
    module, view, attributes = on_device(step=1, mean=torch.zeros(2), gone="old")
    before = attributes.snapshot()
    view.update(step=2, new=3)
    view["mean"].add_(1)
    del view["gone"]
    attributes.record_changes(before)
    assert (module.step, module.new) == (2, 3), "the user's module gets the new values"
    assert "mean" not in vars(module), "except for tensors"

    attributes.restore()

    assert (view["step"], view["gone"], "new" in view) == (1, "old", False)
    assert view["mean"].tolist() == [0, 0]


def test_changed_values_can_be_put_back():
    _, view, attributes = on_device(step=1, same=5)
    before = attributes.snapshot()
    view["step"] = 2
    attributes.record_changes(before)
    values = attributes.changed_values()
    attributes.restore()

    attributes.put_changed(values)

    assert (values, view["step"], view["same"]) == ([2], 2, 5)


def test_containers_keep_their_contents():
    _, view, attributes = on_device(outputs=[1], counts={"a": 1})

    with attributes.contents_kept():
        view["outputs"].append(2)
        view["counts"]["b"] = 2

    assert (view["outputs"], view["counts"]) == ([1], {"a": 1})


def test_tensors_are_the_dense_tensors_alone():
    dense = torch.ones(1)
    _, _, attributes = on_device(dense=dense, sparse=torch.eye(2).to_sparse(), number=1)

    assert [tensor is dense for tensor in attributes.tensors()] == [True]
