"""What holds for every program of the examples: its help, and errors of one line."""

from __future__ import annotations

import re

import pytest
from support.forks import forks
from support.processes import remove_surroundings
from support.repository import ROOT

EXAMPLES = ROOT / "examples"
PROGRAMS = sorted(
    path.relative_to(EXAMPLES)
    for path in EXAMPLES.rglob("*.py")
    if "__pycache__" not in path.parts and '__name__ == "__main__"' in path.read_text()
)
# What no program can do anything with, by the option it has; the first that it has is tried.
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
PLACES = [
    ("sweep.py", "--program", "missing.py"),
    ("sweep.py", "--program", "folder"),
    ("sweep.py", "--csv", "folder"),
    ("sweep.py", "--csv", "file.txt/trials.csv"),
    ("sweeps/submitit_jobs.py", "--program", "missing.py"),
    ("sweeps/submitit_jobs.py", "--folder", "file.txt"),
    ("sweeps/submitit_jobs.py", "--folder", "file.txt/tasks"),
    ("sweeps/optuna_study.py", "--storage", "folder"),
    ("sweeps/optuna_study.py", "--storage", "file.txt"),
    ("language_model.py", "--text", "missing.txt"),
    ("language_model.py", "--text", "file.txt"),
    ("language_model.py", "--metrics", "folder"),
    ("language_model.py", "--checkpoints", "file.txt"),
]
WITHOUT_NUMBERS = ("common/notebooks.py", "course/sample_faces.py", "pipelining/notebooks.py")
# What a program needs beside its options.
NEEDED = {
    "common/notebooks.py": ("script.py",),
    "common/sample_data.py": ("mnist", "data"),
    "cnns/datasets/sample.py": ("cifar-10", "data"),
}
_DONE: dict = {}

pytestmark = pytest.mark.timeout(60)
every_program = pytest.mark.parametrize("path", PROGRAMS, ids=str)


@pytest.fixture(scope="module")
def processes(tmp_path_factory):
    with pytest.MonkeyPatch.context() as patch:
        remove_surroundings(patch)
        with forks(ROOT, tmp_path_factory.mktemp("programs")) as found:
            yield found


@pytest.fixture
def run(processes):
    """Run a program, once with the same words; it may not show a traceback."""

    def call(path, *words):
        done = _DONE.get((path, words))
        if done is None:
            done = _DONE[path, words] = processes.run(EXAMPLES / path, *words)
        assert "Traceback" not in done.stderr, done.stderr
        return done

    return call


def refused(done):
    """A usage error: exit code 2, and one line that says what is wrong."""
    assert (done.returncode, done.stdout) == (2, ""), done
    assert re.fullmatch(r"[^\n]+\n", done.stderr), done.stderr
    return done.stderr


@every_program
def test_help_shows_an_example_of_use(path, run):
    done = run(path, "--help")
    assert (done.returncode, done.stderr) == (0, "")
    described = " ".join(done.stdout.partition("\n\n")[2].split())  # without usage and line breaks
    assert re.search(rf"\b(python|poprun-py)\b.* \S*{path.name}", described), done.stdout


@every_program
def test_unknown_option_is_refused_in_one_line(path, run):
    found = refused(run(path, *NEEDED.get(str(path), ()), "--no-such-option"))
    assert "--no-such-option" in found or "required" in found


@every_program
def test_bad_value_is_refused_in_one_line(path, run):
    options = set(re.findall(r"(?<![\w-])--?[a-z][\w-]*", run(path, "--help").stdout))
    if options <= {"-h", "--help"} or str(path) in WITHOUT_NUMBERS:
        return
    option = next((name for name in BAD if name in options), None)
    assert option, f"{path} has none of {', '.join(BAD)}, but {', '.join(sorted(options))}"
    found = refused(run(path, *NEEDED.get(str(path), ()), option, BAD[option]))
    assert option in found
    assert BAD[option] in found


@pytest.mark.parametrize(("path", "option", "given"), PLACES)
def test_a_place_that_will_not_do_is_refused_in_one_line(path, option, given, run, tmp_path):
    (tmp_path / "folder").mkdir()
    (tmp_path / "file.txt").write_text("no study\n")
    assert str(tmp_path / given) in refused(run(path, option, str(tmp_path / given)))
