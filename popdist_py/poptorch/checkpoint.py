"""Checkpoints that let an interrupted training continue with the same results.

The module ``poptorch/checkpoint.py`` gathers the state of a training from all instances
(processes). The state of a training includes the position in the data and the host's random number
generators. The class ``PoplarExecutor`` (the wrapper of a model) returns the state of the model.
The module ``popdist_py.checkpoint`` reads and writes the files of checkpoints.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from popdist_py import activities, context, heartbeat
from popdist_py.checkpoint import Checkpoint, Checkpoints
from popdist_py.memory_slots import slot_state
from popdist_py.poptorch.errors import Error
from popdist_py.poptorch.model.executor import PoplarExecutor
from popdist_py.poptorch.model.training_state import own_state
from popdist_py.torch_states.host_random import (
    host_random,
    load_host_random,
)
from popdist_py.torch_states.memory_copies import (
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

__all__ = ["TrainingCheckpoints", "Weights", "weights_of"]

_VERSION = 2
# Attribute names of loaders and samplers that do not have a ``state_dict()``. ``_LINKS`` names
# attributes with inner samplers, ``_GENERATORS`` names attributes with random generators, and
# ``_COUNTERS`` names attributes with epoch counters.
_LINKS = ("sampler", "batch_sampler", "_batches", "_order", "_sampler")
_GENERATORS = ("generator", "_generator")
_COUNTERS = ("_epoch", "epoch")


class TrainingCheckpoints:
    """The checkpoints of one training, with the model, optimiser, data position and random numbers.

    Every instance makes a TrainingCheckpoints object and calls the same methods. Instance 0 of the
    job reads and writes the files of checkpoints. After ``resume()``, all results have the same
    bits as in a training without interruption.

    A training can also resume with another number of instances than before. A
    ``poptorch.DataLoader`` in its global order then continues with the same global batches. With
    other loaders, the rest of the epoch may have another order. If the number of instances changes,
    all instances continue with the host's random numbers of instance 0.

    Args:
        folder: The folder of the checkpoint files, on the host of instance 0.
        model: The model from ``poptorch.trainingModel``.
        loader: The data loader that ``batches()`` reads, or any iterable that starts a new epoch at
            each ``iter()``.
        keep: The number of newest checkpoints to keep on the disk. Checkpoints that are older than
            the ``keep`` newest checkpoints are deleted.
        memory_every: The number of steps between two copies of the state to the memory of every
            host. These copies outlive the program but not the job, so a restart continues from
            them. With None, the launcher's option ``--memory-checkpoints`` selects 1, and otherwise
            there are no copies. Without the launcher, there are no copies either.
        disk_every: The number of steps between two checkpoints on the disk. If the job was asked to
            stop, ``save()`` writes to the disk after any number of steps.

    Raises:
        ValueError: A number is less than 1.
    """

    def __init__(
        self,
        folder: str | os.PathLike[str],
        model: PoplarExecutor,
        loader: Any = (),
        keep: int = 3,
        memory_every: int | None = None,
        disk_every: int = 1,
    ) -> None:
        self._files = Checkpoints(folder, keep)
        self._memory = memory_copies(folder, memory_every, os.environ)
        self._schedule = SaveSchedule(self._memory.every if self._memory else None, disk_every)
        self._model = model
        self._data = _Stateful(loader) if _is_stateful(loader) else _Rewound(loader)
        self._epoch = 0
        # The number of batches of the current epoch that ``batches()`` has returned.
        self._done = 0
        self._resumed_random: dict[str, Any] | None = None

    @property
    def epoch(self) -> int:
        """The number of epochs that the training has completed."""
        return self._epoch

    def batches(self) -> Iterator[Any]:
        """Yield the remaining batches of the current epoch."""
        random_state, self._resumed_random = self._resumed_random, None
        if random_state is None:
            batches = self._data.begin()
        else:
            batches = self._data.go_on(self._epoch, self._done, random_state)
        for batch in batches:
            self._done += 1
            yield batch
        self._epoch += 1
        self._done = 0

    def save(self, step: int, extra: Mapping[str, Any] | None = None) -> None:
        """Save the state of the training as a checkpoint. All instances must call ``save()``.

        Args:
            step: The number of training steps that are completed.
            extra: Other values to save, such as the ``state_dict()`` of a scheduler. The values in
                ``extra`` may be tensors, numbers, texts, and lists, tuples and dictionaries of
                tensors, numbers and texts.

        Raises:
            Error: The model has not run yet, or a value in ``extra`` or in the scheduler's state
                has a type that a checkpoint cannot contain.
        """
        _check_extra(extra or {})
        with activities.doing(activities.SAVING, "save"):
            self._save(step, extra or {})

    def _save(self, step: int, extra: Mapping[str, Any]) -> None:
        to_memory, to_disk = self._schedule.due(step)
        if to_memory:
            self._save_to_memory(step, extra)
        if to_disk:
            self._save_to_disk(step, extra)

    def _save_to_disk(self, step: int, extra: Mapping[str, Any]) -> None:
        own = {**self._own_position(host_random()), **self._model.instance_state()}
        instances = context.communicator().gather_object(to_bytes(own))
        if instances is not None:
            state = self._whole_state(self._model.training_state(), instances, extra)
            self._files.save(step, to_bytes(state))

    def _save_to_memory(self, step: int, extra: Mapping[str, Any]) -> None:
        assert self._memory is not None
        live = self._model.live_module()
        own = {**self._own_position(host_random()), **self._model.instance_state(live)}
        tensors: list[torch.Tensor] = []
        rest, _ = split(own, tensors)
        wait_for_copies()
        arrays = [bytes_of(each) for each in tensors]
        parts = context.communicator().all_gather_object((live is not None, rest, arrays))
        training = self._model.training_state(live)

        def whole_state() -> dict[str, Any]:
            instances = [joined(rest, arrays) for _, rest, arrays in parts]
            return self._whole_state(training, instances, extra)

        # If only one instance has read its weights, such as for its log, only this instance has no
        # live tensors. All instances must pass the same tensors, so they pass none.
        unchanged: list[torch.Tensor] = []
        if live is not None and all(is_live for is_live, _, _ in parts):
            unchanged = [*live.weights, *training["optimizer"].values()]
        self._memory.save(step, whole_state, unchanged)

    def _own_position(self, random: dict[str, Any]) -> dict[str, Any]:
        return {"random": random, "data": self._data.state()}

    def _whole_state(
        self, training: dict[str, Any], instances: Sequence[Any], extra: Mapping[str, Any]
    ) -> dict[str, Any]:
        _check_loadable(training["scheduler"], "The state_dict() of the scheduler")
        return {
            "version": _VERSION,
            "training": training,
            "instances": list(instances),
            "epoch": self._epoch,
            "done": self._done,
            "extra": dict(extra),
        }

    def resume(self) -> tuple[int, dict[str, Any]]:
        """Load the newest complete checkpoint, if one exists. All instances must call ``resume()``.

        Call ``resume()`` before the model runs. The launcher's display of completed training steps
        continues from the loaded number.

        Returns:
            The number of completed training steps, and the values that ``save()`` received as
            ``extra``. If no checkpoint exists, the returned number of training steps is 0.

        Raises:
            Error: The checkpoint on the disk does not contain a training, or another version of
                this package wrote it. Such a state in memory is left out with a warning.
        """
        with activities.doing(activities.SAVING, "load"):
            return self._resume()

    def _resume(self) -> tuple[int, dict[str, Any]]:
        found = newest_state(self._memory, self._files, context.communicator(), _is_training)
        if found is None:
            return 0, {}
        step, state = found
        if isinstance(state, bytes):
            state = _training_in(Checkpoint(step, state), self._files.folder)
            state["instances"] = [from_bytes(data) for data in state["instances"]]
        self._schedule.resume(step)
        instances = state["instances"]
        self._model.load_training_state(state["training"], instances)
        own = own_state(instances)
        self._data.load_state(own["data"])
        self._epoch, self._done = state["epoch"], state["done"]
        self._resumed_random = own["random"]
        heartbeat.resume(step)
        return step, state["extra"]


@dataclass(frozen=True, slots=True)
class Weights:
    """The weights in a checkpoint, for programs that do not continue the training.

    Attributes:
        step: The number of training steps that were completed.
        model: The ``state_dict()`` of the module on instance 0.
        extra: The values that ``save()`` received as ``extra``.
    """

    step: int
    model: dict[str, torch.Tensor]
    extra: dict[str, Any]


def weights_of(checkpoint: Checkpoint, folder: str | os.PathLike[str]) -> Weights:
    """Return the weights in a checkpoint, for example to validate the model.

    Args:
        checkpoint: A checkpoint from ``popdist_py.checkpoint.Checkpoints``.
        folder: The folder of the checkpoint, for error messages.

    Raises:
        Error: The checkpoint does not contain a training, or another version of this package wrote
            it.
    """
    state = _training_in(checkpoint, folder)
    return Weights(checkpoint.step, state["training"]["model"], state["extra"])


def _is_training(state: Any) -> bool:
    return bool(state["version"] == _VERSION)


def _training_in(checkpoint: Checkpoint, folder: str | os.PathLike[str]) -> dict[str, Any]:
    try:
        slot = slot_state(checkpoint.data)
        state: dict[str, Any] = (
            from_bytes(checkpoint.data)
            if slot is None
            else joined(from_bytes(slot.head), slot.arrays)
        )
        version = state["version"]
    except Exception as error:
        raise Error(
            f"the checkpoint of step {checkpoint.step} in {folder} does not contain the state of a "
            f"training ({type(error).__name__}). Give each training its own checkpoint folder"
        ) from None
    if version != _VERSION:
        raise Error(
            f"the checkpoint of step {checkpoint.step} in {folder} has format version {version}: "
            f"expected version {_VERSION}. Resume with the version of this package that saved the "
            "checkpoint, or give the training another folder"
        )
    return state


# --- The position in the data -----------------------------------------------------------------


def _is_stateful(loader: Any) -> bool:
    """Tell whether a loader has the methods ``state_dict()`` and ``load_state_dict()``."""
    return hasattr(loader, "state_dict") and hasattr(loader, "load_state_dict")


class _Stateful:
    """The position in a data loader that has a ``state_dict()``.

    After a call of the loader's ``load_state_dict()``, its next ``iter()`` continues with the batch
    after the saved position.

    Args:
        loader: A loader with ``state_dict()`` and ``load_state_dict()``.
    """

    def __init__(self, loader: Any) -> None:
        self._loader = loader
        self._is_known = True  # Whether the checkpoint contains the loader's position.

    def begin(self) -> Iterator[Any]:
        """Begin an epoch, and return the iterator over its batches."""
        return iter(self._loader)

    def state(self) -> dict[str, Any]:
        """Return the state of the data loader, which contains its position in the data.

        Raises:
            Error: The loader's state contains a value of a type that a checkpoint cannot contain.
        """
        state = {"loader": self._loader.state_dict()}
        _check_loadable(state["loader"], f"The state_dict() of {type(self._loader).__name__}")
        return state

    def load_state(self, state: Mapping[str, Any]) -> None:
        """Load a state of the data loader that :meth:`state` returned."""
        self._is_known = "loader" in state
        if self._is_known:
            self._loader.load_state_dict(state["loader"])

    def go_on(self, epoch: int, done: int, random_state: Mapping[str, Any]) -> Iterator[Any]:
        """Return the remaining batches of the epoch in which the training was saved.

        Raises:
            Error: The checkpoint was saved with a loader that has no ``state_dict()``.
        """
        # ``load_state`` has already set the loader to the saved position, so the arguments are not
        # needed.
        del epoch, done
        if not self._is_known:
            raise Error(
                "The checkpoint was saved with a loader that has no state_dict(), but "
                f"{type(self._loader).__name__} has a state_dict(). Resume with a loader of the "
                "type that was saved"
            )
        load_host_random(random_state)
        return iter(self._loader)


class _Rewound:
    """The position in a data loader or other iterable that does not have a ``state_dict()``.

    To resume, the class ``_Rewound`` starts the epoch again with the same random numbers, and skips
    the batches that were already used.

    Args:
        loader: An iterable that starts a new epoch at each ``iter()``.
    """

    def __init__(self, loader: Any) -> None:
        self._loader = loader
        self._start: dict[str, Any] = {}

    def begin(self) -> Iterator[Any]:
        """Store the state of the random generators, and begin an epoch."""
        self._start = {"random": host_random(), "parts": _parts_state(self._loader)}
        return iter(self._loader)

    def state(self) -> dict[str, Any]:
        """Return the state of the random generators at the beginning of the epoch."""
        return self._start

    def load_state(self, state: Mapping[str, Any]) -> None:
        """Load a state of the random generators that :meth:`state` returned."""
        self._start = dict(state)

    def go_on(self, epoch: int, done: int, random_state: Mapping[str, Any]) -> Iterator[Any]:
        """Begin the saved epoch again, and return the batches that the training has not used yet.

        Args:
            epoch: The number of complete epochs before the saved epoch.
            done: The number of batches of the saved epoch that the training has used.
            random_state: The state of the host's random generators when the training was saved.

        Raises:
            Error: The checkpoint was saved with a loader that has a ``state_dict()``.
        """
        if "loader" in self._start:
            raise Error(
                "The checkpoint was saved with a loader that has a state_dict(), but "
                f"{type(self._loader).__name__} has no state_dict(). Resume with a loader of the "
                "type that was saved"
            )
        if getattr(self._loader, "_accessor", None) is not None:
            # A separate loader process loads the batches, and the training process cannot change
            # the samplers of the loader process. The batches of all complete epochs are therefore
            # read again.
            for _ in range(epoch):
                for _ in self._loader:
                    pass
        elif self._start:
            _load_parts_state(self._loader, self._start["parts"])
        if self._start:
            load_host_random(self._start["random"])
        batches: Iterator[Any] = iter(self._loader)
        for _ in range(done):
            next(batches)
        load_host_random(random_state)
        return batches


# --- Checks of values before a checkpoint is written ------------------------------------------


def _check_extra(extra: Mapping[str, Any]) -> None:
    """Raise an Error if ``extra`` contains a value of a type that a checkpoint cannot contain."""
    for key, value in extra.items():
        _check_loadable(value, f"extra[{key!r}]")


def _check_loadable(value: Any, name: str) -> None:
    if is_plain(value):  # The trial below takes longer than a copy to memory should.
        return
    try:
        from_bytes(to_bytes({name: value}))
    except Exception:
        raise Error(
            f"{name} contains values that a checkpoint cannot store: {value!r:.200}. Expected "
            "tensors, Python numbers, strings, and lists, tuples and dictionaries of these"
        ) from None


# --- Data loaders that do not have a ``state_dict()`` -----------------------------------------


def _parts(loader: Any) -> Iterator[Any]:
    """Yield a data loader, the samplers that it uses, and their inner samplers."""
    seen: set[int] = set()
    waiting = [loader]
    while waiting:
        part = waiting.pop()
        if id(part) in seen:
            continue
        seen.add(id(part))
        yield part
        waiting += [vars(part)[name] for name in _LINKS if name in getattr(part, "__dict__", {})]


def _parts_state(loader: Any) -> list[dict[str, Any]]:
    """Return the random generators' states and epoch counters of a loader and its samplers."""
    state: list[dict[str, Any]] = []
    for part in _parts(loader):
        values = getattr(part, "__dict__", {})
        part_state: dict[str, Any] = {
            name: values[name].get_state()
            for name in _GENERATORS
            if isinstance(values.get(name), torch.Generator)
        }
        part_state |= {
            name: values[name] for name in _COUNTERS if isinstance(values.get(name), int)
        }
        state.append(part_state)
    return state


def _load_parts_state(loader: Any, state: list[dict[str, Any]]) -> None:
    for part, part_state in zip(_parts(loader), state, strict=False):
        values = getattr(part, "__dict__", {})
        for name, value in part_state.items():
            # A loader for another number of instances may have samplers that lack some of the saved
            # attributes.
            if isinstance(value, torch.Tensor) and isinstance(values.get(name), torch.Generator):
                values[name].set_state(value)
            elif isinstance(values.get(name), int):
                setattr(part, name, value)
