"""What runs the pages that are read from top to bottom notices what a page gets wrong."""

from __future__ import annotations

import os
import sys

import pytest

from poprun_py.display.terminal_rows import wrapped
from tools.running.transcript import Command, File, Terminal, differences, parse, shown

PAGE = """
Save this as `one.py`:

<!-- file: one.py -->
```python
print(input("name? "))
```

```console
$ echo a; echo b
a
b
$ exit 3  # exit code 3
```

<!-- keyboard: name? | (Pdb) -->
```console
$ python one.py
name? Ada
Ada
```

<!-- numbers vary -->
```console
$ echo $$
1
```

<!-- this machine -->
```console
$ hostname
vm
```

<!-- until: go -->
```console
$ echo
$ (sleep 1; echo go) &
```

```python
print("only shown")
```
"""


def test_page_is_files_and_commands_in_order():
    assert parse(PAGE) == [
        File("one.py", 'print(input("name? "))\n'),
        Command("echo a; echo b", 0, ("a", "b")),
        Command("exit 3  # exit code 3", 3, ()),
        Command("python one.py", 0, ("name? Ada", "Ada"), ("name? ", "(Pdb) ")),
        Command("echo $$", 0, ("1",), (), "numbers"),
        Command("hostname", 0, ("vm",), (), "all"),
        Command("echo", 0, ()),
        Command("(sleep 1; echo go) &", 0, (), until="go"),
    ]


@pytest.mark.parametrize(
    ("expected", "found"),
    [
        ("a\nb", "a\nb"),
        ("took ... s", "took 1.2 s"),
        ("a\n...", "a\nb\nc"),
        ("...\nc", "a\nb\nc"),
        ("[1,0]<stdout>:a\n[1,1]<stdout>:a", "[1,1]<stdout>:a\n[1,0]<stdout>:a"),
        ("a [x] (y) *", "a [x] (y) *"),
    ],
)
def test_what_fits(expected, found):
    assert differences(Command("", 0, tuple(expected.split("\n"))), found.split("\n")) == []


@pytest.mark.parametrize(
    ("expected", "found", "problems"),
    [
        ("a", "b", ["unexpected: b", "missing: a"]),
        ("a", "a\nb", ["unexpected: b"]),
        ("a\nb", "a", ["missing: b"]),
        ("a\nb", "b\na", ["unexpected: b", "missing: b"]),
        ("a\n...\nb", "a\nc", ["missing: b"]),
        ("took ... s", "took 1.2", ["unexpected: took 1.2", "missing: took ... s"]),
        ("[1,0]<stdout>:a\n[1,0]<stdout>:b", "[1,0]<stdout>:b\n[1,0]<stdout>:a",
         ["unexpected: [1,0]<stdout>:b", "missing: [1,0]<stdout>:b"]),
    ],
)  # fmt: skip
def test_what_does_not_fit(expected, found, problems):
    command = Command("", 0, tuple(expected.split("\n")))
    assert differences(command, found.split("\n")) == problems


def test_numbers_may_vary():
    command = Command("", 0, ("step 1: 2.5e-03, 1,234 tokens/s", "end"), varies="numbers")
    assert differences(command, ["step 7: 3, 56 tokens/s", "end"]) == []
    assert differences(command, ["step 7: 3, 56 bytes/s", "end"]) != []


def test_a_slow_instance_of_a_busy_machine_is_no_difference():
    remark = "poprun-py: instance 1 on vm is slow: 35 ms a step without waiting for others"
    assert differences(Command("", 0, ("a",)), ["a", remark]) == []
    expected = Command("", 0, ("poprun-py: instance 1 on ... is slow: ... loads data longer",))
    assert len(differences(expected, [remark])) == 2


def test_doubts_about_figures_of_a_busy_machine_are_no_difference():
    marked = ["run  1.98x*", "* other programs used CPUs of the job: 0.3 of 2 (two)"]
    assert differences(Command("", 0, ("run  1.98x",)), marked) == []
    assert differences(Command("", 0, ("run  1.98x*", "* other programs ...")), marked) == []
    assert len(differences(Command("", 0, ("run  1.98x*", "* too few ...")), marked)) == 2


def test_rows_of_a_wrapped_message_are_one_line():
    message = f"poprun-py: error: no program {'x' * 60} in {'/y' * 20}: expected another name"
    rows = wrapped(message, 120).split("\n")
    assert len(rows) == 2
    assert differences(Command("", 0, (message, "  end")), [*rows, "  end"]) == []
    remark = f"poprun-py: instance 1 on {'x' * 60} is slow: 35 ms a step, and loads its data longer"
    rows = wrapped(remark, 120).split("\n")
    assert len(rows) == 2
    assert differences(Command("", 0, ("a",)), ["a", *rows]) == []


def test_message_of_a_long_row_stays_as_it_is():
    message = "poprun-py: " + "a " * 90 + "end"
    assert differences(Command("", 0, (message, "  b")), [message, "  b"]) == []


def test_indented_lines_of_a_report_stay_lines():
    report = ("poprun-py: instance 1 failed first: exit code 1", "  vm, PID 7, after step 25")
    assert differences(Command("", 0, report), list(report)) == []
    joined = (f"{report[0]} {report[1].strip()}",)
    assert differences(Command("", 0, joined), list(report)) != []


def test_output_may_be_this_machines():
    assert differences(Command("", 0, ("a",), varies="all"), ["b", "c"]) == []


def test_terminal_shows_what_is_left_after_redrawing():
    assert shown("  0%\r 50%\r100%\r\n\x1b[31mred\x1b[0m  \r\n") == ["100%", "red"]


@pytest.fixture
def terminal(tmp_path):
    one = Terminal(tmp_path, dict(os.environ), seconds=20)
    yield one
    one.close()


def test_commands_share_a_shell_and_have_codes(terminal):
    assert terminal.run(Command("cd / && x=5", 0, ())) == ([], 0)
    assert terminal.run(Command("echo $x; pwd; false", 0, ())) == (["5", "/"], 1)
    lines, code = terminal.run(Command("sh -c 'exit 7' & wait $!", 7, ()))
    assert code == 7
    assert differences(Command("", 7, ("[1] ...", "[1]+  Exit 7 ...")), lines) == []


def test_keyboard_is_typed_at_the_prompts(terminal, tmp_path):
    (tmp_path / "one.py").write_text(
        "name = input('name? ')\nbreakpoint()\nprint('Hello', name)\ninput('wait')\n"
    )
    command = Command(
        f"{sys.executable} one.py",
        1,
        ("name? Ada", "> ...", "...", "(Pdb) p name", "'Ada'", "(Pdb) c", "Hello Ada", "^D"),
        ("name? ", "(Pdb) "),
    )
    lines, code = terminal.run(command)
    assert code == 1
    assert lines[0] == "name? Ada"
    assert "'Ada'" in lines
    assert "Hello Ada" in lines
    assert any("EOFError" in line for line in lines)


def test_next_command_waits_for_a_job_in_the_background(terminal):
    job = Command("sh -c 'sleep 0.3; echo ready now; exec sleep 50' &", 0, (), until="ready")
    lines, _ = terminal.run(job)
    assert lines[-1] == "ready now"
    assert terminal.run(Command("kill %1; wait %1", 143, ()))[1] == 143


def test_ctrl_c_is_pressed_after_the_line_before_it(terminal):
    command = Command("sh -c 'echo now; exec sleep 50'", 130, ("now", "^C"))
    assert terminal.run(command) == (["now", "^C"], 130)


def test_command_that_ends_before_it_asks_is_not_waited_for(terminal):
    command = Command(
        "echo no; exit_code() { return 4; }; exit_code", 4, ("name? Ada",), ("name? ",)
    )
    assert terminal.run(command) == (["no"], 4)


def test_command_that_does_not_end_is_told(tmp_path):
    terminal = Terminal(tmp_path, dict(os.environ), seconds=0.5)
    with pytest.raises(AssertionError, match=r"sleep 50\ndid not end"):
        terminal.run(Command("sleep 50", 0, ()))
    terminal.close()
