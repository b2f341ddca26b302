"""Several groups in one job, with subsets of ranks, several threads, and repeated creation."""

import gc
import os
import random
import threading
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from support.listening import free_port
from support.processes import wait_until
from support.ranks import run_ranks, values


def _resources():
    gc.collect()
    descriptors = len(list(Path("/proc/self/fd").iterdir()))
    mappings = Path("/proc/self/maps").read_text().count("popdist-")
    return descriptors, threading.active_count(), mappings


def _made_and_destroyed(rank, count):
    def once():
        group = dist.new_group([0, 1])
        tensor = torch.ones(4)
        dist.all_reduce(tensor, group=group)
        work = dist.all_reduce(tensor, group=group, async_op=True)
        work.wait()
        assert tensor.tolist() == [4.0] * 4
        dist.destroy_process_group(group)

    once()
    before = _resources()
    for _ in range(count):
        once()
    return before, _resources()


def _assert_nothing_left(outcomes):
    for before, after in values(outcomes):
        assert after == before


def test_groups_made_and_destroyed_leave_nothing():
    _assert_nothing_left(run_ranks(2, _made_and_destroyed, 8))


@pytest.mark.sweep
def test_a_hundred_groups_leave_nothing():
    _assert_nothing_left(run_ranks(2, _made_and_destroyed, 100))


def _begun_again(rank, folder):
    sums = []
    for attempt in range(3):
        store = dist.FileStore(f"{folder}/{attempt}", 2)
        dist.init_process_group("popdist", store=store, rank=rank, world_size=2)
        tensor = torch.tensor([rank + attempt])
        dist.all_reduce(tensor)
        sums.append(tensor.item())
        dist.destroy_process_group()
    return sums


def test_the_group_of_all_can_be_made_again(tmp_path):
    outcomes = run_ranks(2, _begun_again, str(tmp_path), backend=None)
    assert values(outcomes) == [[1, 3, 5]] * 2


def _exchanged(rank, value):
    received = torch.zeros(1)
    works = [dist.isend(torch.tensor([value]), 1 - rank), dist.irecv(received, 1 - rank)]
    for work in works:
        work.wait()
    return received.item()


def _begun_again_in_one_store(rank, folder, port):
    """Make the group of all ranks three times in torch's own store, with rank 1 early."""
    os.environ.update(RANK=str(rank), WORLD_SIZE="2", MASTER_ADDR="127.0.0.1", MASTER_PORT=port)
    sums = []
    for attempt in range(3):
        dist.init_process_group("popdist")
        if rank == 1:
            Path(folder, str(attempt)).touch()
        total = torch.tensor([rank + attempt])
        dist.all_reduce(total)
        # Make subgroups that reuse old names with other ranks; the second has one rank only.
        inner = dist.new_group([0, 1] if attempt != 1 else [1], backend="popdist")
        if rank == 1 or attempt != 1:
            dist.all_reduce(total, group=inner)
        sums.append((total.item(), _exchanged(rank, rank + 0.5)))
        if rank == 0 and attempt < 2:
            wait_until(Path(folder, str(attempt + 1)).exists, limit=20)
        del inner
        dist.destroy_process_group()
        gc.collect()
    return sums


def test_the_group_of_all_can_be_made_again_in_one_store(tmp_path):
    port = str(free_port())
    first, second = values(
        run_ranks(2, _begun_again_in_one_store, str(tmp_path), port, backend=None)
    )
    assert first == [(2, 1.5), (3, 1.5), (10, 1.5)]
    assert second == [(2, 0.5), (3, 0.5), (10, 0.5)]


def _made_again_by_its_members(rank):
    sums = []
    for attempt in range(3):
        group = dist.new_group([0, 1], use_local_synchronization=True)
        total = torch.tensor([rank + attempt])
        dist.all_reduce(total, group=group)
        sums.append(total.item())
        dist.destroy_process_group(group)
    return sums


def test_members_alone_can_make_a_group_again():
    assert values(run_ranks(2, _made_again_by_its_members)) == [[1, 3, 5]] * 2


def _orders(rank):
    groups = [dist.new_group([0, 1]) for _ in range(3)]
    for attempt in range(5):
        tensors = [torch.full((1000,), float(index + 1)) for index in range(3)]
        order = [0, 1, 2]
        random.Random(10 * attempt + rank).shuffle(order)
        works = [dist.all_reduce(tensors[i], group=groups[i], async_op=True) for i in order]
        for work in works:
            work.wait()
        assert [tensor[-1].item() for tensor in tensors] == [2.0, 4.0, 6.0]
    return True


def test_calls_of_several_groups_may_be_in_any_order():
    assert values(run_ranks(2, _orders)) == [True, True]


def _threads(rank):
    # Use one group per thread, and one group from two threads that make equal calls.
    groups = [dist.new_group([0, 1]) for _ in range(3)]
    shared = dist.new_group([0, 1])
    errors = []

    def use(group, value):
        try:
            for _ in range(20):
                tensor = torch.full((50,), value)
                dist.all_reduce(tensor, group=group)
                assert tensor[0] == 2 * value
                common = torch.ones(7)
                dist.all_reduce(common, group=shared)
                assert common.tolist() == [2.0] * 7
        except BaseException as error:
            errors.append(repr(error))

    threads = [
        threading.Thread(target=use, args=(group, float(index)))
        for index, group in enumerate(groups)
    ]
    for thread in threads if rank else reversed(threads):
        thread.start()
    for thread in threads:
        thread.join()
    return errors


def test_threads_may_use_groups_at_the_same_time():
    assert values(run_ranks(2, _threads)) == [[], []]


def _subsets(rank, seed, rounds):
    size = dist.get_world_size()
    chosen = random.Random(seed)
    subsets = [sorted(chosen.sample(range(size), chosen.randint(1, size))) for _ in range(6)]
    groups = [dist.new_group(subset) for subset in subsets]
    for _ in range(rounds):
        which = chosen.randrange(len(groups))
        kind, length = (
            chosen.choice(["reduce", "gather", "broadcast"]),
            chosen.choice([1, 300, 90000]),
        )
        is_async = chosen.random() < 0.5
        subset, group = subsets[which], groups[which]
        root = chosen.choice(subset)
        if rank not in subset:
            continue
        tensor = torch.full((length,), float(rank + 1))
        if kind == "reduce":
            work = dist.all_reduce(tensor, group=group, async_op=is_async)
            expected = sum(other + 1 for other in subset)
        elif kind == "broadcast":
            work = dist.broadcast(tensor, root, group=group, async_op=is_async)
            expected = root + 1
        else:
            rows = [torch.zeros(length) for _ in subset]
            work = dist.all_gather(rows, tensor, group=group, async_op=is_async)
            expected = [other + 1 for other in subset]
        if work is not None:
            work.wait()
        found = [row[-1].item() for row in rows] if kind == "gather" else tensor[-1].item()
        assert found == expected, (kind, subset)
    return True


def test_groups_of_any_ranks_give_right_results():
    assert values(run_ranks(3, _subsets, 1, 40)) == [True] * 3


@pytest.mark.sweep
@pytest.mark.parametrize("seed", range(5))
def test_random_groups_of_more_ranks_than_cores(seed):
    assert values(run_ranks(8, _subsets, seed, 100)) == [True] * 8


def _alone(rank):
    group = dist.new_group([rank], use_local_synchronization=True)
    tensor = torch.ones(3)
    dist.all_reduce(tensor, group=group)
    dist.barrier(group)
    dist.monitored_barrier(group)
    rows = [None]
    dist.all_gather_object(rows, "value", group=group)
    return tensor.tolist(), rows


def test_a_group_may_have_one_rank():
    assert values(run_ranks(2, _alone)) == [([1.0] * 3, ["value"])] * 2
