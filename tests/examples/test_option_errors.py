"""The help of every example program, and its errors, which are one line."""

from __future__ import annotations

import re

import pytest
from examples.test_programs import EXAMPLES, PROGRAMS

# Values that no program accepts, by option. The first option that a program has is tried.
BAD = {
    "--batch-size": "0",
    "--micro-batch": "0",
    "--micro-batches": "0",
    "--epochs": "0",
    "--steps": "none",
    "--workers": "-1",
    "-num_workers": "-1",
    "--size": "2.5",
    "--items": "0",
    "--samples": "0",
    "--repeats": "0",
    "--repetitions": "0",
    "--seconds": "0",
    "--learning-rates": "-1",
    "--learning-rate": "-1",
    "--training": "0",
    "--format": "none",
}
# Files and folders that are refused, in a folder that has file.txt and folder.
PLACES = {
    "sweep.py": [
        ("--program", "missing.py"), ("--program", "folder"),
        ("--csv", "folder"), ("--csv", "file.txt/trials.csv"),
    ],
    "sweeps/submitit_jobs.py": [
        ("--program", "missing.py"), ("--folder", "file.txt"), ("--folder", "file.txt/tasks"),
    ],
    "sweeps/optuna_study.py": [("--storage", "folder"), ("--storage", "file.txt")],
    "language_model.py": [
        ("--text", "missing.txt"), ("--text", "file.txt"), ("--metrics", "folder"),
        ("--checkpoints", "file.txt"),
    ],
}  # fmt: skip
WITHOUT_NUMBERS = {"common/notebooks.py", "course/sample_faces.py", "pipelining/notebooks.py"}
# Arguments that a program needs beside its options.
NEEDED = {
    "common/notebooks.py": ("script.py",),
    "common/sample_data.py": ("mnist", "data"),
    "cnns/datasets/sample.py": ("cifar-10", "data"),
}

pytestmark = [pytest.mark.examples, pytest.mark.timeout(120)]


@pytest.fixture
def run(processes, tmp_path):
    """Run a program in the test's folder; it may not show a traceback."""

    def call(program, *words):
        done = processes.run(EXAMPLES / program, *words, folder=tmp_path)
        assert "Traceback" not in done.stderr, done.stderr
        return done

    return call


def refused(done):
    """Return the line of a usage error: exit code 2, and nothing else is shown."""
    assert (done.returncode, done.stdout) == (2, ""), done
    assert re.fullmatch(r"[^\n]+\n", done.stderr), done.stderr
    return done.stderr


@pytest.mark.parametrize("program", sorted(PROGRAMS))
def test_help_has_an_example_and_wrong_options_are_one_line(program, run):
    done = run(program, "--help")
    assert (done.returncode, done.stderr) == (0, "")
    described = " ".join(done.stdout.partition("\n\n")[2].split())  # without usage and line breaks
    name = re.escape(program.rpartition("/")[2])
    assert re.search(rf"\b(python|poprun-py)\b.* \S*{name}", described), done.stdout

    needed = NEEDED.get(program, ())
    said = refused(run(program, *needed, "--no-such-option"))
    assert "--no-such-option" in said or "required" in said

    options = set(re.findall(r"(?<![\w-])--?[a-z][\w-]*", done.stdout))
    option = next((name for name in BAD if name in options), None)
    assert (option is None) == (program in WITHOUT_NUMBERS), sorted(options)
    if option:
        said = refused(run(program, *needed, option, BAD[option]))
        assert option in said
        assert BAD[option] in said


@pytest.mark.parametrize("program", PLACES)
def test_a_wrong_file_or_folder_is_refused_in_one_line(program, run, tmp_path):
    (tmp_path / "folder").mkdir()
    (tmp_path / "file.txt").write_text("no study\n")
    for option, given in PLACES[program]:
        path = str(tmp_path / given)
        assert path in refused(run(program, option, path)), (option, given)
