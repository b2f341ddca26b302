"""The keyboard in real jobs at a real terminal: what a user types, and what it does to the job."""

from __future__ import annotations

import os
import re
import signal
import sys
import time
from pathlib import Path

import pytest
from support.processes import survivors
from support.terminals import LAUNCHER, Typist

pytestmark = pytest.mark.mpi

TWO = ("--num-instances", "2", "--num-replicas", "2")
PLAIN = ("--output", "plain")


@pytest.fixture
def typist(tmp_path):
    """Start jobs at a terminal; afterwards no process of them may be left."""
    mark = f"{os.getpid()}-{time.monotonic_ns()}"
    users = []

    def start(*words, command=None, env=None, size=(24, 80)):
        variables = {"TESTED_POPRUN_MARK": mark, **(env or {})}
        user = Typist(command or [*LAUNCHER, *words], env=variables, cwd=tmp_path, size=size)
        users.append(user)
        return user

    yield start
    for user in users:
        with user:
            pass
    deadline = time.monotonic() + 30
    while (left := survivors(f"TESTED_POPRUN_MARK={mark}")) and time.monotonic() < deadline:
        time.sleep(0.01)
    for pid in left:
        os.kill(pid, signal.SIGKILL)
    assert not left


def shell(typist):
    """Start an interactive shell, as a user has it, in which poprun-py runs this launcher."""
    user = typist(command=["bash", "--norc", "--noprofile", "-i"], env={"PS1": "$ "})
    user.expect(r"\$ ")
    user.type(f'poprun-py() {{ {sys.executable} -m poprun_py "$@"; }}\r')
    user.expect(r"\$ $")
    return user


def test_input_reaches_instance_0(typist, script):
    program = script(
        "import os\n"
        "if os.environ['RANK'] == '0':\n"
        "    print('hello', input('name? '), input('and? '))\n"
    )
    user = typist(*TWO, program)
    user.expect(r"name\? ")
    user.type("Anna\r")
    user.expect(r"and\? ")
    user.type("Ben\r")
    # What the terminal echoes ends the line: the answer has a tag of its own.
    user.expect(r"^\[1,0\]<stdout>:hello Anna Ben\r\n")
    assert user.ended() == 0
    assert user.modes() == user.first_modes


def test_another_instance_may_read(typist, script):
    program = script("import os, sys\nprint(os.environ['RANK'], sys.stdin.read().split())\n")
    user = typist(*TWO, "--stdin-instance", "1", program)
    user.expect(r"\[1,0\]<stdout>:0 \[\]")
    user.type("one two\rthree\r\x04")
    user.expect(r"\[1,1\]<stdout>:1 \['one', 'two', 'three'\]")
    assert user.ended() == 0


def test_end_of_input_comes_once(typist, script):
    program = script(
        "import sys\n"
        "print('first', repr(sys.stdin.read()))\n"
        "print('second', repr(sys.stdin.readline()))\n"
        "print('third', repr(sys.stdin.read()))\n"
    )
    user = typist(program)
    user.type("a\r\x04")
    user.expect(r"first 'a\\n'")
    user.type("b\r")
    user.expect(r"second 'b\\n'")
    user.type("c\x04\x04")  # after a text that no Enter ended, the first only sends it
    user.expect(r"third 'c'")
    assert user.ended() == 0


def test_a_reader_gets_one_line_at_a_time(typist):
    user = typist("sh", "-c", "echo ready; head -n 1 | tr a-z A-Z; cat | tr a-z A-Z")
    user.expect("ready")
    user.type("first\rsecond\rthird\r")
    user.expect("<stdout>:FIRST")
    user.expect("<stdout>:SECOND\r\n.*<stdout>:THIRD")
    user.type("\x04")
    assert user.ended() == 0


def test_lines_are_edited(typist, script):
    program = script("import readline\nprint('got', input('? '))\nprint('got', input('? '))\n")
    user = typist(*TWO, "sh", "-c", f"[ $RANK = 1 ] || exec {sys.executable} {program}")
    user.expect(r"\? ")
    assert not user.is_canonical()
    user.type("bcd\x1b[D\x1b[D\x1b[Da\r")  # three times the left arrow
    user.expect("got abcd")
    user.expect(r"\? ")
    user.type("\x1b[A\x7fe\r")  # the line before, its last letter replaced
    user.expect("got abce")
    assert user.ended() == 0
    assert user.modes() == user.first_modes


@pytest.mark.sweep
def test_python_alone_is_an_interactive_one(typist, tmp_path):
    # From 3.13 on, Python has an editor of its own, which speaks to the terminal. What was typed is
    # kept in the home.
    env = {"PYTHON_BASIC_REPL": "1", "HOME": str(tmp_path)}
    user = typist(*TWO, sys.executable, "-q", env=env)
    user.expect(">>> ")
    user.type("6 * 7\r")
    user.expect(r"^\[1,0\]<stdout>:42\r\n\[1,0\]<stdout>:>>> ")
    user.type("1 / 0\r")
    user.expect(r"ZeroDivisionError: division by zero\r\n\[1,0\]<stdout>:>>> ")
    user.type("prin\t'ab' * 2)\r")
    user.expect(r"<stdout>:abab\r\n")
    user.expect(">>> ")
    user.type("\x04")
    assert user.ended() == 0


def test_ctrl_c_ends_a_job_that_waits_for_input(typist, script):
    program = script(
        "import os\nif os.environ['RANK'] == '0': input('? ')\nelse: __import__('time').sleep(60)\n"
    )
    user = typist(*TWO, program)
    user.expect(r"\? ")
    user.type("\x03")
    assert user.ended() == 130
    assert user.modes() == user.first_modes


def test_a_program_without_signals_gets_every_byte(typist, script):
    program = script(
        "import os, sys, tty\n"
        "tty.setraw(0)\n"
        "os.write(1, b'ready\\r\\n')\n"
        "print([os.read(0, 1) for _ in range(4)], end='\\r\\n')\n"
        "os.kill(os.getpid(), 9)\n"
    )
    user = typist(program)
    user.expect("ready\r\n")
    user.type("\x03\x04\r\x1a")
    user.expect(re.escape(r"[b'\x03', b'\x04', b'\r', b'\x1a']"))
    # It has died with its terminal in that state.
    assert user.ended() == 137
    assert user.modes() == user.first_modes


@pytest.mark.sweep
def test_the_program_sees_the_window(typist, script):
    program = script(
        "import shutil, signal, time\n"
        "told = []\n"
        "signal.signal(signal.SIGWINCH, lambda *_: told.append(1))\n"
        "print(*shutil.get_terminal_size())\n"
        "while not told: time.sleep(0.01)\n"
        "print(*shutil.get_terminal_size())\n"
    )
    user = typist(*PLAIN, program, size=(30, 90), env={"COLUMNS": "11", "LINES": "12"})
    user.expect("90 30")
    user.resize(40, 120)
    user.expect("120 40")
    assert user.ended() == 0


def test_the_keyboard_is_read_while_output_goes_to_a_file(typist, script, tmp_path):
    """A password is asked for at the terminal itself, where it is not shown."""
    program = script(
        "import getpass, sys\n"
        "print(sys.stdout.isatty(), sys.stdin.isatty(), sys.stdin.readline())\n"
        "print('length', len(getpass.getpass()))\n"
    )
    out = tmp_path / "out"
    command = ["sh", "-c", f'exec "$@" > {out}', "sh", *LAUNCHER, *PLAIN, program]
    user = typist(command=command)
    user.type("typed\r")
    user.expect("Password: ")
    assert not user.echoes()
    user.type("secret\r")
    assert user.ended() == 0
    assert "secret" not in user.seen
    assert user.modes() == user.first_modes
    assert out.read_text() == "False True typed\n\nlength 6\n"


def test_stdout_and_stderr_are_terminals_and_stay_apart(typist, script, tmp_path):
    program = script(
        "import os, sys\n"
        "print(*(file.isatty() for file in (sys.stdin, sys.stdout, sys.stderr)))\n"
        "print(*os.get_terminal_size(0))\n"  # a tag takes some columns
        "sys.stderr.write('no newline')\n"
        "sys.stdout.write('last word')\n"
    )
    user = typist("--output-dir", "out", program)
    assert user.ended() == 0
    run = (tmp_path / "out" / "latest").readlink()
    assert user.seen == (
        "[1,0]<stdout>:True True True\r\n[1,0]<stdout>:66 24\r\n"
        "[1,0]<stderr>:no newline\r\n[1,0]<stdout>:last word\r\n"
        f"poprun-py: the report is out/{run}/report.html\r\n"
    )
    assert (
        tmp_path / "out" / "latest" / "attempt-1" / "instance-0.stdout"
    ).read_bytes() == b"True True True\n66 24\nlast word"
    assert (
        tmp_path / "out" / "latest" / "attempt-1" / "instance-0.stderr"
    ).read_bytes() == b"no newline"


def test_a_traceback_at_the_terminal_is_in_the_report(typist, script):
    program = script("import time\nprint('a prompt', end='')\nraise ValueError('seven of nine')\n")
    user = typist("--output-dir", "out", program)
    assert user.ended() == 1
    assert user.seen.count("ValueError: seven of nine") == 1  # on the screen as the last thing
    report = (Path(program).parent / "out" / "latest" / "report.json").read_text()
    assert "ValueError: seven of nine" in report


PAGER = """
import sys, termios, time, tty
terminal = open("/dev/tty", "rb", buffering=0)
before = termios.tcgetattr(terminal)
tty.setcbreak(terminal, termios.TCSANOW)
print("pager:", sys.stdin.readline(), end="", flush=True)
time.sleep(0.5)  # the keys wait for it
print("key", terminal.read(1), terminal.read(1), terminal.read(1), flush=True)
termios.tcsetattr(terminal, termios.TCSANOW, before)
print("pager:", sys.stdin.readline(), end="", flush=True)
"""


@pytest.mark.sweep
def test_a_pager_behind_the_launcher_gets_its_keys(typist, script):
    program = script("print('up')\nprint('got', input())\n")
    pager = script(PAGER, "pager.py")
    command = ["sh", "-c", '"$@" | python3 pager.py', "sh", *LAUNCHER, *PLAIN, program]
    user = typist(command=command, env={"PATH": f"{Path(sys.executable).parent}:/bin:/usr/bin"})
    assert pager.exists()
    user.expect("pager: up\r\n")
    user.type("jkq")
    user.expect(r"key b'j' b'k' b'q'\r\n")
    user.type("typed\r")
    user.expect("pager: got typed")
    user.ended()


def test_ctrl_z_stops_all_and_fg_goes_on(typist, script, monkeypatch):
    program = script(
        "import os, popdist_py\n"
        "popdist_py.init()\n"
        "if os.environ['RANK'] == '0':\n"
        "    print('got', input('? '))\n"
        "else:\n"
        "    print('pid', os.getpid())\n"
        "popdist_py.barrier()\n"
    )
    # Neither the job's limit nor that of a wait for other instances counts the time in between.
    monkeypatch.setenv("POPDIST_HANG_TIMEOUT", "5")
    user = shell(typist)
    began = time.monotonic()
    user.type(f"poprun-py --num-instances 2 --num-replicas 2 --timeout 6 {program}\r")
    pid = int(user.expect(r"pid (\d+)")[1])
    user.expect(r"\? ")
    user.type("\x1a")
    user.expect(r"Stopped.*\$ $")
    # The shell can print its line before the wrapper has stopped its program.
    user.wait_until(lambda: state(pid) == "T")
    user.wait_until(lambda: time.monotonic() > began + 7)
    user.type("fg\r")
    user.expect("-m poprun_py")
    user.wait_until(lambda: state(pid) == "S")
    user.type("after\r")
    user.expect("got after")
    user.expect(r"\$ $")
    user.type("echo code $?; exit\r")
    user.expect("code 0")
    user.ended()


@pytest.mark.sweep
def test_a_program_that_edits_lines_goes_on_after_ctrl_z(typist, script):
    program = script("x = 1\nbreakpoint()\nprint('x is', x)\n")
    user = shell(typist)
    user.type(f"poprun-py {program}\r")
    user.expect(r"\(Pdb\) ")
    user.wait_until(lambda: not user.is_canonical())
    user.type("x = 2")
    user.expect("x = 2")  # else Ctrl-Z, as on any terminal, drops it
    user.type("\x1a")
    user.expect(r"Stopped.*\$ $")
    user.type("stty -a | tr ' ' '\\n' | grep -x icanon; fg\r")
    user.expect(r"[\r\n]icanon\r\n.*-m poprun_py")
    user.expect(r"\(Pdb\) x = 2")  # shown again
    user.type("9\r")
    user.expect(r"\(Pdb\) ")
    user.type("c\r")
    user.expect("x is 29")
    user.expect(r"\$ $")
    user.type("exit\r")
    user.ended()


def state(pid):
    return Path(f"/proc/{pid}/stat").read_bytes().rpartition(b")")[2].split()[0].decode()


@pytest.mark.sweep
def test_what_is_typed_ahead_is_there_for_the_shell(typist, script):
    program = script(
        "import pathlib, time\n"
        "print('up')\n"
        "while not pathlib.Path('go').exists(): time.sleep(0.1)\n"
    )
    user = shell(typist)
    user.type(f"poprun-py {program}\r")
    user.expect("<stdout>:up")
    user.type("this line is the program's\r")
    user.expect("program's")
    user.type("echo typed $((6 * 7)) ahead; exit\r")
    user.expect("exit")
    Path(program.parent, "go").touch()
    user.expect("typed 42 ahead")
    user.ended()


@pytest.mark.sweep
def test_a_stopped_job_that_is_killed_leaves_nothing(typist, script):
    program = script(
        "import pathlib, signal, sys, time\n"
        "signal.signal(signal.SIGTERM, lambda *_: sys.exit(pathlib.Path('asked').touch()))\n"
        "print('up')\n"
        "time.sleep(100)\n"
    )
    user = shell(typist)
    user.type(f"poprun-py {program} < /dev/null\r")
    user.expect("<stdout>:up")
    user.type("\x1a")
    user.expect(r"Stopped.*\$ $")
    user.type("kill -9 %1; while jobs %1 | grep -q Stopped; do :; done; exit\r")
    user.ended()
    # The fixture looks for what is left; before that the program could save.
    user.wait_until(Path(program.parent, "asked").exists)


def test_a_job_in_the_background_leaves_the_keyboard_alone(typist, script):
    program = script("print('up')\nprint('got', input())\n")
    user = shell(typist)
    user.type(f"poprun-py {program} &\r")
    user.expect("<stdout>:up\r\n")
    user.type("echo shell reads; jobs\r")
    user.expect(r"[\r\n]shell reads\r\n.*Running.*\$ $")
    user.type("fg\r")
    user.expect("poprun-py .*program.py")
    user.type("job reads\r")
    user.expect("got job reads")
    user.expect(r"\$ $")
    user.type("exit\r")
    user.ended()


def test_the_terminal_is_set_back_when_the_launcher_is_quit(typist, script):
    user = typist(script("x = 1\nbreakpoint()\nx = 2\n"))
    user.expect(r"\(Pdb\) ")
    user.wait_until(lambda: not user.is_canonical())
    user.type("\x1c")
    assert user.ended() == -signal.SIGQUIT
    assert user.modes() == user.first_modes


def test_a_launcher_that_is_killed_leaves_the_terminal_as_it_was(typist, script):
    user = typist(script("import sys\nprint('up')\nsys.stdin.read()\n"))
    user.expect("<stdout>:up")
    os.kill(user.pid, signal.SIGKILL)
    assert user.ended() == -signal.SIGKILL
    assert user.modes() == user.first_modes


def test_a_pipe_reaches_another_instance(poprun):
    read, write = os.pipe()
    os.write(write, b"piped\n")
    os.close(write)
    done = poprun(*TWO, "--stdin-instance", "1", "sh", "-c", "echo $RANK $(cat)", stdin=read)
    os.close(read)
    assert sorted(done.stdout.splitlines()) == ["[1,0]<stdout>:0", "[1,1]<stdout>:1 piped"]


def test_a_file_that_was_read_in_part_reaches_another_instance(poprun, tmp_path):
    (tmp_path / "words").write_text("gone\nleft\n")
    with (tmp_path / "words").open(buffering=5) as file:
        os.read(file.fileno(), 5)
        done = poprun(*TWO, "--stdin-instance", "1", "sh", "-c", "echo $RANK $(cat)", stdin=file)
    assert sorted(done.stdout.splitlines()) == ["[1,0]<stdout>:0", "[1,1]<stdout>:1 left"]


def test_input_that_cannot_be_read_has_ended(poprun, tmp_path):
    with (tmp_path / "log").open("wb", buffering=0) as write_only:
        write_only.write(b"begun\n")  # a file that was read from its start would be opened anew
        done = poprun("-n", 2, "--stdin-instance", 1, "cat", stdin=write_only)
    assert done.returncode == 0, done.stderr
    assert "Traceback" not in done.stderr
