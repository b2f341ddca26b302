"""popdist_py.breakpoint() in real jobs at a real terminal."""

from __future__ import annotations

import time

import pytest
from support.terminals import LAUNCHER, Typist

pytestmark = pytest.mark.mpi

TWO = ("--num-instances", "2", "--num-replicas", "2")
# Steps are counted before, so that an instance in the debugger would count as hung.
PROGRAM = """
import sys, time
import popdist_py
from popdist_py import heartbeat

def work(where):
    x = 40 + popdist_py.getInstanceIndex()
    popdist_py.breakpoint(where, header="look here")
    print("x is", x, "at", time.monotonic())

popdist_py.init()
for _ in range(3):
    heartbeat.step()
    time.sleep(0.1)
work(int(sys.argv[1]))
heartbeat.step()
popdist_py.barrier()
print("stdin", sys.stdin.read().split())
"""


@pytest.fixture
def typist(tmp_path):
    users = []

    def start(*words):
        users.append(Typist([*LAUNCHER, *words], cwd=tmp_path))
        return users[-1]

    yield start
    for user in users:
        with user:
            pass


@pytest.mark.parametrize("where", [pytest.param(0, marks=pytest.mark.sweep), 1])
def test_the_debugger_opens_in_one_instance_and_no_limit_counts(typist, script, where):
    began = time.monotonic()
    user = typist(*TWO, "--hang-timeout", "1", "--timeout", "6", script(PROGRAM), str(where))
    user.expect(
        f"poprun-py: instance {where} is in the debugger: --hang-timeout and --timeout pause\r\n"
    )
    user.expect("look here")
    user.expect(rf"^\[1,{where}\]<stdout>:\(Pdb\) ")
    user.type("p x, 7 * 6\r")
    user.expect(rf"\({40 + where}, 42\)\r\n\[1,{where}\]<stdout>:\(Pdb\) ")
    # Lines are edited, as pdb does it anywhere.
    user.type("p 2\x1b[D1\r")
    user.expect(r"\r\n\[1,.\]<stdout>:12\r\n")
    user.expect(r"\(Pdb\) ")
    user.wait_until(lambda: time.monotonic() > began + 7)
    left = time.monotonic()
    user.type("c\r")
    others = 1 - where
    # The other one's line may have been on the screen in part: it is taken back then.
    line = rf"(?:^|\x1b\[K)\[1,{others}\]<stdout>:x is \d+ at ([\d.]+)"
    at = float(user.expect(line)[1])
    assert at > left
    # Then instance 0 has the keyboard again, and instance 1 what it had.
    user.type("mine\r\x04")
    user.expect(r"\[1,0\]<stdout>:stdin \['mine'\]")
    assert user.ended() == 0
    assert "[1,1]<stdout>:stdin []" in user.seen
    assert user.modes() == user.first_modes


@pytest.mark.sweep
def test_each_has_its_turn_and_later_breakpoints_of_pdb_work(typist, script):
    program = script(
        "import popdist_py\n"
        "popdist_py.init()\n"
        "me = popdist_py.getInstanceIndex()\n"
        "popdist_py.breakpoint(1)\n"
        "a = me\n"
        "popdist_py.barrier()\n"
        "b = me\n"
        "popdist_py.barrier()\n"
        "popdist_py.breakpoint(me)\n"  # each asks for itself: one after the other
        "print('end')\n"
    )
    user = typist(*TWO, program)
    user.expect(r"\[1,1\]<stdout>:\(Pdb\) ")
    user.type("b 7\r")
    user.expect(r"Breakpoint 1 at .*\(Pdb\) ")
    user.type("c\r")  # the barrier needs the other one, which goes on too
    user.expect(r"-> b = me\r\n.*\(Pdb\) ")
    user.type("cl 1\r")
    user.expect(r"\(Pdb\) ")
    user.type("c\r")
    first = user.expect(r"instance (\d) is in the debugger.*\(Pdb\) ")[1]
    user.type("c\r")
    second = user.expect(r"instance (\d) is in the debugger.*\(Pdb\) ")[1]
    assert {first, second} == {"0", "1"}
    user.type("c\r")
    assert user.ended() == 0
    assert user.seen.count("<stdout>:end") == 2


@pytest.mark.sweep
def test_nobody_waits_for_an_instance_that_has_ended(typist, script):
    program = script(
        "import os, popdist_py\n"
        "if os.environ['RANK'] == '0': popdist_py.breakpoint(1); print('on')\n"
    )
    user = typist(*TWO, program)
    user.expect("<stdout>:on")
    assert user.ended() == 0


@pytest.mark.sweep
def test_quitting_ends_the_job(typist, script):
    program = script("import popdist_py\npopdist_py.breakpoint(1)\nprint('on')\n")
    user = typist(*TWO, program)
    user.expect(r"\(Pdb\) ")
    user.type("q\r")
    assert user.ended() == 1
    assert "bdb.BdbQuit" in user.seen
    assert "instance 1 (replica 1)" in user.seen


@pytest.mark.sweep
def test_pythons_own_breakpoint_may_be_this_one(typist, script, monkeypatch):
    monkeypatch.setenv("PYTHONBREAKPOINT", "popdist_py.breakpoint")
    user = typist(*TWO, script("x = 5\nbreakpoint(1)\nprint('on', x)\n"))
    user.expect(r"\[1,1\]<stdout>:\(Pdb\) ")
    user.type("x = 6\r")
    user.expect(r"\(Pdb\) ")
    user.type("c\r")
    assert user.ended() == 0
    assert "[1,1]<stdout>:on 6" in user.seen
    assert "[1,0]<stdout>:on 5" in user.seen


def test_without_a_terminal_it_says_so_and_goes_on(poprun, script):
    program = script("import popdist_py\npopdist_py.breakpoint(1)\nprint('on')\n")
    done = poprun(*TWO, program)
    assert done.returncode == 0
    assert done.stdout.count("on\n") == 2
    assert done.stderr.splitlines() == [
        "[1,1]<stderr>:popdist_py.breakpoint() did not open the debugger, because poprun-py "
        "was not started from a terminal; start poprun-py from a terminal, without < or |"
    ]


def test_an_instance_that_does_not_exist(poprun, script):
    done = poprun("-n", 1, script("import popdist_py\npopdist_py.breakpoint(1)\n"))
    assert done.returncode == 1
    assert "breakpoint(1): expected the index of an instance, 0 to 0" in done.stderr


def test_without_the_launcher_it_is_pdb(tmp_path, script):
    import sys

    program = script("import popdist_py\nx = 3\npopdist_py.breakpoint()\nprint('on', x)\n")
    with Typist([sys.executable, program], cwd=tmp_path) as user:
        user.expect(r"-> print\('on', x\)\r\n\(Pdb\) ")
        user.type("x = 4\r")
        user.expect(r"\(Pdb\) ")
        user.type("c\r")
        assert user.ended() == 0
        assert "on 4" in user.seen
