"""The class LoopCheckpoints, the checkpoints of a training loop in plain PyTorch."""

from __future__ import annotations

import os
import pickle
import sys
import time
from collections.abc import Mapping
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import nn

from popdist_py import activities, context, heartbeat
from popdist_py.checkpoint import Checkpoints
from popdist_py.torch_states.host_random import host_random, load_host_random
from popdist_py.torch_states.memory_copies import (
    Peers,
    memory_copies,
    newest_state,
    wait_for_copies,
)
from popdist_py.torch_states.save_schedule import SaveSchedule
from popdist_py.torch_states.state_parts import (
    bytes_of,
    from_bytes,
    is_plain,
    joined,
    split,
    to_bytes,
)

__all__ = ["LoopCheckpoints"]

_FORMAT = "popdist loop 1"
# The longest time, in seconds, to wait until gloo's threads have let go of the tensors of a call.
_LET_GO_SECONDS = 1.0
_POLL_SECONDS = 0.0001


class Stateful(Protocol):
    """An object that can return its state and load it again."""

    def state_dict(self) -> Any:
        """Return the state."""

    def load_state_dict(self, state_dict: Any) -> Any:
        """Load a state that ``state_dict`` returned."""


class LoopCheckpoints:
    """The checkpoints of a PyTorch loop, such as one with DistributedDataParallel.

    Every instance makes a LoopCheckpoints object after its modules and optimizers, and calls the
    same methods. After ``resume()``, the results have the same bits as without an interruption, if
    the program computes its next batch from the number of completed steps, and if the gradients are
    summed in the same order. This order can change with gloo. With ``--torch-backend popdist``, it
    changes with the number of hosts, unless the variable ``POPDIST_DETERMINISTIC`` is 1::

        checkpoints = LoopCheckpoints("checkpoints", model=model, optimizer=optimizer)
        for step in range(checkpoints.resume(), 1000):
            train(step)
            checkpoints.save(step + 1)

    All instances must have equal modules and optimizers, because each host stores them only once,
    and each of its instances copies a part of them to memory. Each instance has its own buffers,
    random numbers (of torch, Python and NumPy) and other objects, such as a scheduler or a data
    loader. With another number of instances than before, an instance without a saved state of its
    own loads the objects of instance 0, and keeps its random numbers.

    Args:
        folder: The folder of the checkpoint files, on the host of instance 0.
        keep: The number of newest checkpoints to keep on the disk.
        memory_every: The number of steps between two copies of the state to the memory of every
            host. These copies outlive the program but not the job, so a restart continues from
            them. With None, the launcher's option ``--memory-checkpoints`` selects 1, and otherwise
            there are no copies. Without the launcher, there are no copies either.
        disk_every: The number of steps between two checkpoints on the disk. If the job was asked to
            stop, ``save()`` writes to the disk after any number of steps.
        objects: The objects with ``state_dict()`` and ``load_state_dict()``, by name.

    Raises:
        TypeError: An object does not have ``state_dict()`` and ``load_state_dict()``.
        ValueError: A number is less than 1.
    """

    def __init__(
        self,
        folder: str | os.PathLike[str],
        *,
        keep: int = 3,
        memory_every: int | None = None,
        disk_every: int = 1,
        **objects: Stateful,
    ) -> None:
        for name, each in objects.items():
            if not (hasattr(each, "state_dict") and hasattr(each, "load_state_dict")):
                raise TypeError(
                    f"{name}={each!r:.200}: expected an object with the methods state_dict() and "
                    "load_state_dict(), such as a module or an optimizer"
                )
        self._files = Checkpoints(folder, keep)
        self._memory = memory_copies(folder, memory_every, os.environ)
        self._schedule = SaveSchedule(self._memory.every if self._memory else None, disk_every)
        self._equal = {n: o for n, o in objects.items() if isinstance(o, _EQUAL_TYPES)}
        self._own = {n: o for n, o in objects.items() if n not in self._equal}
        self._checked: set[str] = set()
        if self._memory is not None:
            self._wait_in_hooks()

    @property
    def _optimizers(self) -> list[torch.optim.Optimizer]:
        return [each for each in self._equal.values() if isinstance(each, torch.optim.Optimizer)]

    def _wait_in_hooks(self) -> None:
        """Let the gradients and the updates of the next step wait for the copies to memory.

        The hook of a parameter runs before DistributedDataParallel gets the parameter's gradient.
        """
        for optimizer in self._optimizers:
            optimizer.register_step_pre_hook(lambda *_: wait_for_copies())
            for parameter in _parameters(optimizer):
                if parameter.requires_grad:
                    parameter.register_hook(lambda _: wait_for_copies())

    def save(self, step: int) -> None:
        """Save the state of the training. All instances must call ``save()``.

        Call ``save()`` after the optimizers have updated the weights. Between ``save()`` and the
        next backward pass, change weights only by operations that torch counts, not by ``.data``.

        Args:
            step: The number of training steps that are completed.

        Raises:
            TypeError: The state of an object has a value that a checkpoint cannot contain.
        """
        with activities.doing(activities.SAVING, "save"):
            to_memory, to_disk = self._schedule.due(step)
            if not (to_memory or to_disk):
                return
            wait_for_copies()
            peers = _peers()
            parts = peers.all_gather_object(self._own_state())
            to_disk = to_disk and peers.instance_index == 0
            if not (to_memory or to_disk):
                return  # a sharded optimizer may have gathered its state on instance 0 alone
            equal = {name: each.state_dict() for name, each in self._equal.items()}

            def whole_state() -> dict[str, Any]:
                instances = [joined(rest, arrays) for rest, arrays in parts]
                return {"format": _FORMAT, "equal": equal, "instances": instances}

            def check() -> None:
                for name, value in equal.items():
                    self._check(name, value)

            if to_memory and self._memory is not None:
                self._memory.save(step, whole_state, self._live(equal), check)
            if to_disk:
                check()
                self._files.save(step, to_bytes(whole_state()))

    def _own_state(self) -> tuple[Any, list[Any]]:
        """Return the state of this instance alone, without its tensors, and its tensors' bytes."""
        buffers = {
            name: {key: buffer.detach() for key, buffer in each.named_buffers()}
            for name, each in self._equal.items()
            if isinstance(each, nn.Module)
        }
        objects = {name: each.state_dict() for name, each in self._own.items()}
        for name, value in objects.items():
            self._check(name, value)
        tensors: list[torch.Tensor] = []
        state = {"buffers": buffers, "objects": objects, "random": host_random()}
        rest, _ = split(state, tensors)
        return rest, [bytes_of(each) for each in tensors]

    def _live(self, equal: Mapping[str, Any]) -> list[torch.Tensor]:
        """Return the tensors that only the next step of an optimizer changes."""
        found: list[torch.Tensor] = []
        for optimizer in self._optimizers:
            found += _parameters(optimizer)
        for value in equal.values():
            if isinstance(value, dict) and "param_groups" in value:
                states = value["state"].values()
                found += [v for s in states for v in s.values() if isinstance(v, torch.Tensor)]
        return found

    def _check(self, name: str, value: Any) -> None:
        """Check that a checkpoint can contain the state of an object."""
        # The trial below takes long for large tensors, so tensors are tried only at the first save.
        if is_plain(value, any_tensor=name in self._checked):
            return
        self._checked.add(name)
        try:
            from_bytes(to_bytes(value))
        except Exception:
            raise TypeError(
                f"the state_dict() of {name} contains values that a checkpoint cannot store: "
                f"{value!r:.200}. Expected tensors, Python numbers, strings, and lists, tuples and "
                "dicts of them"
            ) from None

    def resume(self) -> int:
        """Load the newest complete state, if one exists. All instances must call ``resume()``.

        Returns:
            The number of completed training steps, or 0 without a state.

        Raises:
            ValueError: The newest checkpoint on the disk was not saved by ``LoopCheckpoints``. Such
                a state in memory is left out with a warning.
        """
        with activities.doing(activities.SAVING, "load"):
            peers = _peers()
            found = newest_state(self._memory, self._files, peers, _is_loop)
            if found is None:
                return 0
            step, state = found
            if isinstance(state, bytes):
                state = _loop_state(state, step, self._files)
            for name, each in self._equal.items():
                each.load_state_dict(state["equal"][name])
            self._load_own(state["instances"], peers.instance_index)
            self._schedule.resume(step)
            heartbeat.resume(step)
            return step

    def _load_own(self, instances: list[dict[str, Any]], index: int) -> None:
        is_known = index < len(instances)
        own = instances[index if is_known else 0]
        for name, buffers in own["buffers"].items():
            module = self._equal.get(name)
            if isinstance(module, nn.Module):
                present = dict(module.named_buffers())
                with torch.no_grad():
                    for key, value in buffers.items():
                        if key in present:
                            present[key].copy_(value)
        for name, each in self._own.items():
            each.load_state_dict(own["objects"][name])
        if is_known:
            load_host_random(own["random"])


# Data-parallel training keeps the states of these objects equal on all instances.
_EQUAL_TYPES = (nn.Module, torch.optim.Optimizer)


def _parameters(optimizer: torch.optim.Optimizer) -> list[torch.Tensor]:
    return [each for group in optimizer.param_groups for each in group["params"]]


def _is_loop(state: Any) -> bool:
    return bool(state["format"] == _FORMAT)


def _loop_state(data: bytes, step: int, files: Checkpoints) -> dict[str, Any]:
    try:
        state: dict[str, Any] = from_bytes(data)
        is_loop = _is_loop(state)
    except Exception:
        is_loop = False
    if not is_loop:
        raise ValueError(
            f"the checkpoint of step {step} in {files.folder} was not saved by this version of "
            "LoopCheckpoints. Use a separate folder for each training"
        )
    return state


class _TorchPeers:
    """The calls of ``Peers``, made with torch.distributed."""

    @property
    def instance_index(self) -> int:
        return dist.get_rank()

    def all_gather_object(self, value: object, name: str = "") -> list[Any]:
        del name
        if "gloo" in dist.get_backend():
            return _all_gather_over_gloo(value)
        values: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(values, value)
        return values

    def broadcast_object(self, value: object, root: int = 0, name: str = "") -> Any:
        del name
        values = [value]
        dist.broadcast_object_list(values, root)
        return values[0]


def _all_gather_over_gloo(value: object) -> list[Any]:
    """Return the values of all ranks, as ``dist.all_gather_object`` does."""
    own = torch.frombuffer(bytearray(pickle.dumps(value)), dtype=torch.uint8)
    num_ranks = dist.get_world_size()
    sizes = list(torch.empty(num_ranks, dtype=torch.long).split(1))
    _gather_and_let_go(sizes, torch.tensor([len(own)]))
    longest = int(max(sizes))
    padded = torch.zeros(longest, dtype=torch.uint8)
    padded[: len(own)] = own
    rows = list(torch.empty(num_ranks, longest, dtype=torch.uint8).unbind())
    _gather_and_let_go(rows, padded)
    pairs = zip(rows, sizes, strict=True)
    return [pickle.loads(row[: int(size)].numpy().tobytes()) for row, size in pairs]


def _gather_and_let_go(outputs: list[torch.Tensor], own: torch.Tensor) -> None:
    """Gather a tensor of each rank, and return when gloo's threads hold none of the tensors.

    A thread lets go of a tensor only with Python's lock. At the end of a program, torch waits for
    its threads while it has this lock, so a thread that is late would never end.
    """
    tensors = [*outputs, own]
    before = [sys.getrefcount(each) for each in tensors]
    dist.all_gather(outputs, own)
    deadline = time.monotonic() + _LET_GO_SECONDS
    while [sys.getrefcount(each) for each in tensors] != before:
        if time.monotonic() > deadline:
            return
        time.sleep(_POLL_SECONDS)


def _peers() -> Peers:
    """Return the calls between instances: torch.distributed's if the program uses it, else ours."""
    if dist.is_available() and dist.is_initialized():
        return _TorchPeers()
    return context.communicator()
