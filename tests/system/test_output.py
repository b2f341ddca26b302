"""What instances of real jobs write: on the screen, and in the folder of --output-dir."""

from __future__ import annotations

import fcntl
import json
import os
import pty
import re
import subprocess
import sys
import termios
from pathlib import Path

import pytest
from support.processes import wait_until
from support.repository import ROOT

pytestmark = pytest.mark.mpi

FOUR = ("--num-instances", "4", "--num-replicas", "4", "--oversubscribe")
TWO = ("--num-instances", "2", "--num-replicas", "2")
FIRST = Path("latest", "attempt-1")
LINES = 10_000
WRITER = f"""
import os, sys
me = os.environ["RANK"]
sys.stdout.reconfigure(line_buffering=False)
sys.stdout.write("".join(f"{{me}} line {{n}} äöü\\n" for n in range({LINES})))
"""


def test_every_line_of_four_fast_instances_arrives_in_order(poprun, script, tmp_path):
    done = poprun(*FOUR, "--output-dir", tmp_path / "out", script(WRITER))
    assert done.returncode == 0, done.stderr
    wanted = [[f"{i} line {n} äöü" for n in range(LINES)] for i in range(4)]
    got = [[], [], [], []]
    for line in done.stdout.splitlines():
        tag, _, text = line.partition(">:")
        got[int(tag[3])].append(text)
    assert got == wanted
    for index in range(4):
        path = tmp_path / "out" / FIRST / f"instance-{index}.stdout"
        assert path.read_text().splitlines() == wanted[index]


@pytest.mark.sweep
def test_slow_reader_makes_instances_wait_not_memory_grow(script, tmp_path):
    """100 MB through a pipe that is read late: the launcher stays small, nothing is lost."""
    program = script(
        "import sys\nfor n in range(200): sys.stdout.write(('y' * 63 + '\\n') * 8192)\n"
    )
    with subprocess.Popen(
        [sys.executable, "-m", "poprun_py", "--output", "plain", str(program)],
        stdout=subprocess.PIPE,
        stdin=subprocess.DEVNULL,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
    ) as process:
        wait_until(lambda: is_full(process.stdout), 60)  # the reader is away
        total, peak = 0, 0
        while data := os.read(process.stdout.fileno(), 1 << 20):
            total += len(data)
            peak = max(peak, resident_bytes(process.pid))
        assert process.wait(60) == 0
    assert total == 200 * 8192 * 64
    assert peak < 80 << 20


def resident_bytes(pid):
    try:
        pages = Path(f"/proc/{pid}/statm").read_text().split()[1]
        return int(pages) * os.sysconf("SC_PAGE_SIZE")
    except OSError:
        return 0


def test_ctrl_c_works_while_nobody_reads(script, poprun):
    program = script("import sys\nwhile True: sys.stdout.write('z' * 1000 + '\\n')\n")
    process = poprun("--grace", "0.5", program, start=True)
    wait_until(lambda: is_full(process.stdout), 30, "the program filled no pipe")
    process.send_signal(2)
    process.wait(60)
    assert process.returncode == 130


def is_full(pipe):
    """Tell whether a pipe of 64 KiB takes hardly anything more."""
    return int.from_bytes(fcntl.ioctl(pipe, termios.FIONREAD, bytes(4)), sys.byteorder) > 60_000


def test_a_job_goes_on_without_its_reader(poprun, script, tmp_path):
    program = script(
        "import pathlib, sys\n"
        "for n in range(20_000): print('line', n, 'of many' * 10)\n"
        "sys.stdout.flush()\n"
        "pathlib.Path('done').touch()\n"
    )
    process = poprun("--output-dir", "out", program, start=True)
    assert process.stdout.readline().startswith("[1,0]<stdout>:line 0")
    process.stdout.close()
    assert process.wait(60) == 0
    assert (tmp_path / "done").exists()
    assert len((tmp_path / "out" / FIRST / "instance-0.stdout").read_text().splitlines()) == 20_000


def test_megabyte_lines_stay_whole(poprun, script):
    program = script(
        "import os, sys\n"
        "for _ in range(3): sys.stdout.write(os.environ['RANK'] * (1 << 20) + '\\n')\n"
    )
    done = poprun(*TWO, program)
    lines = done.stdout.splitlines()
    assert sorted(lines) == sorted(
        [f"[1,{i}]<stdout>:" + str(i) * (1 << 20) for i in range(2) for _ in range(3)]
    )


def test_streams_stay_apart_and_plain_output_has_no_tags(poprun, script):
    program = script("import sys\nprint('just', end='\\nthis')\nprint('err', file=sys.stderr)\n")
    done = poprun("--output", "plain", program)
    assert done.stdout == "just\nthis"
    assert done.stderr == "err\n"


def test_output_with_the_time(poprun, script):
    done = poprun("--output=time", script("print('now')"))
    assert re.fullmatch(r"\d\d:\d\d:\d\d\.\d{3} \[1,0\]<stdout>:now\n", done.stdout)


def test_hidden_instances_are_in_the_files_of_open_mpis_output_filename(poprun, script, tmp_path):
    program = script("import os\nprint('from', os.environ['RANK'])\n")
    words = "--mpi-global-args= --tag-output --output-filename logs"
    done = poprun(*TWO, "--only-output-from-instance", "1", words, program)
    assert done.stdout == "[1,1]<stdout>:from 1\n"
    assert (tmp_path / "logs" / FIRST / "instance-0.stdout").read_text() == "from 0\n"
    assert (tmp_path / "logs" / FIRST / "instance-0.stderr").read_text() == ""


def test_folder_that_cannot_be_made_is_a_usage_error(look, script, tmp_path):
    (tmp_path / "taken").write_text("")
    done = look("--output-dir", "taken", script("print()"))
    assert done.returncode == 2
    assert "--output-dir taken" in done.stderr


def test_tags_have_a_colour_on_a_terminal(script):
    output = on_terminal(script("print('text')"), {})
    assert b"\x1b[32m[1,0]<stdout>:\x1b[0mtext" in output


def test_progress_bar_is_one_line_on_a_terminal_and_has_no_colour_where_none_is_wanted(script):
    program = script(
        "import sys, time\n"
        "from tqdm import tqdm\n"
        "for _ in tqdm(range(20), file=sys.stdout, mininterval=0): time.sleep(0.01)\n"
    )
    output = on_terminal(program, {"NO_COLOR": "1"})
    assert output.count(b"\n") == 1, output
    assert output.startswith(b"[1,0]<stdout>:")
    assert b"20/20" in output


def test_progress_bar_in_a_pipe_is_its_first_and_last_state(poprun, script, tmp_path):
    program = script(
        "import time\n"
        "from tqdm import tqdm\n"
        "for _ in tqdm(range(20), mininterval=0): time.sleep(0.02)\n"
    )
    done = poprun(*TWO, "--output-dir", "out", program)
    for index in range(2):
        tag = f"[1,{index}]<stderr>:"
        states = [line for line in done.stderr.splitlines() if line.startswith(tag)]
        assert len(states) == 2, done.stderr
        assert "| 0/20 [" in states[0]
        assert "| 20/20 [" in states[1]
        kept = (tmp_path / "out" / FIRST / f"instance-{index}.stderr").read_bytes()
        assert kept.count(b"\r") >= 20
    assert "\r" not in done.stderr


SAME = """
import glob, os, signal, sys, time
signal.signal(signal.SIGTERM, signal.SIG_IGN)  # each gets to its own traceback
print("here is", os.environ["RANK"], file=sys.stderr)
open("ready" + os.environ["RANK"], "w").close()
while len(glob.glob("ready*")) < int(os.environ["WORLD_SIZE"]): time.sleep(0.01)
def load(rank):
    more = sys.argv[1][:int(rank)]
    raise ValueError(f"rank {rank} of process {os.getpid()}: no such data" + more)
load(os.environ["RANK"])
"""


def test_the_same_traceback_of_four_instances_is_shown_once(poprun, script, tmp_path):
    done = poprun(*FOUR, "--output-dir", "out", script(SAME), "")
    assert done.stderr.count("Traceback") == 1, done.stderr
    assert done.stderr.count("no such data") == 2  # the line of the source, and the exception
    lines = done.stderr.splitlines()
    assert sum(line.split(":", 1)[1].startswith("here is") for line in lines) == 4
    repeated = [line for line in lines if "the same traceback as instance" in line]
    assert re.fullmatch(r"\[1,[0-9,-]+\]<stderr>:the same traceback as instance \d", repeated[-1])
    assert len(repeated) == 1
    said = [line for line in lines if "failed with the same traceback, exit code 1" in line]
    assert len(said) == 1, done.stderr
    for index in range(4):
        kept = (tmp_path / "out" / FIRST / f"instance-{index}.stderr").read_text()
        assert kept.startswith(f"here is {index}\nTraceback")
        assert "no such data" in kept


WARNING = """
import os, sys, warnings
is_worker = os.fork() == 0
warnings.warn("take care")
if is_worker:
    os._exit(0)
os.wait()
print("loss 3", file=sys.stderr)
"""


def test_the_same_warning_of_instances_and_their_workers_is_shown_once(poprun, script, tmp_path):
    done = poprun(*TWO, "--output-dir", tmp_path / "out", script(WARNING))
    assert done.returncode == 0, done.stderr
    assert done.stderr.count("program.py:4: UserWarning: take care\n") == 1
    assert done.stderr.count('<stderr>:  warnings.warn("take care")\n') == 1
    assert done.stderr.count("loss 3\n") == 2
    left_out = re.findall(r"^\[1,([01-]+)\]<stderr>:the same warning (.*)$", done.stderr, re.M)
    assert len(left_out) in (1, 2)  # one line for a second, unless the instances are far apart
    assert all(sentence.endswith("(UserWarning, program.py:4)") for _, sentence in left_out)
    for index in range(2):
        kept = (tmp_path / "out" / FIRST / f"instance-{index}.stderr").read_text()
        assert kept.count("UserWarning: take care\n") == 2


def test_tracebacks_that_differ_are_all_shown(poprun, script):
    done = poprun(*TWO, script(SAME), "xyz")
    assert done.stderr.count(">:Traceback (most") == 2, done.stderr
    assert "the same traceback" not in done.stderr


def test_plain_output_keeps_every_traceback(poprun, script):
    done = poprun(*TWO, "--output", "plain", script(SAME), "")
    assert done.stderr.count("Traceback (most") >= 2, done.stderr


def on_terminal(program, variables):
    """Run a job whose stdout and stderr are a terminal, and return what appears there."""
    ours, theirs = pty.openpty()
    process = subprocess.Popen(
        [sys.executable, "-m", "poprun_py", str(program)],
        stdin=subprocess.DEVNULL,
        stdout=theirs,
        stderr=theirs,
        env={**os.environ, "PYTHONPATH": str(ROOT), "TERM": "xterm", **variables},
    )
    os.close(theirs)
    output = b""
    while True:
        try:
            data = os.read(ours, 65536)
        except OSError:
            break
        if not data:
            break
        output += data
    os.close(ours)
    assert process.wait(60) == 0
    return output


def test_closed_stdout_is_no_failure(poprun, script, tmp_path):
    program = script("print('unheard')")
    done = subprocess.run(
        ["sh", "-c", f"{sys.executable} -m poprun_py --output-dir out {program} >&-"],
        env={**os.environ, "PYTHONPATH": str(ROOT)}, cwd=tmp_path, stdin=subprocess.DEVNULL,
        capture_output=True, text=True, check=False, timeout=100,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert (tmp_path / "out" / FIRST / "instance-0.stdout").read_text() == "unheard\n"


@pytest.mark.parametrize("is_pipe", [pytest.param(True, marks=pytest.mark.sweep), False])
def test_what_the_launcher_cannot_say_changes_nothing_of_the_job(tmp_path, is_pipe):
    reading, writing = os.pipe()
    os.close(reading)
    with os.fdopen(writing, "w") if is_pipe else open("/dev/full", "w") as unwritable:  # noqa: PTH123
        done = subprocess.run(
            [sys.executable, "-m", "poprun_py", *TWO, "-v", "--print-topology", "tree",
             "--output-dir", "out", "--max-restarts", "1",
             "sh", "-c", "test $POPDIST_RESTART_COUNT = 0 && exit 9; exit 8"],
            env={**os.environ, "PYTHONPATH": str(ROOT)}, cwd=tmp_path, stdin=subprocess.DEVNULL,
            stdout=unwritable, stderr=unwritable, check=False, timeout=100,
        )  # fmt: skip
    report = json.loads((tmp_path / "out" / "latest" / "report.json").read_text())
    assert done.returncode == 8
    assert (report["state"], report["exit_code"]) == ("ended", 8)
    assert [attempt["exit_code"] for attempt in report["attempts"]] == [9, 8]


LONG = """
import sys
for number in range(40_000):
    print("line", number)
sys.exit("the last word")
"""


def test_long_output_keeps_its_beginning_its_end_and_what_reads_it(poprun, script, tmp_path):
    done = poprun("-n", 1, "--log-limit", "128KiB", "--output-dir", "out", script(LONG))
    assert done.returncode == 1
    assert done.stdout.count("line ") == 40_000
    (warning,) = [line for line in done.stderr.splitlines() if "--log-limit" in line]
    assert warning == (
        "poprun-py: warning: instance 0 has written more output than --log-limit allows: "
        f"out/{(tmp_path / 'out' / 'latest').readlink()}/attempt-1 keeps the beginning and the "
        "newest part of this output"
    )
    folder = tmp_path / "out" / FIRST
    files = sorted(folder.glob("instance-0.std*"))
    assert sum(file.stat().st_size for file in files) <= 128 << 10
    assert (folder / "instance-0.stdout.1").read_text().startswith("line 0\nline 1\n")
    assert (folder / "instance-0.stdout").read_text().endswith("\nline 39999\n")
    assert (folder / "instance-0.stderr").read_text() == "the last word\n"
    page = (tmp_path / "out" / "latest" / "report.html").read_text()
    links = re.findall(r'attempt-1/instance-0\.(std[a-z0-9.]+)"[^>]*>([^<]+)<', page)
    assert all(text == name for name, text in links)
    assert list(dict.fromkeys(name for name, _ in links)) == [
        "stdout.1", *(f"stdout.{number}" for number in numbers_of(files)[1:]), "stdout", "stderr",
    ]  # fmt: skip


def numbers_of(files):
    return sorted(int(file.suffix[1:]) for file in files if file.suffix[1:].isdecimal())
