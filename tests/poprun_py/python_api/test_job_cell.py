"""Text and HTML of a handle, and the notebook cell that shows its job."""

from __future__ import annotations

import subprocess
import sys

import pytest
from support.processes import wait_until
from support.repository import ROOT

import poprun_py
from poprun_py.python_api.status import JobStatus

pytestmark = pytest.mark.mpi

STEPS = """
import pathlib, time
from popdist_py import heartbeat
for _ in range(5):
    heartbeat.step()
while not pathlib.Path("go").exists():
    time.sleep(0.01)
"""


def test_text_and_html_of_a_handle_show_the_progress_of_the_job(own_leases, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with poprun_py.start([sys.executable, "-c", STEPS], num_instances=2, share_cores=True) as job:
        assert repr(job).startswith(f"<JobHandle {job.name}: preparing, ")
        wait_until(lambda: "running, 2 instances, step 5, " in repr(job))
        assert "running, 2 instances, step 5, " in job._repr_html_()
        wait_until(lambda: job._repr_html_().count('<i style="width:100%"></i>') == 2)
        assert "<th" in job.status()._repr_html_()
        (tmp_path / "go").touch()
        job.wait()
        assert repr(job).startswith(f"<JobHandle {job.name}: ended well, 2 instances, ")
        assert "2 instances ended well" in job._repr_html_()


def test_text_and_html_of_a_handle_show_why_the_job_failed(own_leases):
    program = ["sh", "-c", "echo 'ValueError: <b>' >&2; exit 3"]
    with poprun_py.start(program, share_cores=True) as job:
        assert job.wait().exit_code == 3
        assert ": ended with code 3, 1 instance, " in repr(job)
        assert "ValueError: &lt;b&gt;" in job._repr_html_()


def test_the_text_of_a_status_is_one_line():
    waiting = JobStatus(state="waiting", seconds=1.26, pid=3, waits_for="2 cores of job 7")
    assert str(waiting) == "waiting (2 cores of job 7), 1.3 s"
    assert str(JobStatus(state="ended", seconds=75, pid=3, num_instances=1, exit_code=0)) == (
        "ended well, 1 instance, 75 s"
    )
    assert "waiting (2 cores" in waiting._repr_html_()


def test_html_does_not_need_ipython():
    code = (
        "import sys, poprun_py\n"
        "from poprun_py.python_api import handle\n"
        "poprun_py.LaunchResult(exit_code=0)._repr_html_()\n"
        "assert 'IPython' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], cwd=ROOT, check=True)


@pytest.mark.sweep
def test_a_notebook_cell_is_updated_until_the_job_ends(own_leases, tmp_path):
    import nbformat
    from nbclient import NotebookClient

    program = [sys.executable, "-c", STEPS]
    cells = (
        f"import sys; sys.path.insert(0, {str(ROOT)!r})\nimport pathlib, poprun_py",
        f"job = poprun_py.start({program!r}, share_cores=True)\njob",
        "import time\nwhile not pathlib.Path('seen').exists(): time.sleep(0.01)",
        "pathlib.Path('go').touch(); job.result()",
        "for thread in __import__('threading').enumerate():\n"
        "    if thread.name.startswith('poprun_py cell'): thread.join(60)",
    )
    book = nbformat.v4.new_notebook(cells=list(map(nbformat.v4.new_code_cell, cells)))
    client = NotebookClient(book, timeout=100, resources={"metadata": {"path": str(tmp_path)}})
    seen = []
    take = client.process_message

    def process(message, *arguments, **keywords):
        if message["msg_type"] in ("display_data", "update_display_data"):
            seen.append(message["content"]["data"]["text/plain"])
            if ": running, 1 instance, step 5, " in seen[-1]:
                (tmp_path / "seen").touch()
        return take(message, *arguments, **keywords)

    client.process_message = process
    client.execute()
    assert ": preparing, " in seen[0]
    (shown,) = book.cells[1].outputs
    assert ": ended well, 1 instance, " in shown["data"]["text/plain"]
    assert "1 instance ended well" in shown["data"]["text/html"]
