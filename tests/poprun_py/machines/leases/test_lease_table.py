"""Processes take, wait for and return CPUs in the table of leases, and some are killed."""

from __future__ import annotations

import contextlib
import os
import shutil
import stat
import subprocess
import sys
import tempfile
from pathlib import Path
from types import SimpleNamespace

import pytest
from support.processes import wait_until
from support.repository import ROOT

from poprun_py.machines import lease_files
from poprun_py.machines.lease_files import MAX_NUMBER, LeaseFolder, QueueRecord
from poprun_py.machines.leases import (
    OvertakenError,
    decide_on_table,
    leases_folder,
    open_table,
    this_job,
)

WORKER = Path(__file__).with_name("lease_worker.py")
NOBODY, SOMEBODY = 65_534, 54_321


@pytest.fixture
def folder(place):
    with contextlib.closing(LeaseFolder(place)) as made:
        yield made


def held(folder):
    with open_table(folder) as table:
        return table.held_cpus


def test_a_lease_is_visible_until_it_is_closed(folder, holder):
    with open_table(folder) as table:
        lease = table.take(this_job("mine"), (1, 3), (0,))
    # The process that looks is a child of this one.
    seen = holder("look").seen["outer"][0]
    assert (seen["cpus"], seen["pid"], seen["program"]) == ([1, 3], os.getpid(), "mine")
    lease.name_run("run-7")
    assert holder("look").seen["outer"][0]["run_id"] == "run-7"
    lease.close()
    lease.close()
    assert holder("look").seen["outer"] == []


def test_a_job_alone_does_not_read_the_kernels_list_of_locks(folder, monkeypatch):
    def read():
        pytest.fail("reading the list stops all processes that lock files")

    monkeypatch.setattr(lease_files, "_locks", read)
    decide_on_table(folder, lambda table: table.take(this_job("mine"), (1,), (0,))).close()


def test_a_killed_process_frees_its_cpus_at_once(folder, holder):
    first, second = holder(cpus="0-1").process, holder(cpus="2").process
    assert held(folder) == {0, 1, 2}
    first.kill()
    first.wait()
    assert held(folder) == {2}
    second.communicate("")
    assert held(folder) == frozenset()


def test_the_queue_is_in_order_of_arrival_without_dead_processes(folder, holder):
    waiting = [holder("queue").process for _ in range(3)]
    with open_table(folder) as table:
        assert [each.job.pid for each in table.queue] == [p.pid for p in waiting]
        mine = table.join_queue(this_job("mine"))
    waiting[0].kill()
    waiting[0].wait()
    with open_table(folder) as table:
        assert [w.job.pid for w in table.ahead_of(mine)] == [p.pid for p in waiting[1:]]
        assert len(table.ahead_of(None)) == 3
    mine.close()
    with open_table(folder) as table:
        assert [each.job.pid for each in table.queue] == [p.pid for p in waiting[1:]]


def test_the_highest_number_in_the_queue_does_not_change_the_order_of_later_jobs(folder, holder):
    stranger = QueueRecord("ticket-stranger", "", this_job("stranger"), MAX_NUMBER, 1.0)
    with folder.mutex():
        file = folder.create(stranger)
    waiting = [holder("queue").process.pid for _ in range(3)]
    with open_table(folder) as table:
        assert [each.job.pid for each in table.queue] == [os.getpid(), *waiting]
    file.close()


def test_of_two_jobs_that_take_the_same_cpus_at_once_one_gets_an_error(folder, place, monkeypatch):
    # This can happen only if another user keeps the mutex locked.
    monkeypatch.setattr(lease_files, "_users_that_lock", lambda *_: frozenset({NOBODY}))
    monkeypatch.setattr(lease_files, "_is_locked_by_other_user", lambda *_: False)
    with contextlib.closing(LeaseFolder(place)) as other, contextlib.ExitStack() as stack:
        stack.enter_context(folder.mutex())
        table = stack.enter_context(open_table(other))
        assert table.held_cpus == frozenset()
        first = decide_on_table(other, lambda table: table.take(this_job("first"), (0, 1), (0,)))
        with pytest.raises(OvertakenError):
            table.take(this_job("late"), (1, 2), (0,))
        second = table.take(this_job("second"), (2,), (0,))
        assert held(other) == {0, 1, 2}
        assert len(list(place.glob("lease-*"))) == 2
        first.close()
        second.close()


def test_a_decision_is_repeated_after_another_job_was_faster(folder):
    tries = []

    def decide(table):
        tries.append(table)
        if len(tries) < 3:
            raise OvertakenError
        return "lease"

    assert decide_on_table(folder, decide) == "lease"
    assert len(set(tries)) == 3


def test_instances_may_use_the_cpus_of_their_own_job(folder, holder):
    with open_table(folder) as table:
        lease = table.take(this_job("outer"), (0, 1), (0,))
    inner = holder("look", through=("sh", "-c", '"$@"; true', "sh")).seen
    assert (inner["jobs"], [job["cpus"] for job in inner["outer"]]) == ([], [[0, 1]])
    # A job inside the outer job does not wait for jobs that wait for the outer job. Otherwise both
    # would wait forever.
    with open_table(folder) as table:
        queued = table.join_queue(this_job("behind the outer job"))
    assert holder("look").seen["ahead"] == 0
    inside = holder("queue").process
    assert holder("look").seen["ahead"] == 1
    with open_table(folder) as table:
        assert [each.job.pid for each in table.ahead_of(None)] == [os.getpid()]
    inside.communicate("")
    queued.close()
    lease.close()


@pytest.mark.parametrize(
    ("given", "found"),
    [("none", None), ("NONE", None), ("/x/y", Path("/x/y"))],
)
def test_the_variable_names_the_folder(given, found):
    assert leases_folder({"POPRUN_LEASES": given}) == found


def test_the_default_folder_and_an_invalid_variable():
    assert leases_folder({}) in (Path("/dev/shm/poprun-py-leases"), Path("/tmp/poprun-py-leases"))
    with pytest.raises(
        ValueError, match="POPRUN_LEASES 'x': expected the absolute path of a folder, or none"
    ):
        leases_folder({"POPRUN_LEASES": "x"})


@pytest.fixture
def shared():
    """Return a folder that all users can reach, unlike those of pytest."""
    made = Path(tempfile.mkdtemp(prefix="leases-of-users-"))
    made.chmod(0o755)
    yield made
    shutil.rmtree(made)


@contextlib.contextmanager
def locked_by(uid, path):
    """Keep a file locked by a process of another user."""
    code = (
        f"import fcntl, os, sys; os.setuid({uid}); file = os.open(sys.argv[1], 0); "
        "fcntl.flock(file, fcntl.LOCK_EX); print(1, flush=True); input()"
    )
    words = [sys.executable, "-I", "-S", "-c", code, str(path)]
    with subprocess.Popen(words, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        process.stdout.readline()
        yield
        process.communicate(b"\n")


# --- many processes, and kills --------------------------------------------------------------------


def workers(place, cores, count, kills):
    """Run 8 workers and kill some; return their output, the killed ids and the exit codes."""
    import random

    chance = random.Random(1)

    def start(seed):
        words = [sys.executable, str(WORKER), str(place), str(cores), str(count), str(seed)]
        out = (cores.parent / f"said-{seed}").open("w")
        with out:
            return subprocess.Popen(
                words, stdout=out, env={**os.environ, "PYTHONPATH": str(ROOT)}, stdin=-3
            )

    running, killed, seeds = {seed: start(seed) for seed in range(8)}, set(), iter(range(8, 999))

    def said():
        return sum(f.read_text().count("\n") for f in cores.parent.glob("said-*"))

    try:
        for number in range(kills):
            # The kills are spread over the work, and may come in the middle of an operation.
            wait_until(lambda n=number: said() > (n + 1) * count * 4 // kills)
            alive = sorted(s for s, p in running.items() if p.poll() is None)
            victim = running[chance.choice(alive)]
            victim.kill()
            victim.wait()
            killed.add(victim.pid)
            seed = next(seeds)
            running[seed] = start(seed)
        for process in running.values():
            process.wait(60)
    finally:
        for process in running.values():
            process.kill()
            process.wait()
    codes = {p.returncode for p in running.values() if p.pid not in killed}
    lines = [f.read_text().splitlines() for f in cores.parent.glob("said-*")]
    return [line for each in lines for line in each], killed, codes


@pytest.mark.parametrize(
    ("count", "kills", "has_stranger"),
    [
        (12, 3, False),
        pytest.param(125, 30, False, marks=pytest.mark.sweep),
        # Another user keeps the mutex locked.
        pytest.param(125, 30, True, marks=pytest.mark.sweep),
    ],
)
def test_no_core_is_leased_twice_and_none_is_lost_when_processes_are_killed(
    shared, tmp_path, count, kills, has_stranger
):
    if has_stranger and os.geteuid() != 0:
        pytest.skip("only root becomes other users")
    place = shared / "leases"
    cores = tmp_path / "cores"
    cores.mkdir()
    for cpu in range(4):
        (cores / str(cpu)).touch()
    with contextlib.ExitStack() as stack:
        folder = stack.enter_context(contextlib.closing(LeaseFolder(place)))
        assert held(folder) == frozenset()
        if has_stranger:
            stack.enter_context(locked_by(NOBODY, place))
        said, killed, codes = workers(place, cores, count, kills)
    assert codes == {0}
    assert len(killed) == kills
    assert said.count("had") > count
    # The kernel releases the locks of a killed process one after another.
    twice = [line.split() for line in said if line.startswith("twice")]
    assert [words for words in twice if int(words[2]) not in killed] == []
    with contextlib.closing(LeaseFolder(place)) as folder:
        assert held(folder) == frozenset()
    assert [each.name for each in place.iterdir()] == []


# --- users side by side ---------------------------------------------------------------------------


@pytest.mark.skipif(os.geteuid() != 0, reason="only root becomes other users")
def test_a_mutex_that_another_user_locks_is_waited_for_only_once(shared, monkeypatch):
    place, pauses = shared / "leases", []
    clock = SimpleNamespace(monotonic=lambda: sum(pauses), sleep=pauses.append)
    monkeypatch.setattr(lease_files, "time", clock)
    with contextlib.closing(LeaseFolder(place)) as folder:
        assert held(folder) == frozenset()
        with locked_by(NOBODY, place):
            lease = decide_on_table(folder, lambda table: table.take(this_job("mine"), (0,), (0,)))
            lease.name_run("run-7")
            with open_table(folder) as table:
                assert [each.job.run_id for each in table.leases] == ["run-7"]
        # There are two LeaseFolder objects, this one and the lease's, and each has waited once.
        assert 1.9 < sum(pauses) / lease_files._OTHER_USER_SECONDS < 2.1
        lease.close()


@pytest.mark.skipif(os.geteuid() != 0, reason="only root becomes other users")
def test_a_lock_of_another_user_does_not_keep_the_lease_of_a_dead_job(shared, holder):
    place = shared / "leases"
    with contextlib.closing(LeaseFolder(place)) as folder:
        first = holder(cpus="0", folder=place).process
        assert held(folder) == {0}
        first.kill()
        first.wait()
        (left,) = place.glob("lease-*")
        with locked_by(NOBODY, left):
            assert held(folder) == frozenset()
        assert list(place.glob("lease-*")) == []


@pytest.mark.skipif(os.geteuid() != 0, reason="only root becomes other users")
def test_two_ordinary_users_see_each_others_leases(shared, holder):
    place = shared / "leases"
    LeaseFolder(place).close()
    users = {uid: {"user": [str(uid)], "folder": place} for uid in (NOBODY, SOMEBODY)}
    first = holder(cpus="0", **users[NOBODY])
    second = holder(cpus="1", **users[SOMEBODY])
    assert [(job["user"], job["cpus"]) for job in second.seen["jobs"]] == [("nobody", [0])]
    look = holder("look", **users[NOBODY]).seen["jobs"]
    assert [job["user"] for job in look] == ["nobody", str(SOMEBODY)]
    # The other user cannot remove the file of a dead job, and ignores it.
    first.process.kill()
    first.process.wait()
    assert [j["cpus"] for j in holder("look", **users[SOMEBODY]).seen["jobs"]] == [[1]]
    assert len(list(place.glob("lease-*"))) == 2
    assert [j["cpus"] for j in holder("look", **users[NOBODY]).seen["jobs"]] == [[1]]
    assert len(list(place.glob("lease-*"))) == 1
    assert stat.S_IMODE(place.stat().st_mode) == 0o1777
    # A file that another user makes unreadable is ignored.
    (place / "lease-hidden").touch(mode=0o600)
    assert [j["cpus"] for j in holder("look", **users[NOBODY]).seen["jobs"]] == [[1]]
