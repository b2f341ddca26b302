"""Functions that count the messages between torch's DataLoader and its workers.

A DataLoader makes all its queues with a multiprocessing context that the caller can pass. The first
queue is for the batches. Each worker then gets another queue for its lists of indices. This module
passes a context whose queues count all messages, so it does not change torch itself.
"""

from __future__ import annotations

import multiprocessing as mp
from dataclasses import dataclass, field
from multiprocessing import queues, resource_sharer
from unittest.mock import patch

import torch.multiprocessing  # how tensors travel through queues
from torch.utils.data import DataLoader, Dataset, get_worker_info

__all__ = ["Traffic", "count_messages"]


@dataclass
class Traffic:
    """The messages of a DataLoader during all its batches, seen by the main process."""

    #: For each batch, in order: the worker that was asked for the batch, and the worker that loaded
    #: each of its samples.
    asked: list[int] = field(default_factory=list)
    loaded: list[list[int]] = field(default_factory=list)
    index_lists: int = 0
    batches: int = 0
    #: The number of handles of shared memory with the values of a batch. They are sent through a
    #: socket.
    handles: int = 0
    #: The number of messages that end a worker.
    farewells: int = 0
    #: The number of lists of indices that were sent before the first batch was received.
    ahead: int = 0


class _WithWorker(Dataset):
    """A data set that returns each sample with the number of the worker that loaded it.

    The main process has the number -1.
    """

    def __init__(self, dataset: Dataset) -> None:
        self.dataset = dataset

    def __len__(self) -> int:
        return len(self.dataset)

    def __getitem__(self, index: int):
        worker = get_worker_info()
        return self.dataset[index], -1 if worker is None else worker.id


class _Indices(queues.Queue):
    """The queue from the main process to one worker.

    Its messages are ``(batch, indices)``, and None at the end.
    """

    def note(self, traffic: Traffic, worker: int) -> None:
        self._traffic, self._worker = traffic, worker

    def put(self, message, *args, **kwargs):
        if message is None:
            self._traffic.farewells += 1
        else:
            self._traffic.index_lists += 1
            self._traffic.asked.append(self._worker)
            self._traffic.ahead += self._traffic.batches == 0
        super().put(message, *args, **kwargs)


class _Batches(queues.Queue):
    """The queue from all workers to the main process. Its messages are ``(batch, data)``."""

    def note(self, traffic: Traffic) -> None:
        self._traffic = traffic

    def get(self, *args, **kwargs):
        message = super().get(*args, **kwargs)
        self._traffic.batches += 1
        return message


def _counting_context(method: str | None, traffic: Traffic):
    """Return a context of ``method`` whose queues record their messages in ``traffic``."""
    plain = mp.get_context(method or mp.get_start_method())
    workers = iter(range(-1, 10**6))

    class Context(type(plain)):
        def Queue(self, maxsize: int = 0):
            worker = next(workers)
            queue = (_Batches if worker < 0 else _Indices)(maxsize, ctx=plain)
            queue.note(traffic, *([] if worker < 0 else [worker]))
            return queue

    return Context()


def count_messages(
    dataset: Dataset, batch_size: int, workers: int, batches: int, method: str | None = None
) -> Traffic:
    """Load the first ``batches`` batches in order, and return the counts of the messages."""
    traffic = Traffic()
    count = min(len(dataset), batches * batch_size)
    loader = DataLoader(
        _WithWorker(dataset), batch_size=batch_size, num_workers=workers, sampler=range(count),
        multiprocessing_context=_counting_context(method, traffic) if workers else None,
        collate_fn=_pictures_and_workers,
    )  # fmt: skip
    detach = resource_sharer.DupFd.detach

    def counted(handle):
        traffic.handles += 1
        return detach(handle)

    with patch.object(resource_sharer.DupFd, "detach", counted):
        for _, workers_of_samples in loader:
            traffic.loaded.append(workers_of_samples)
    return traffic


def _pictures_and_workers(samples):
    # The workers are a list instead of a tensor, because a second tensor would add a handle.
    return torch.stack([picture for picture, _ in samples]), [worker for _, worker in samples]
