"""Programs that a prepared Python process forks for a restart: they see what any program sees."""

from __future__ import annotations

import json
import numbers
import sys
from pathlib import Path

import pytest
from support.repository import ROOT

pytestmark = pytest.mark.mpi

# What differs between the environments of two attempts.
CHANGING = {
    *("MASTER_PORT", "POPDIST_RESTART_COUNT", "TORCHELASTIC_RESTART_COUNT", "POPDIST_HEARTBEAT"),
    *("TORCHELASTIC_MAX_RESTARTS", "POPDIST_STACKS"),
}
# The program describes itself to a file, and then ends as END says. The first attempt makes a
# step and fails. The spare has the program's command and parent.
PROGRAM = '''"""The text of the program."""
import sys
is_forked = "fractions" in sys.modules
import json, os, signal, resource, threading, time
import fractions
from pathlib import Path
import helper

def descriptors():
    found = {}
    for name in sorted(os.listdir("/proc/self/fd"), key=int):
        try:
            found[name] = os.readlink(f"/proc/self/fd/{name}").partition(":")[0].partition(" ")[0]
        except OSError:
            pass  # the folder that is listed
    return found

def status(*names):
    lines = Path("/proc/self/status").read_text().splitlines()
    return [line for line in lines if line.partition(":")[0] in names]

def main():
    own = sys.modules["__main__"]
    return {
        "argv": sys.argv, "orig_argv": sys.orig_argv, "path": sys.path, "flags": list(sys.flags),
        "main": {name: repr(getattr(own, name, "none")).partition(" at 0x")[0] for name in (
            "__name__", "__file__", "__doc__", "__package__", "__spec__", "__loader__", "__cached__"
        )},
        "globals": sorted(globals()), "same": own.__dict__ is globals(),
        "options": [sys.warnoptions, sys._xoptions, sys.dont_write_bytecode],
        "environ": dict(os.environ),
        "c_environ": Path("/proc/self/environ").exists(),
        "handlers": {str(n): str(signal.getsignal(n)).partition(" at 0x")[0]
                     for n in signal.valid_signals()},
        "status": status("SigBlk", "SigIgn", "SigCgt", "Umask", "Threads", "Cpus_allowed_list"),
        "limits": {name: resource.getrlimit(getattr(resource, name))
                   for name in dir(resource) if name.startswith("RLIMIT_")},
        "policy": [os.sched_getscheduler(0), os.nice(0)], "folder": os.getcwd(),
        "parent": os.getppid(), "group": os.getpgid(0) == os.getpid(), "session": os.getsid(0),
        "streams": [[s.name, s.mode, s.encoding, s.errors, s.line_buffering, s.write_through,
                     s.isatty(), s.seekable(), type(s).__name__]
                    for s in (sys.stdin, sys.stdout, sys.stderr)],
        "threads": [t.name for t in threading.enumerate()], "descriptors": descriptors(),
        "hook": sys.excepthook.__qualname__, "depth": len(list(frames(sys._getframe()))),
        "helper": helper.__file__, "stdin": sys.stdin.read(),
    }

def frames(frame):
    while frame:
        yield frame
        frame = frame.f_back

def is_spare(pid):
    try:
        words = Path(f"/proc/{pid}/cmdline").read_bytes()
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return False
    return (words == Path("/proc/self/cmdline").read_bytes() and fields[1] == str(os.getppid()))

def spares():
    return [int(each) for each in os.listdir("/proc") if each.isdecimal()
            and int(each) != os.getpid() and is_spare(int(each))]

if __name__ == "__main__":
    attempt = os.environ["TORCHELASTIC_RESTART_COUNT"]
    note = {"is_forked": is_forked, "spares": spares(), **main()}
    Path(os.environ["NOTES"], attempt).write_text(json.dumps(note))
    from popdist_py import heartbeat
    heartbeat.step()
    if attempt == "0":
        for each in note["spares"] if os.environ.get("KILLS") else []:
            os.kill(each, signal.SIGKILL)
        sys.exit(1)
    exec(os.environ.get("END", ""))
    print("printed")
'''


@pytest.fixture
def run(poprun, tmp_path):
    """Run a job with one restart; give the notes of its two attempts, and how it ended."""
    folder = tmp_path / "of the program"
    (folder / "package").mkdir(parents=True)
    (folder / "package" / "__init__.py").touch()
    (tmp_path / "notes").mkdir()
    for name in ("program.py", "package/module.py"):
        folder.joinpath(name).write_text(PROGRAM)
    folder.joinpath("helper.py").write_text("import decimal")
    (tmp_path / "input").write_text("typed")

    def call(*command, restarts=1, **environ):
        with (tmp_path / "input").open() as given:
            done = poprun(
                *("--num-instances", 1, "--share-cores", "yes", "--memory-checkpoints"),
                *("--max-restarts", restarts), *command,
                env={"NOTES": str(tmp_path / "notes"), **environ}, cwd=folder, stdin=given,
            )  # fmt: skip
        notes = [
            json.loads((tmp_path / "notes" / each).read_text()) for each in "01"[: restarts + 1]
        ]
        return notes, done

    call.folder = folder
    return call


@pytest.mark.parametrize(
    "words",
    [
        pytest.param(["program.py", "a", "-b"], marks=pytest.mark.sweep),
        ["-u", "-X", "dev", "-W", "ignore", "../of the program/program.py"],
        ["-m", "package.module", "a b"],
        pytest.param(["-P", "-B", "./program.py"], marks=pytest.mark.sweep),
    ],
    ids=lambda words: words[0],
)
def test_the_program_sees_what_it_sees_in_a_usual_start(run, words):
    path = f"{run.folder}:{ROOT}"
    (usual,), _ = run(sys.executable, *words, restarts=0, PYTHONPATH=path)
    (first, second), done = run(sys.executable, *words, PYTHONPATH=path)
    notes = (usual, first, second)
    assert [note.pop("is_forked") for note in notes] == [False, True, True], done.stderr
    none, spare, same = [note.pop("spares") for note in notes]
    assert (none, len(spare), same) == ([], 1, spare)
    assert second["parent"] == first["parent"]
    for note in notes:
        for name in CHANGING:
            note["environ"].pop(name, None)
    assert second == first
    # Each job has its own processes and folders.
    for note in (usual, first):
        del note["parent"], note["session"]
        note["environ"] = sorted(note["environ"])
    assert first == usual
    assert (done.returncode, done.stdout.count("printed")) == (0, 1)
    assert first["stdin"] == "typed"


@pytest.mark.parametrize(
    ("end", "code", "text"),
    [
        ("sys.exit(7)", 7, ""),
        pytest.param("os._exit(8)", 8, "", marks=pytest.mark.sweep),
        pytest.param("sys.exit('a reason')", 1, "a reason", marks=pytest.mark.sweep),
        ("os.kill(os.getpid(), signal.SIGTERM)", 128 + 15, "SIGTERM"),
        ("raise ValueError('a reason')", 1, "ValueError: a reason\n"),
        ("import atexit; atexit.register(print, 'at exit')", 0, "at exit"),
        ("threading.Thread(target=print, args=['in a thread']).start()", 0, "in a thread"),
        ("os.execvp('echo', ['echo', 'replaced'])", 0, "replaced"),
    ],
)
def test_a_forked_program_ends_as_any_program_ends(run, end, code, text):
    (_, second), done = run(sys.executable, "program.py", END=end)
    assert second["is_forked"]
    assert second["spares"]
    assert done.returncode == code, done.stderr
    assert text in done.stdout + done.stderr
    assert "poprun_prepared_start" not in done.stderr
    assert "sitecustomize" not in done.stderr
    if "Traceback" in done.stderr:
        frames = done.stderr.partition("Traceback")[2].splitlines()[1:]
        assert 'program.py", line' in frames[0]


@pytest.mark.parametrize(
    ("words", "files"),
    [
        # A file beside the script hides a module of Python, which the prepared process has.
        (["program.py"], {"numbers.py": Path(numbers.__file__).read_text()}),
        # Python prints a line for each import.
        pytest.param(["-X", "importtime", "program.py"], {}, marks=pytest.mark.sweep),
        # The script or a module beside it sets a variable before it imports the package.
        (["changed.py"], {"changed.py": f"import os\nos.environ['A'] = 'b'\n{PROGRAM}"}),
        (["-I", "../of the program/isolated.py"], {}),
        (["-c", "import runpy; runpy.run_path('program.py', run_name='__main__')"], {}),
    ],
)
def test_other_programs_start_in_the_usual_way(run, words, files):
    for name, text in files.items():
        run.folder.joinpath(name).write_text(text)
    isolated = f"import sys\nsys.path[:0] = [{str(run.folder)!r}, {str(ROOT)!r}]\n{PROGRAM}"
    run.folder.joinpath("isolated.py").write_text(isolated)
    (first, second), done = run(sys.executable, *words, PYTHONPATH=str(ROOT))
    assert (first["is_forked"], second["is_forked"]) == (False, False)
    assert (first["environ"].keys() | second["environ"].keys()).isdisjoint({"POPRUN_PREPARED"})
    assert (done.returncode, done.stdout.count("printed")) == (0, 1), done.stderr


@pytest.mark.parametrize(
    ("module", "code", "texts"),
    [
        ("print('a text', flush=True)", 0, ["a text"]),
        ("raise ImportError('a reason')", 1, ['program.py", line', "ImportError: a reason"]),
        ("import os; os.write(2, b'a reason'); os.abort()", 128 + 6, ["a reason"]),
        pytest.param("import sys; sys.exit('a reason')", 1, ["a reason"], marks=pytest.mark.sweep),
        ("import os; os.environ['POPDIST_A'] = 'b'", 0, []),
        ("import threading, time; threading.Thread(target=time.sleep, args=[1]).start()", 0, []),
    ],
)
def test_imports_print_and_fail_as_in_a_usual_start(poprun, tmp_path, module, code, texts):
    packages = tmp_path / "site-packages"
    packages.mkdir()
    packages.joinpath("of_the_test.py").write_text(module)
    program = tmp_path / "program.py"
    program.write_text("import of_the_test\nimport os\nprint('end', os.environ.get('POPDIST_A'))")
    outputs = []
    for options in (["--max-restarts", 1], []):
        options += ["--num-instances", 1, "--share-cores", "yes", "--memory-checkpoints"]
        variables = {"PYTHONPATH": f"{packages}:{ROOT}"}
        outputs.append(poprun(*options, sys.executable, program, env=variables))
    for done in outputs:
        assert done.returncode == code, done.stderr
    if code == 0:
        assert outputs[0].stdout == outputs[1].stdout
    for text in texts:
        text_of = outputs[0].stdout + outputs[0].stderr
        assert text in text_of
        assert (outputs[1].stdout + outputs[1].stderr).count(text) == 1


def test_a_spare_that_was_killed_is_not_missed(run):
    (first, second), done = run(sys.executable, "program.py", KILLS="yes")
    assert (len(first["spares"]), second["spares"]) == (1, [])
    assert (done.returncode, done.stdout.count("printed")) == (0, 1), done.stderr
