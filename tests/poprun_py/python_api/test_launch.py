"""Arguments of launch and start, their errors, and the output of jobs."""

from __future__ import annotations

import io
import os
import subprocess
import sys
from pathlib import Path

import pytest

import poprun_py
from poprun_py import LaunchConfig, StartError, UsageError

pytestmark = pytest.mark.mpi


def test_words_may_be_numbers_and_paths_and_options_are_keywords(capsys):
    result = poprun_py.launch(
        ["sh", "-c", 'echo "$RANK $GREETING $@"', Path("x"), "--lr", 0.1, 3],
        num_instances=2, share_cores=True, output="plain", env={"GREETING": "good day"},
    )  # fmt: skip
    assert result.exit_code == 0
    result.raise_for_failure()
    # The output goes to sys.stdout, like that of print, and not to descriptor 1.
    assert sorted(capsys.readouterr().out.splitlines()) == [
        "0 good day --lr 0.1 3",
        "1 good day --lr 0.1 3",
    ]


def test_descriptors_for_the_output_and_functions_for_the_log(tmp_path, capsys):
    logged, bound = [], []
    config = LaunchConfig(program=("sh", "-c", "echo hi; echo $WORD"), output="plain")
    with (tmp_path / "out").open("w+") as file:
        poprun_py.launch(
            config, share_cores=True, log=logged.append, tell_binding=bound.append,
            environ={**os.environ, "WORD": "given"}, descriptors=(file.fileno(), file.fileno()),
        )  # fmt: skip
        file.seek(0)
        assert file.read() == "hi\ngiven\n"
    assert "1 instance starts" in logged
    assert bound
    assert capsys.readouterr() == ("", "")


def test_exceptions_of_a_log_function_and_of_sys_stdout_do_not_stop_the_job(monkeypatch):
    failed = []

    def fail(_):
        raise KeyError

    class Screen(io.StringIO):
        def write(self, _):
            raise ZeroDivisionError

    monkeypatch.setattr("threading.excepthook", lambda args: failed.append(args.exc_type))
    with monkeypatch.context() as patch:
        patch.setattr("sys.stdout", Screen())
        with poprun_py.start(["echo", "hi"], share_cores=True, show=True, log=fail) as job:
            assert job.wait(60).exit_code == 0
            assert job.output() == "[1,0]<stdout>:hi\n"
    assert KeyError in failed


def test_a_failed_program_is_shown_and_raises_only_on_request(capsys):
    program = ["sh", "-c", "echo übung; echo why >&2; exit 3"]
    with poprun_py.start(program, share_cores=True, show=True) as job:
        result = job.wait(60)
        assert sorted(job.output().splitlines()) == ["[1,0]<stderr>:why", "[1,0]<stdout>:übung"]
    assert (result.exit_code, result.first_failure.index) == (3, 0)
    assert capsys.readouterr() == ("[1,0]<stdout>:übung\n", "[1,0]<stderr>:why\n")
    with pytest.raises(poprun_py.JobFailedError):
        result.raise_for_failure()


@pytest.mark.parametrize(
    ("call", "said"),
    [
        (lambda: poprun_py.start("train.py"), "expected a function, a program as a list of words"),
        (lambda: poprun_py.start([]), "nothing to launch: expected a program or a function"),
        (
            lambda: poprun_py.start(["x"], args=(1,)),
            "args and kwargs can be given for a function only",
        ),
        (lambda: poprun_py.launch(print, 3), r"args of type int: .* of print, such as \(3,\)"),
        (lambda: poprun_py.launch(print, "ab"), "args of type str"),
        (lambda: poprun_py.launch(print, (), {1: 2}), "kwargs of type dict: .* from names"),
        (lambda: poprun_py.launch(["x"], log="x"), "log 'x': expected a function"),
        (lambda: poprun_py.start(["x"], tell_binding=1), "tell_binding 1: expected a function"),
        (lambda: poprun_py.launch(["x"], descriptors=(1,)), r"descriptors \(1,\): expected two"),
        (lambda: poprun_py.launch(["x"], environ=5), "environ of type int: expected a mapping"),
        (
            lambda: poprun_py.launch(["x"], environ={"A": 1}),
            "environ: the value of A must be a string",
        ),
        (
            lambda: poprun_py.launch(["x"], env={"A": "\0hidden"}),
            "A of env: expected a text without NUL characters$",
        ),
        (lambda: poprun_py.start(["x"], num_instance=2), "num_instances"),
        (lambda: poprun_py.start(["x"], num_instances=0), "num_instances"),
        (
            lambda: poprun_py.start(["x"], environ={"SECRET": 1234}),
            "environ: the value of SECRET must be a string",
        ),
        (
            lambda: poprun_py.start(["x"], dry_run=True),
            "dry_run is an option of the command poprun-py only",
        ),
        (
            lambda: poprun_py.start(poprun_py.plan(LaunchConfig(program=("x",))), timeout=3),
            "timeout: the options of a LaunchPlan cannot be changed",
        ),
    ],
)
def test_wrong_arguments_are_refused_before_a_process_starts(call, said, monkeypatch, tmp_path):
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    monkeypatch.setattr("tempfile.tempdir", None)
    monkeypatch.setattr(
        "poprun_py.python_api.launch.LauncherChild",
        lambda *_, **__: pytest.fail("a process was started"),
    )
    with pytest.raises(UsageError, match=said):
        call()
    assert list(tmp_path.iterdir()) == []


def test_errors_of_the_launcher_process_keep_their_type():
    with pytest.raises(StartError, match=r"gone\.py does not exist"):
        poprun_py.launch(["gone.py"])
    with poprun_py.start(["true"], hardware="/no/such/file") as job:
        for ask in (job.wait, job.result):
            with pytest.raises(UsageError, match="/no/such/file"):
                ask(60)
        assert job.status().exit_code == UsageError.exit_code
        assert ": ended with code 2, " in repr(job)
        assert "/no/such/file" in job._repr_html_()


def test_output_of_a_job_comes_after_earlier_prints(tmp_path):
    """Here print writes to descriptors 1 and 2, as in a terminal or a pipe."""
    code = (
        "import poprun_py\n"
        "print('before', end=' ')\n"
        "poprun_py.launch(['echo', 'hi'], output='plain', share_cores=True)\n"
        "print('after')\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=100, check=True,
        cwd=tmp_path,
    )  # fmt: skip
    assert (done.stdout, done.stderr) == ("before hi\nafter\n", "")


def test_a_daemon_with_closed_standard_streams_can_launch(tmp_path):
    """A module in the current folder does not replace a module of the launcher."""
    script, folder = tmp_path / "daemon.py", tmp_path / "folder"
    folder.mkdir()
    (folder / "signal.py").write_text("raise SystemExit('not this one')\n")
    script.write_text(
        "import pathlib, poprun_py\n"
        "result = poprun_py.launch(['true'], share_cores=True)\n"
        "pathlib.Path(__file__).with_name('code').write_text(str(result.exit_code))\n"
    )
    command = 'exec "$0" "$1" <&- >&- 2>&-'
    subprocess.run(
        ["sh", "-c", command, sys.executable, str(script)], check=True, timeout=100, cwd=folder
    )
    assert (tmp_path / "code").read_text() == "0"
