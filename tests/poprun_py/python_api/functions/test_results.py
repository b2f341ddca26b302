"""Results of a call, read from the files of its instances."""

from __future__ import annotations

import asyncio
import io
import sys

import numpy as np
import pytest

from popdist_py.environment import CALL, CALL_FILES
from poprun_py.errors import JobFailedError, UsageError
from poprun_py.python_api.functions import run_call
from poprun_py.python_api.functions.packed_call import write_call
from poprun_py.python_api.functions.packed_file import IncompleteFileError, write_packed
from poprun_py.python_api.functions.pickling import pickled
from poprun_py.python_api.functions.results import RemoteTraceback, read_results
from poprun_py.python_api.functions.run_call import write_failure
from poprun_py.running.supervise.launch_result import InstanceResult, LaunchResult


class NeedsTwoError(Exception):
    def __init__(self, one, two):
        super().__init__(f"{one} and {two}")


class SpeechlessError(Exception):
    def __str__(self):
        raise TypeError


@pytest.fixture
def folder(tmp_path):
    (tmp_path / "attempt-0").mkdir()
    return tmp_path


def ended(*codes, first=None):
    instances = tuple(
        InstanceResult(index=index, host="here", code=code) for index, code in enumerate(codes)
    )
    failed = None if first is None else instances[first]
    code = 0 if failed is None else failed.exit_code
    return LaunchResult(exit_code=code, instances=instances, first_failure=failed)


def result_of(folder, index, value):
    write_packed(folder / "attempt-0" / f"instance-{index}.result", {}, pickled(value))


def failure_of(folder, index, error, note=""):
    prefix = folder / "attempt-0" / f"instance-{index}"
    try:
        raise error
    except BaseException as raised:
        code = write_failure(str(prefix), raised, note=note)
    assert code == 1


def test_values_are_in_the_order_of_the_instances(folder):
    for index in (2, 0, 1):
        result_of(folder, index, np.full(3, index))
    assert [value.tolist() for value in read_results(folder, ended(0, 0, 0))] == [
        [0] * 3,
        [1] * 3,
        [2] * 3,
    ]


def test_the_values_are_those_of_the_last_attempt(folder):
    result_of(folder, 0, "first")
    (folder / "attempt-1").mkdir()
    write_packed(folder / "attempt-1" / "instance-0.result", {}, pickled("second"))
    again = LaunchResult(exit_code=0, restart_count=1, instances=ended(0).instances)
    assert read_results(folder, again) == ["second"]


def test_an_exception_is_raised_again_with_its_type_notes_and_cause(folder, capsys):
    failure_of(folder, 1, KeyError("weights"))
    failure_of(folder, 0, ValueError("other\nand more"))
    with pytest.raises(KeyError, match="weights") as caught:
        read_results(folder, ended(1, 1, first=1))
    assert caught.value.__notes__ == [
        "raised in instance 1 on here",
        "1 other instance failed too:",
        "  instance 0 on here: ValueError: other",
    ]
    cause = caught.value.__cause__
    assert isinstance(cause, RemoteTraceback)
    assert "in failure_of\n    raise error\nKeyError: 'weights'\n" in str(cause)
    # Each traceback was printed to its instance's stderr once.
    assert capsys.readouterr().err.count("Traceback") == 2


def test_an_exception_whose_str_fails_is_raised_again(folder, capsys):
    failure_of(folder, 0, SpeechlessError())
    with pytest.raises(SpeechlessError):
        read_results(folder, ended(1, first=0))
    assert "<exception str() failed>" in capsys.readouterr().err


@pytest.mark.parametrize("stream", ["closed", "none", "of another kind"])
def test_an_exception_is_stored_even_if_stderr_cannot_be_written(stream, folder, monkeypatch):
    closed = io.StringIO()
    closed.close()
    monkeypatch.setattr("sys.stderr", {"closed": closed, "none": None}.get(stream, object()))
    failure_of(folder, 0, KeyError("lr"))
    with pytest.raises(KeyError, match="lr") as caught:
        read_results(folder, ended(1, first=0))
    assert "in failure_of" in str(caught.value.__cause__)


def test_notes_about_many_failed_instances_are_shortened(folder):
    for index in range(12):
        failure_of(folder, index, ValueError(index))
    with pytest.raises(ValueError, match="3") as caught:
        read_results(folder, ended(*[1] * 12, first=3))
    notes = caught.value.__notes__
    assert notes[1] == "11 other instances failed too:"
    assert notes[-1] == "  and 3 more instances"
    assert len(notes) == 11


@pytest.mark.parametrize(
    ("error", "said"),
    [
        (NeedsTwoError(1, 2), "NeedsTwoError: 1 and 2"),
        (asyncio.CancelledError("late"), "asyncio.exceptions.CancelledError: late"),
    ],
)
def test_an_exception_that_cannot_be_raised_again_is_described(folder, error, said):
    failure_of(folder, 0, error)
    with pytest.raises(JobFailedError) as caught:
        read_results(folder, ended(1, first=0))
    assert str(caught.value).startswith("instance 0 on here raised ")
    assert str(caught.value).endswith(said)
    assert said in str(caught.value.__cause__)
    assert caught.value.result.exit_code == 1


@pytest.fixture
def run(folder, monkeypatch):
    """Return a function that runs the pickled call in this process, as instance 0 would."""
    monkeypatch.setattr("sys.path", sys.path[:])
    monkeypatch.setattr("sys.argv", sys.argv[:])

    def run():
        monkeypatch.setenv(CALL, str(folder / "call"))
        monkeypatch.setenv(CALL_FILES, str(folder / "attempt-0" / "instance-0"))
        return run_call.main()

    return run


def test_a_note_helps_when_the_call_cannot_be_unpickled(folder, run):
    assert run() == 1
    with pytest.raises(IncompleteFileError) as caught:
        read_results(folder, ended(1, first=0))
    assert "register_pickle_by_value" in caught.value.__notes__[-1]


class Closed:
    def __reduce__(self):
        raise OSError("it is closed")


@pytest.mark.parametrize(
    ("value", "problem"),
    [
        ([1, Closed()], r"\(list, at \[1\]\) cannot be sent back \(OSError: it is closed\)"),
        ([1], r"\(list\) cannot be written to a file on its host \(IsADirectoryError: .*\): free"),
    ],
)
def test_the_error_says_why_a_result_cannot_be_sent_back(value, problem, folder, run, monkeypatch):
    """A folder in the place of the file makes writing fail, like a full disk."""
    (folder / "attempt-0" / "instance-0.result").mkdir()
    monkeypatch.setattr(sys.modules[__name__], "RETURNED", value)
    write_call(folder, returned)
    assert run() == 1
    with pytest.raises(JobFailedError, match=f"the result of instance 0 on here {problem}"):
        read_results(folder, ended(1, first=0))


RETURNED = None


def returned():
    return RETURNED


def test_the_error_names_an_instance_without_a_result(folder):
    result_of(folder, 0, 1)
    with pytest.raises(JobFailedError, match="instance 1 on here ended with exit code 0 before"):
        read_results(folder, ended(0, 0))


@pytest.mark.parametrize(("code", "how"), [(-9, "signal SIGKILL"), (3, "exit code 3")])
def test_the_error_names_an_instance_that_was_killed_or_exited(folder, code, how):
    with pytest.raises(JobFailedError, match=f"instance 1 on here ended with {how} before"):
        read_results(folder, ended(-15, code, first=1))


def test_the_error_of_a_stopped_job_has_the_reason(folder):
    stopped = LaunchResult(exit_code=143, reason="SIGTERM received", instances=ended(-15).instances)
    with pytest.raises(JobFailedError, match="before the function returned: SIGTERM received"):
        read_results(folder, stopped)


def test_an_incomplete_result_is_an_error(folder):
    result_of(folder, 0, np.ones(100))
    path = folder / "attempt-0" / "instance-0.result"
    path.write_bytes(path.read_bytes()[:200])
    with pytest.raises(
        JobFailedError, match=r"instance 0 on here is incomplete or was .*: check that"
    ):
        read_results(folder, ended(0))


def test_a_result_that_cannot_be_unpickled_is_an_error(folder):
    result_of(folder, 0, NeedsTwoError(1, 2))
    with pytest.raises(
        JobFailedError, match=r"instance 0 on here cannot be unpickled in this process \(TypeError"
    ):
        read_results(folder, ended(0))


def test_reading_results_after_the_folder_is_removed_is_a_usage_error(tmp_path):
    with pytest.raises(UsageError, match="get the result before the `with` block"):
        read_results(tmp_path / "removed", LaunchResult(exit_code=0))
