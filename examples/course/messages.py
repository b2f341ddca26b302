"""Counts what a DataLoader of torch and its workers send to one another.

A DataLoader makes all its queues by the multiprocessing context that it is given: the first one is
for the batches, and then each worker gets one for its lists of indices. So a context whose queues
take notes sees every message, and nothing inside torch is touched.
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

    #: For each batch, in order: its worker, and the worker that loaded each of its samples.
    asked: list[int] = field(default_factory=list)
    loaded: list[list[int]] = field(default_factory=list)
    index_lists: int = 0
    batches: int = 0
    #: Of shared memory with the numbers of a batch; they pass through a socket.
    handles: int = 0
    #: Messages that end a worker.
    farewells: int = 0
    #: Lists of indices that were sent before the first batch came back.
    ahead: int = 0


class _WithWorker(Dataset):
    """A data set that tells which process loaded a sample; the main process is -1."""

    def __init__(self, dataset: Dataset) -> None:
        self.dataset = dataset

    def __len__(self) -> int:
        return len(self.dataset)

    def __getitem__(self, index: int):
        worker = get_worker_info()
        return self.dataset[index], -1 if worker is None else worker.id


class _Indices(queues.Queue):
    """Main process to one worker: ``(batch, indices)``, and None at the end."""

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
    """All workers to the main process: ``(batch, data)``."""

    def note(self, traffic: Traffic) -> None:
        self._traffic = traffic

    def get(self, *args, **kwargs):
        message = super().get(*args, **kwargs)
        self._traffic.batches += 1
        return message


def _counting_context(method: str | None, traffic: Traffic):
    """Return a context of ``method`` whose queues write down in ``traffic`` what passes."""
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
    # A list of workers, since a second tensor would add a handle.
    return torch.stack([picture for picture, _ in samples]), [worker for _, worker in samples]
