"""Spans of real programs with threads, child processes, nesting and a killed process."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections import Counter

import pytest

from popdist_py.timeline.folder import SPANS_SUFFIX
from popdist_py.timeline.merging import Instance
from popdist_py.timeline.recorder import _is_written
from popdist_py.timeline.span_file import Span, SpanWriter, read_spans

_ENVIRONMENT = {"PATH": os.environ["PATH"], "PYTHONPATH": ":".join(sys.path)}


@pytest.fixture
def prefix(tmp_path):
    return tmp_path / "instance-0"


def run(prefix, code, size=1 << 20, **variables):
    """Run a program that records. Return its exit and the contents of each of its files."""
    environ = {**_ENVIRONMENT, "POPDIST_TIMELINE": f"{size}:{prefix}", **variables}
    program = prefix.with_name("program.py")
    program.write_text(code)
    done = subprocess.run(
        [sys.executable, program], env=environ, capture_output=True, text=True, check=False
    )
    files = Instance(label="", prefix=prefix).files(SPANS_SUFFIX)
    return done, [read_spans(file.read_bytes()) for file in files]


def names(recorded):
    return Counter(span.name for span in recorded.spans)


def test_blocks_calls_and_threads(prefix):
    done, (recorded,) = run(
        prefix,
        """
import threading
import popdist_py

@popdist_py.span("call", kind="f")
def f(depth):
    return depth and f(depth - 1)

with popdist_py.span("outer", step=1, where=object):
    f(2)
    thread = threading.Thread(target=f, args=(0,), name="other")
    thread.start()
    thread.join()
assert f.__name__ == "f"
""",
    )
    assert done.stderr == ""
    assert names(recorded) == {"outer": 1, "call": 4}
    outer = next(span for span in recorded.spans if span.name == "outer")
    assert outer.arguments == '{"step": 1, "where": "<class \'object\'>"}'
    assert all(outer.begin <= s.begin <= s.end <= outer.end for s in recorded.spans)
    assert Counter(s.track for s in recorded.spans) == {"program": 4, "program (other)": 1}


def test_threads_one_after_another_have_rows_of_their_own(prefix):
    """The system gives the number of a thread that has ended to the next one."""
    _, (recorded,) = run(
        prefix,
        """
import threading
import popdist_py
for name in ("first", "second"):
    thread = threading.Thread(target=popdist_py.span("a")(int), name=name)
    thread.start()
    thread.join()
""",
    )
    assert [span.track for span in recorded.spans] == ["program (first)", "program (second)"]


def test_a_span_may_be_used_again_also_inside_itself(prefix):
    _, (recorded,) = run(
        prefix,
        """
import popdist_py
again = popdist_py.span("a")
for _ in range(2):
    with again:
        with again:
            pass
with popdist_py.span("b"), popdist_py.span("c"):
    import os
    os._exit(0)
""",
    )
    inner, outer = recorded.spans[:2]
    assert outer.begin < inner.begin <= inner.end < outer.end
    assert names(recorded) == {"a": 4}
    assert [span.name for span in recorded.open] == ["b", "c"]


def test_thousands_of_threads_have_a_bounded_number_of_rows(prefix):
    _, (recorded,) = run(
        prefix,
        """
import threading
import popdist_py
for number in range(1000):
    thread = threading.Thread(target=popdist_py.span("a")(int))
    thread.start()
    thread.join()
with popdist_py.span("b"):
    pass
""",
    )
    rows = Counter(span.track for span in recorded.spans)
    assert (len(rows), rows["program (other threads)"], rows["program"]) == (202, 800, 1)


def test_what_cannot_be_shown_ends_no_program(prefix):
    done, (recorded,) = run(
        prefix,
        """
import popdist_py
circle = []
circle.append(circle)
with popdist_py.span(7, circle=circle):
    pass
""",
    )
    assert done.stderr == ""
    assert [(span.name, span.arguments) for span in recorded.spans] == [("7", "")]


def test_an_error_goes_through_and_its_span_is_there(prefix):
    done, (recorded,) = run(
        prefix, "import popdist_py\nwith popdist_py.span('fails'): raise SystemExit(7)\n"
    )
    assert done.returncode == 7
    assert names(recorded) == {"fails": 1}


def test_spans_that_others_timed(prefix):
    _, (recorded,) = run(
        prefix,
        "from popdist_py.timeline import spans\n"
        "spans.add('IPU 0', 'forward 3', 10, 20)\n"
        "spans.add('IPU 0', 'forward', 20, 30, '{\"stage\": 1}')\n",
    )
    assert recorded.spans == (
        Span("forward 3", "IPU 0", 10, 20),
        Span("forward", "IPU 0", 20, 30, None, '{"stage": 1}'),
    )


def test_what_a_killed_program_recorded_is_there(prefix):
    done, (recorded,) = run(
        prefix,
        """
import os, signal
import popdist_py
for number in range(1000):
    with popdist_py.span("work"):
        pass
with popdist_py.span("never ends"):
    os.kill(os.getpid(), signal.SIGKILL)
""",
    )
    assert done.returncode == -signal.SIGKILL
    assert names(recorded) == {"work": 1000}
    (open_one,) = recorded.open
    assert (open_one.name, open_one.is_open) == ("never ends", True)
    assert open_one.begin >= max(span.end for span in recorded.spans)


def test_what_goes_on_in_every_thread_is_there_and_is_told_again_by_no_other_process(prefix):
    _, files = run(
        prefix,
        """
import os, threading
import popdist_py
from popdist_py import activities
there = threading.Barrier(3)

def hang(name):
    with popdist_py.span("outer"), popdist_py.span(name):
        there.wait()
        threading.Event().wait()

for name in ("a", "b"):
    threading.Thread(target=hang, args=(name,), name=name, daemon=True).start()
there.wait()
with popdist_py.span("done"):
    pass
with activities.doing(activities.REDUCING, "all_reduce"):
    pass
with activities.doing(activities.REDUCING, "all_reduce"):
    child = os.fork()
    if child:
        os.wait()
        os._exit(0)
""",
    )
    program, child = files
    found = Counter((span.name, span.track, span.number) for span in program.open)
    assert found == {
        ("outer", "program (a)", None): 1,
        ("a", "program (a)", None): 1,
        ("outer", "program (b)", None): 1,
        ("b", "program (b)", None): 1,
        ("reduce all_reduce", "collectives", 1): 1,
    }
    assert names(program) == {"done": 1, "reduce all_reduce": 1}
    assert names(child) == {"reduce all_reduce": 1}
    assert child.open == ()


@pytest.mark.parametrize("method", ["fork", "spawn"])
def test_processes_that_a_program_starts_record_too(prefix, method):
    done, (program, *others) = run(
        prefix,
        f"""
import multiprocessing
import popdist_py

def work():
    with popdist_py.span("in a process"):
        pass

if __name__ == "__main__":
    with popdist_py.span("in the program"):
        context = multiprocessing.get_context("{method}")
        for _ in range(2):
            process = context.Process(target=work)
            process.start()
            process.join()
""",
    )
    assert done.stderr == ""
    assert names(program) == {"in the program": 1}
    assert [names(other) for other in others] == [{"in a process": 1}] * 2
    assert all("Process-" in other.label for other in others)


def test_a_hundred_processes_have_a_bounded_number_of_files(prefix):
    """The files of the oldest that have ended are used again."""
    done, files = run(
        prefix,
        """
import os
import popdist_py
with popdist_py.span("program"):
    for number in range(100):
        if os.fork() == 0:
            with popdist_py.span(f"process {number}"):
                pass
            os._exit(0)
        os.wait()
""",
    )
    assert done.stderr == ""
    program, *others = map(names, files)
    assert program == {"program": 1}
    last = {f"process {number}": 1 for number in range(92, 100)}
    assert sum(others, Counter()) == last
    assert sum(path.stat().st_size for path in prefix.parent.glob("*.spans")) <= 1 << 20


def test_without_a_timeline_nothing_is_written(tmp_path):
    code = "import popdist_py\nwith popdist_py.span('a'): pass\n"
    subprocess.run([sys.executable, "-c", code], env=_ENVIRONMENT, cwd=tmp_path, check=True)
    assert list(tmp_path.iterdir()) == []


def test_a_folder_that_is_gone_is_said_once_and_the_program_runs(prefix):
    done, files = run(
        prefix,
        "import popdist_py\nfor _ in range(3):\n    with popdist_py.span('a'): pass\n",
        POPDIST_TIMELINE=f"1000000:{prefix.parent}/gone/instance-0",
    )
    assert (done.returncode, files) == (0, [])
    (line,) = done.stderr.splitlines()
    assert "missing in the timeline" in line
    assert "No such file" in line


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ('{"enable":"true"}', ""),
        ('{"enable":"false"}', ""),
        ("", ""),
        ("enable", "PVTI_OPTIONS='enable' is invalid"),
        ("[]", "PVTI_OPTIONS='[]' is invalid"),
    ],
)
def test_pvti_options(tmp_path, text, said):
    code = "import popdist_py\nwith popdist_py.span('a'): pass\n"
    done = subprocess.run(
        [sys.executable, "-c", code],
        env={**_ENVIRONMENT, "PVTI_OPTIONS": text},
        cwd=tmp_path,
        capture_output=True,
        text=True,
        check=True,
    )
    assert said in done.stderr
    assert bool(done.stderr) is bool(said)
    wanted = ["instance-0.timeline.json.gz"] if "true" in text else []
    assert [path.name for path in tmp_path.iterdir()] == wanted


@pytest.mark.parametrize("pid", [0, 1 << 40, (1 << 64) - 1])
def test_a_file_whose_process_id_is_damaged_is_taken_over(tmp_path, pid):
    path = tmp_path / "file.1.spans"
    SpanWriter(path, 1 << 14, "", (1, 1))
    assert _is_written(path)
    with path.open("r+b") as file:
        file.seek(8)
        file.write(pid.to_bytes(8, "little"))
    assert not _is_written(path)
