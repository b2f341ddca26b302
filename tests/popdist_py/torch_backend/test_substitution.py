"""The class of the group that a program gets for each name of a back end."""

import os
import warnings
from contextlib import contextmanager
from datetime import timedelta
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from support.ranks import run_ranks, values
from torch.distributed._functional_collectives import all_reduce

from popdist_py.torch_backend.substitution import _accelerator_stays, substitute

_OURS, _THEIRS = "PopdistProcessGroup", "ProcessGroup"


@contextmanager
def _substituted(wanted):
    """Substitute back ends in this process during a test."""
    _accelerator_stays.cache_clear()
    module = dist.distributed_c10d
    with (
        mock.patch.object(module, "_new_process_group_helper", module._new_process_group_helper),
        mock.patch.object(dist.Backend, "__new__", dist.Backend.__new__),
    ):
        substitute(wanted)
        yield
    _accelerator_stays.cache_clear()


def _groups(rank, wanted, names, folder):
    """Return the classes and names of the default group and of a new group."""
    found = {}
    for index, name in enumerate(names):
        store = dist.FileStore(f"{folder}/{index}", 2)
        with _substituted(wanted):
            dist.init_process_group(
                name, store=store, rank=rank, world_size=2, timeout=timedelta(seconds=30)
            )
            inner = dist.new_group([0, 1], backend="gloo" if wanted == "popdist" else "popdist")
        total = torch.ones(3)
        dist.all_reduce(total)
        assert total.tolist() == [2.0] * 3
        found[name] = (
            *(type(group).__name__ for group in (dist.group.WORLD, inner)),
            dist.get_backend(),
            dist.get_backend(inner),
        )
        dist.destroy_process_group()
    return found


def test_gloo_and_nothing_are_popdist(tmp_path):
    names = ["gloo", None, "GLOO", "popdist"]
    groups = (_OURS, _OURS, "popdist", "popdist")
    found = values(run_ranks(2, _groups, "popdist", names, str(tmp_path), backend=None))
    assert found == [dict.fromkeys(names, groups)] * 2


@pytest.mark.sweep
def test_each_device_has_its_back_end(tmp_path):
    names = ["cpu:gloo", "cpu:gloo,cuda:nccl"]
    found = values(run_ranks(2, _groups, "popdist", names, str(tmp_path), backend=None))
    for name in names:
        assert found[0][name] == (_OURS, _OURS, name, "popdist")


@pytest.mark.sweep
def test_popdist_and_nothing_are_gloo(tmp_path):
    names = ["popdist", None, "gloo"]
    found = values(run_ranks(2, _groups, "gloo", names, str(tmp_path), backend=None))
    for name in names:
        own = "undefined" if name is None else "gloo"
        assert found[0][name] == (_THEIRS, _THEIRS, own, "gloo")


def _mesh(rank, folder):
    with mock.patch.dict(os.environ, RANK=str(rank), WORLD_SIZE="2"), _substituted("popdist"):
        dist.init_process_group(init_method=f"file://{folder}/mesh", rank=rank, world_size=2)
        mesh = dist.init_device_mesh("cpu", (2,))
        kind = type(mesh.get_group()).__name__
        total = all_reduce(torch.ones(3), "sum", mesh)
    dist.destroy_process_group()
    return kind, total.tolist()


@pytest.mark.sweep
def test_a_mesh_of_cpus_is_popdist(tmp_path):
    assert values(run_ranks(2, _mesh, str(tmp_path), backend=None)) == [(_OURS, [2.0] * 3)] * 2


def _save(rank, folder):
    from torch.distributed import checkpoint  # takes a second, also when tests are only collected

    checkpoint.async_save({"rank": torch.tensor(rank)}, checkpoint_id=folder).result()
    state = {"rank": torch.tensor(-1)}
    checkpoint.load(state, checkpoint_id=folder)
    return dist.distributed_c10d._device_capability(), int(state["rank"])


@pytest.mark.sweep
def test_torch_knows_that_the_group_is_for_cpus(tmp_path):
    # An asynchronous checkpoint rejects other groups.
    assert values(run_ranks(2, _save, str(tmp_path))) == [(["cpu"], 0)] * 2


def _names(wanted):
    """Return the results of ``Backend(name)``, and the names that torch makes groups for."""
    module, made = dist.distributed_c10d, []

    def make(size, rank, ranks, backend, store):
        made.append((backend, *module.BackendConfig(backend).device_backend_map.values()))

    with (
        mock.patch.object(module, "_new_process_group_helper", make),
        _substituted(wanted),
        warnings.catch_warnings(record=True) as said,
    ):
        warnings.simplefilter("always")
        names = ("gloo", "undefined", "nccl", "popdist", "cpu:gloo")
        read = [dist.Backend(name) for name in names]
        for name in names:
            module._new_process_group_helper(1, 0, [], backend=name, store=None)
        module._new_process_group_helper(1, 0, [], "gloo", None)
        assert read == list(names)
        assert dist.Backend("gloo") == "gloo"
    return [name for name, *_ in made], made[4][1], said


@pytest.mark.parametrize(
    ("wanted", "accelerator", "read", "of_a_device", "warned"),
    [
        ("popdist", False, "popdist popdist nccl popdist cpu:gloo popdist", "popdist", 0),
        ("popdist", True, "gloo undefined nccl popdist cpu:gloo gloo", "gloo", 1),
        ("gloo", True, "gloo undefined nccl gloo cpu:gloo gloo", "gloo", 0),
        ("auto", False, "gloo undefined nccl popdist cpu:gloo gloo", "gloo", 0),
    ],
)
def test_a_name_is_replaced_where_a_group_is_made_and_nowhere_beside_an_accelerator(
    monkeypatch, wanted, accelerator, read, of_a_device, warned
):
    monkeypatch.setattr(torch.accelerator, "is_available", lambda: accelerator)
    names, of_cpu, said = _names(wanted)
    assert names == read.split()
    assert of_cpu == of_a_device
    assert len(said) == warned
    for one in said:
        assert one.filename == __file__
        assert "torch finds an accelerator" in str(one.message)
