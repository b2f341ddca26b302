"""examples/notebook: the notebook is what its script makes, and runs from top to bottom."""

from __future__ import annotations

import importlib
import itertools
import os
import re
import time

import pytest
from support.processes import survivors, wait_until
from support.repository import ROOT

FOLDER = ROOT / "examples" / "notebook"

pytestmark = [pytest.mark.examples, pytest.mark.timeout(300)]


def test_the_notebook_is_what_the_script_makes(monkeypatch):
    monkeypatch.syspath_prepend(str(ROOT / "examples"))
    made = importlib.import_module("common.notebooks").notebook_text(FOLDER / "training.py")
    found = (FOLDER / "training.ipynb").read_text(encoding="utf-8")
    assert found == made, "run examples/common/notebooks.py examples/notebook/training.py"


@pytest.fixture(scope="module")
def cells(tmp_path_factory):
    """Run the notebook; returns the code of each cell with its outputs as text."""
    import nbformat
    from nbclient import NotebookClient

    name, value = "NOTEBOOK_TEST_MARK", f"notebook-{os.getpid()}-{time.monotonic_ns()}"
    notebook = nbformat.read(FOLDER / "training.ipynb", 4)
    where = {"metadata": {"path": str(tmp_path_factory.mktemp("notebook"))}}
    environ = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", name: value}
    NotebookClient(notebook, timeout=200, resources=where).execute(env=environ)
    wait_until(lambda: not survivors(f"{name}={value}"), 30, "processes of the notebook are left")
    return [
        (cell.source, "\n".join(map(as_text, cell.outputs)))
        for cell in notebook.cells
        if cell.cell_type == "code"
    ]


def as_text(output):
    """Return what an output says, without colours."""
    if output.output_type == "error":
        text = "\n".join(output.traceback)
    elif output.output_type == "stream":
        text = output.text
    else:
        text = "\n".join(output.data.values())
    return re.sub(r"\x1b\[[\d;]*m", "", text)


def rows_of(table):
    """Return the rows of a printed table as dictionaries; columns are two spaces apart."""
    lines = table.splitlines()
    begin = next(number for number, line in enumerate(lines) if line.startswith("run  "))
    names = re.split(r" {2,}", lines[begin].rstrip())
    rows = itertools.takewhile(str.strip, lines[begin + 2 :])
    return [dict(zip(names, re.split(r" {2,}", row.rstrip()), strict=True)) for row in rows]


@pytest.mark.mpi
@pytest.mark.long
class TestTheNotebookRuns:
    @pytest.fixture
    def shown(self, cells):
        """Return what the one cell with these words shows."""

        def call(words):
            (text,) = [text for source, text in cells if words in source]
            return text

        return call

    def test_the_plan_is_drawn(self, shown):
        assert "<svg" in shown("poprun_py.plan(")

    def test_the_training_learns_and_both_instances_agree(self, shown):
        text = shown("accuracies = poprun_py.launch")
        assert re.search(r"\[1,1\]<stdout>:epoch 4: loss 0\.", text)
        first, second = re.search(r"per cent: \[([\d.]+), ([\d.]+)\]", text).groups()
        assert first == second
        assert float(first) > 95

    def test_the_job_is_watched(self, shown):
        assert "<JobHandle train:" in shown("**options)\njob")
        text = shown("print(job.status())")
        assert re.search(r"(running|ended well), 2 instances", text)
        assert "epoch 1: loss" in text

    def test_the_failure_arrives_as_itself(self, shown):
        text = shown("poprun_py.launch(train, args=((more_pictures")
        assert "IndexError: Target 10 is out of bounds.\nraised in instance" in text
        assert "in train\n    _, loss = training_model(some_pictures, some_labels)" in text
        assert re.search(r"\[1,[01]\]<stderr>:IndexError", text)

    def test_the_mended_training_is_better_and_compared(self, shown):
        assert "is labelled 10" in shown("np.flatnonzero(more_labels > 9)")
        assert float(re.search(r"accuracy ([\d.]+) %", shown("more_labels[wrong] = 0"))[1]) > 95
        text = shown("poprun_py compare")
        both = rows_of(text)
        assert both[0]["speedup"].rstrip("*") == "1.00x", text  # under load, a * says so
        assert [row["instances"] for row in both] == ["2", "2"], text
        assert all(0 < float(row["loss"]) < 1 for row in both), text
        assert all(float(row["s to loss<=0.3"]) > 0 for row in both), text

    def test_several_jobs_ran(self, shown):
        text = shown("jobs = [")
        assert len(re.findall(r"learning rate [\d.]+ +test accuracy [\d.]+ %", text)) == 3
        assert "best learning rate: " in text
