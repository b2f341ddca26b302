"""Results of a call, read from the files of its instances."""

from __future__ import annotations

import asyncio
import io

import numpy as np
import pytest

from poprun_py.errors import JobFailedError, UsageError
from poprun_py.python_api.functions.failures import RemoteTraceback, write_failure
from poprun_py.python_api.functions.packed_file import write_packed
from poprun_py.python_api.functions.results import read_results
from poprun_py.running.supervise.job import InstanceResult, LaunchResult


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
    write_packed(folder / "attempt-0" / f"instance-{index}.result", {}, value)


def failure_of(folder, index, error, what="raised"):
    prefix = folder / "attempt-0" / f"instance-{index}"
    try:
        raise error
    except BaseException as raised:
        code = write_failure(str(prefix), what, raised, raised.__traceback__)
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
    write_packed(folder / "attempt-1" / "instance-0.result", {}, "second")
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
    assert notes[-1] == "  and 3 more"
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


def test_a_note_helps_when_the_call_cannot_be_unpickled(folder):
    failure_of(folder, 0, ModuleNotFoundError("No module named 'mine'"), "loading")
    with pytest.raises(ModuleNotFoundError) as caught:
        read_results(folder, ended(1, first=0))
    assert "register_pickle_by_value" in caught.value.__notes__[-1]


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
        JobFailedError, match=r"instance 0 on here is incomplete, or was .*: check that"
    ):
        read_results(folder, ended(0))


def test_a_result_that_cannot_be_unpickled_is_an_error(folder):
    result_of(folder, 0, NeedsTwoError(1, 2))
    with pytest.raises(JobFailedError, match=r"instance 0 on here cannot be read here \(TypeError"):
        read_results(folder, ended(0))


def test_reading_results_after_the_folder_is_removed_is_a_usage_error(tmp_path):
    with pytest.raises(UsageError, match="ask for its result before `with` ends"):
        read_results(tmp_path / "removed", LaunchResult(exit_code=0))
