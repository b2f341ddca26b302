"""Jobs for tests of the supervisor and its parts."""

from __future__ import annotations

from poprun_py.running.supervise.job_description import Command, Job


def a_job(command=("mpirun",), count=1, environ=None, **values):
    """Return a job of ``count`` instances.

    Args:
        command: the words of the command that starts them.
        count: the number of instances.
        environ: the environment of the command; empty by default.
        values: the other values of a job, such as ``limits``.
    """
    started = Command(words=command, environ=environ or {}, variables=({},) * count)
    return Job(command=started, **values)
