"""Whether a program says that it trained a model without the other instances."""

import importlib
import os
import sys
from types import SimpleNamespace

import torch
import torch.distributed as dist
from support.ranks import run_ranks, values
from support.repository import ROOT
from torch.testing._internal.distributed.fake_pg import FakeStore

from poprun_py.instance.progress_memory import ProgressMemory


def _hook():
    sys.path.insert(0, str(ROOT / "popdist_py" / "start_hook"))
    return importlib.import_module("popdist_separate_models")


def _say(rank):
    """Return after what the program did the launcher would be told."""
    hook, memory, said = _hook(), ProgressMemory(), []
    watch = hook._Watch(memory.variables()["POPDIST_HEARTBEAT"])
    watch.groups_of(dist)
    has_mpi, hook._has_mpi = hook._has_mpi, lambda: False

    def look(what):
        memory._words[31] = 0
        watch.tell()
        said.extend([what] * memory.trained_alone())

    look("imported torch")
    torch.optim.SGD([torch.ones(1)])
    look("trained")
    hook._has_mpi = lambda: True
    look("used MPI")
    hook._has_mpi = lambda: False
    sys.modules[hook._MEETING] = hook
    look("joined without MPI")
    del sys.modules[hook._MEETING]
    memory._words[26] = 1 << 8
    look("called a collective of the library")
    memory._words[26] = 0
    if os.fork() == 0:
        look("forked")
        os._exit(len(said) > 1)
    assert os.wait()[1] == 0
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=1)
    dist.destroy_process_group()
    look("made a group alone")
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=2)
    look("made a group")
    state = SimpleNamespace(PartialState=SimpleNamespace(_shared_state={"num_processes": 1}))
    sys.modules["accelerate.state"] = state
    group, calls = dist.group, iter([0, 3])
    world = SimpleNamespace(_get_sequence_number_for_group=lambda: next(calls))
    dist.group = SimpleNamespace(WORLD=world)
    look("made a group that accelerate does not use")
    look("reduced in it")
    dist.group = group
    dist.destroy_process_group()
    look("left a group")
    return said, has_mpi()


def test_what_is_sure_to_be_separate_training_is_said():
    ((said, has_mpi),) = values(run_ranks(1, _say, backend=None))
    assert said == ["trained", "made a group alone", "made a group that accelerate does not use"]
    assert not has_mpi


def test_only_the_program_of_an_instance_is_watched(monkeypatch):
    hook, registered = _hook(), []
    monkeypatch.setattr(hook.atexit, "register", registered.append)
    monkeypatch.setattr(hook._Watch, "groups_of", lambda *_: None)
    own = {"POPDIST_HEARTBEAT": f"/proc/{os.getppid()}/fd/3", "WORLD_SIZE": "2"}
    for more, is_watched in (
        ({}, True),
        ({"WORLD_SIZE": "1"}, False),
        ({"POPDIST_HEARTBEAT": "/proc/1/fd/3"}, os.getppid() == 1),
        ({"POPDIST_HEARTBEAT": ""}, False),
        ({"POPDIST_SEPARATE_MODELS": "1"}, False),
    ):
        monkeypatch.setattr(hook.os, "environ", {**own, **more})
        registered.clear()
        hook.start(dist)
        assert bool(registered) == is_watched, more
