"""Several jobs of one process, from threads and in an event loop."""

from __future__ import annotations

import asyncio
from concurrent.futures import ThreadPoolExecutor

import pytest
from support.processes import wait_until

import poprun_py
from poprun_py import JobFailedError

pytestmark = pytest.mark.mpi


def test_jobs_of_several_threads(capsys):
    def run(code):
        with poprun_py.start(["sh", "-c", f"echo {code}; exit {code}"], share_cores=True) as job:
            return job.wait(100).exit_code, job.output(0)

    with ThreadPoolExecutor(2) as threads:
        launched = threads.submit(poprun_py.launch, ["echo", "hi"], share_cores=True)
        assert threads.submit(run, 1).result() == (1, "1\n")
        assert launched.result(100).exit_code == 0
    assert capsys.readouterr().out == "[1,0]<stdout>:hi\n"


def test_jobs_in_an_event_loop():
    """A job continues after a time-out of its await; ``async with`` stops it."""

    async def main():
        good = poprun_py.start(["true"], share_cores=True)
        bad = poprun_py.start(["sh", "-c", "exit 3"], share_cores=True)
        # A coroutine must not raise StopIteration.
        stop = poprun_py.start(lambda: next(iter([])), share_cores=True)
        ended, failed, raised = await asyncio.gather(good, bad, stop, return_exceptions=True)
        assert ended.exit_code == 0
        assert isinstance(failed, JobFailedError)
        assert isinstance(raised, RuntimeError)
        assert "<lambda> raised StopIteration" in str(raised)
        assert "raised in instance 0" in raised.__cause__.__notes__[0]
        assert (await good) is ended
        async with poprun_py.start(["sleep", 100], share_cores=True) as job:
            with pytest.raises(TimeoutError):
                async with asyncio.timeout(0.05):
                    await job
            assert not job.done()
        assert job.wait().exit_code == 143

    asyncio.run(main())


@pytest.mark.sweep
def test_a_cancelled_task_leaves_nothing_behind():
    jobs = []

    async def work():
        stubborn = "trap '' TERM INT; echo up; while :; do sleep 0.1; done"
        async with poprun_py.start(["sh", "-c", stubborn], share_cores=True) as job:
            jobs.append(job)
            await job

    async def main():
        task = asyncio.create_task(work())
        while not jobs or "up" not in jobs[0].output():
            await asyncio.sleep(0.01)
        task.cancel()
        while jobs[0].status().state != "stopping":
            await asyncio.sleep(0.01)
        task.cancel()  # while it stops, so the launcher kills it
        with pytest.raises(asyncio.CancelledError):
            await task
        assert jobs[0].done()

    asyncio.run(main())
    assert jobs[0].wait().instances[0].code == -9


@pytest.mark.sweep
def test_the_status_of_a_job_that_waits_for_another():
    with poprun_py.start(["sleep", 100]) as first:
        wait_until(lambda: first.status().state == "running")
        with poprun_py.start(["true"], wait_for_resources=100) as second:
            wait_until(lambda: second.status().state == "waiting")
            assert second.status().waits_for.startswith("for CPUs (place 1 of 1 in the queue)")
            wait_until(lambda: "poprun-py: waiting for CPUs" in second.output())
            first.stop()
            assert second.result(60).exit_code == 0
