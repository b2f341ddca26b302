"""``python -m popdist_py`` behaves as ``python``: arguments, path, tracebacks, exit codes."""

from __future__ import annotations

import os
import pty
import re
import signal
import subprocess
import sys

import pytest
from support.repository import ROOT

from popdist_py.environment import InstanceEnvironment

SEEN = """
import os, sys
print(__name__, __package__, __file__, sys.argv, sys.orig_argv[1:], sys.flags.dev_mode)
print([p for p in sys.path if 'start_hook' not in p], sys.gettrace(), len(sys.warnoptions))
"""


def as_python(python, *words, options=(), **more):
    """Run the same words under ``python`` and ``python -m popdist_py``; both must show the same."""
    plain = python(*options, *words, program="", **more)
    ours = python(*options, "-m", "popdist_py", *words, program="", **more)
    assert (ours.returncode, ours.stdout) == (plain.returncode, plain.stdout)
    assert ours.stderr == plain.stderr
    return ours


@pytest.mark.parametrize(
    "words", [("-u", "./program.py", "a", "-m", "--help"), ("-P", "program.py"),
              ("-m", "package.inner", "-c", "x"), ("-c", SEEN.replace("__file__", "0"), "y", "-z"),
              ("package", "arguments")],
    ids=lambda words: " ".join(words)[:20],
)  # fmt: skip
def test_a_program_sees_what_python_shows_it(python, tmp_path, words):
    (tmp_path / "package").mkdir()
    (tmp_path / "package" / "__init__.py").touch()
    for name in ("program.py", "package/inner.py", "package/__main__.py"):
        (tmp_path / name).write_text(SEEN)
    assert as_python(python, *words).returncode == 0


def test_options_of_python_are_kept(python, tmp_path):
    (tmp_path / "program.py").write_text(SEEN)
    for options in (("-X", "dev", "-B", "-O", "-W", "error"), ("-Xdev", "-u")):
        done = as_python(python, "program.py", options=options)
        assert done.returncode == 0, options
        assert " True\n" in done.stdout, options  # the mode for development


def test_the_module_may_be_named_in_all_ways_of_python(python):
    code = "import sys; print(sys.orig_argv[1:], sys.flags.dont_write_bytecode)"
    for words in (("-mpopdist_py",), ("-Bm", "popdist_py"), ("-Bmpopdist_py",)):
        done = python(*words, "-c", code, "-m", program="", PYTHONDONTWRITEBYTECODE="")
        kept = ["-B"] if "B" in words[0] else []
        assert done.stdout == f"{[*kept, '-c', code, '-m']} {len(kept)}\n", (words, done.stderr)


@pytest.mark.parametrize(
    "text", ["import sys; sys.exit(7)", "raise SystemExit('a message')", "def f(:",
             "import poptorchh", "import os; os.kill(os.getpid(), 15)"],
)  # fmt: skip
def test_a_program_that_fails_fails_as_under_python(python, tmp_path, text):
    (tmp_path / "program.py").write_text(text)
    done = as_python(python, "program.py")
    assert done.returncode != 0
    assert "popdist_py" not in done.stderr


def test_a_program_that_is_not_there(python):
    assert "can't open file" in as_python(python, "nowhere.py").stderr
    assert "No module named nowhere" in as_python(python, "-m", "nowhere").stderr


def test_ctrl_c_reaches_the_program(tmp_path):
    code = "import time; print('ready', flush=True); time.sleep(60)"
    process = subprocess.Popen(
        [sys.executable, "-m", "popdist_py", "-c", code], stdout=subprocess.PIPE, text=True,
        stderr=subprocess.PIPE, env={**os.environ, "PYTHONPATH": str(ROOT)}, cwd=tmp_path,
    )  # fmt: skip
    assert process.stdout.readline() == "ready\n"
    process.send_signal(signal.SIGINT)
    _, stderr = process.communicate(timeout=30)
    assert process.returncode == -signal.SIGINT
    assert "KeyboardInterrupt" in stderr


def test_without_a_program_it_is_pythons_prompt(tmp_path):
    leader, follower = pty.openpty()
    # Python keeps what was typed in the home.
    env = {**os.environ, "PYTHONPATH": str(ROOT), "TERM": "dumb", "HOME": str(tmp_path)}
    process = subprocess.Popen(
        [sys.executable, "-q", "-m", "popdist_py"], stdin=follower, stdout=follower,
        stderr=follower, env=env, cwd=tmp_path,
    )  # fmt: skip
    os.close(follower)
    os.write(leader, b"import popdist; print(popdist.getNumInstances() + 40)\nexit()\n")
    assert process.wait(30) == 0
    text = b""
    try:
        while part := os.read(leader, 4096):
            text += part
    except OSError:
        pass  # the terminal's other end is closed
    os.close(leader)
    assert b"\n41\r\n" in text


def test_it_may_be_started_as_a_file_or_a_function(python):
    function = ("-c", "from popdist_py.__main__ import main; main()")
    for words in ((f"{ROOT}/popdist_py/__main__.py",), function):
        done = python(*words, "-c", "import popart; print(popart.__name__)", program="")
        assert done.stdout == "popart\n", (words, done.stderr)


VARIABLES = """
import os
print(*map(os.environ.get, ("POPDIST_SDK_NAMES", "POPDIST_IPU", "POPDIST_SDK_COMMAND")))
"""


def test_options_are_variables_of_the_program(python):
    job = InstanceEnvironment().to_environ()
    for words, variables, says in (
        ((), {}, "auto None 1"),
        (("--ipu-model", "bow"), {}, "auto bow 1"),
        (("--sdk-names=yes", "--ipu-model=mk1"), {"POPDIST_IPU": "bow"}, "yes mk1 1"),
        (("--ipu-model", "mk2", "--sdk-names", "auto"), {}, "auto mk2 1"),
        # In an instance of a job, the launcher has set the variable or not.
        ((), job, "auto None None"),
        ((), {**job, "POPDIST_SDK_COMMAND": "1"}, "auto None 1"),
    ):
        done = python(*words, "-c", VARIABLES, **variables)
        assert done.stdout == f"{says}\n", (words, done.stderr)


def test_a_wrong_option_is_one_line(python):
    for words, says in (
        (("--sdk-names", "maybe", "x.py"), "--sdk-names maybe: expected --sdk-names auto or yes"),
        (("--sdk-names=no", "x.py"), "--sdk-names no: expected --sdk-names auto or yes"),
        (("--sdk-names",), "--sdk-names: expected --sdk-names auto or yes"),
        (
            ("--ipu-model", "mk3", "x.py"),
            "--ipu-model mk3: expected .* --ipu-model mk1, mk2 or bow",
        ),
        (("--sdk-names=yes", "--ipu-model"), "--ipu-model: expected --sdk-names auto or yes"),
        (("--install-nmaes",), "--install-nmaes: expected .* --install-names"),
    ):
        done = python(*words)
        assert done.returncode == 2, words
        assert re.match(f"popdist_py: (invalid option )?{says}", done.stderr), words
        assert len(done.stderr.splitlines()) == 1, words


def test_options_that_keep_the_names_away_are_refused(python, python_with_names):
    # Without site-packages, the library is found on PYTHONPATH.
    installed = python_with_names[0]
    for option, executable in (("-E", installed), ("-I", installed), ("-S", sys.executable)):
        done = python(option, "-m", "popdist_py", "x.py", program="", executable=executable)
        assert done.returncode == 2, option
        assert "-E, -I and -S prevent the import of" in done.stderr, option


def test_help(python):
    done = python("--help")
    assert done.returncode == 0
    assert done.stdout.startswith("usage: python -m popdist_py")
    assert max(map(len, done.stdout.splitlines())) < 100
