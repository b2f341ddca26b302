"""Faults of command lines that were copied from a document. One error names all faults."""

from __future__ import annotations

import re
import shlex
import shutil
from pathlib import Path

import pytest

from poprun_py.command.cli import run
from poprun_py.errors import UsageError
from poprun_py.options.command_line import parse
from poprun_py.options.launch_config import LaunchConfig
from poprun_py.planning.pasted_command import check_pasted_command

PRINTED = Path(__file__).parents[2] / "sdk_programs" / "commands"


@pytest.fixture(autouse=True)
def folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    return tmp_path


def fault(words) -> str:
    """Return the error of a command line; empty if there is none."""
    words = shlex.split(words) if isinstance(words, str) else words
    try:
        check_pasted_command(LaunchConfig(**parse(words)))
    except UsageError as error:
        return str(error)
    return ""


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (
            [" --vipu-partition=p", "x"],
            "is an option that begins with a blank: expected --vipu-partition=p;",
        ),
        (["-n", "2", " train.py"], "program ' train.py' begins with a blank: expected train.py; a"),
        (["\u2013num-instances", "2"], "begins with a dash, .* two hyphens, --num-instances$"),
        (["\u2014num-replicas=4", "x"], "begins with a dash, .* two hyphens, --num-replicas=4$"),
    ],
)
def test_a_word_that_is_not_a_program(words, said, folder):
    assert re.search(said, fault(words))
    # A file with this name exists, so it is the program.
    program = next(word for word in words if word[0] in " \u2013\u2014")
    (folder / program).touch()
    assert fault(words) == ""


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ("--host a, b,c -n 2 x", "a blank after a: expected host names separated .* --host a,b,c$"),
        ("--host a, b x", "after a: .* --host a,b$"),
        ("--host=a ,b x", "after a: .* --host a,b$"),
        # The second word is too long for a file name.
        (f"--host a, {','.join(f'n{i}' for i in range(100))} x", "after a: .* --host a,n0,n1,"),
        ("--host a,b c,d x", "after b, and no comma between b and c: .* --host a,b,c,d$"),
        ("--host 10.0.0.1, 10.0.0.2 10.0.0.3, 10.0.0.4 x",
         "after 10.0.0.1, 10.0.0.2, 10.0.0.3, and no comma between 10.0.0.2 and 10.0.0.3: "),
    ],
)  # fmt: skip
def test_blanks_in_a_host_list(words, said):
    assert re.search(said, fault(words))


@pytest.mark.parametrize(
    "words",
    ["--host a,b x", "--host a,b train.py", "--host a,b, train.py", "--host a, sh x", "x a,b"],
)
def test_a_program_behind_a_host_list(words):
    assert fault(words) == ""


@pytest.mark.parametrize("option", ["--mpi-global-args", "--mpi-local-args"])
@pytest.mark.parametrize(
    ("value", "said"),
    [
        ("1,2,3.0/16", "'3.0/16' is not a network; expected .*; did you mean 1.2.3.0/16\\?$"),
        ("10.3.0.0/16,10.4.0/16", "'10.4.0/16' is not a network; expected names of interfaces"),
        ("10.3.0.0/33", "'10.3.0.0/33' is not a network"),
        ("eth0,", "an entry is empty"),
        ("10.3.0.0/16", ""),
        ("xxx.xxx.xxx.0/16,xxx.xxx.xxx.0/xx", ""),
        ("fd00::/8,eth0", ""),
        ("^lo,docker0", ""),
    ],
)
def test_lists_of_interfaces(option, value, said):
    found = fault([f"{option}=--mca oob_tcp_if_include {value} --mca a b", "x"])
    assert re.search(said, found)
    assert bool(found) == bool(said)


@pytest.mark.parametrize(
    ("program", "said"),
    [
        ("python3 --config c", "--config is not an option of Python; .* python3 train.py --config"),
        ("/usr/bin/python3.11 -u --epochs=2", "no script: --epochs=2 is not an option of Python"),
        ("python -X dev --data d", "no script: --data is not an option of Python"),
        ("python3 train.py --config c", ""),
        ("python3 -m train --config c", ""),
        ("python3 -c pass --config c", ""),
        ("python3 -Xdev -W error train.py --config c", ""),
        ("python3 --version", ""),
        ("python3 --check-hash-based-pycs always train.py --x", ""),
        ("python3 -", ""),
        ("pythonista --config c", ""),
        ("sh --config c", ""),
    ],
)
def test_python_without_a_script(program, said):
    found = fault(f"--dry-run {program}")
    assert bool(found) == bool(said)
    assert re.search(said, found)


# The faults of the printed commands, in order.
FAULTS = {
    "pod64": [
        "' --vipu-partition=pod64_partition_name' is an option that begins with a blank",
        "' --num-replicas=64' is an option that begins with a blank",
        "--mpi-global-args: oob_tcp_if_include 'xxx,xxx,xxx.0/16': 'xxx.0/16' is not a network",
    ],
    "pod128": [
        "--host has a blank after xxx.xxx.1.4: expected",
        "program python3 --config has no script",
    ],
    "pod256": [
        "no comma between xxx.xxx.2.4 and xxx.xxx.3.1: expected",
        "program python3 --config has no script",
    ],
}


@pytest.mark.parametrize("dry", [["--dry-run"], []], ids=["dry run", "launch"])
@pytest.mark.parametrize("name", FAULTS)
def test_one_line_names_all_faults_of_a_printed_command(name, dry, capsys):
    # A shell joins continued lines, but shlex does not.
    words = shlex.split((PRINTED / f"{name}.sh").read_text().replace("\\\n", ""))
    assert run([*dry, *words[words.index("poprun") + 1 :]]) == 2
    (line,) = [each for each in capsys.readouterr().err.splitlines() if "error:" in each]
    places = [line.index(f"({n}) ") for n in range(1, len(FAULTS[name]) + 1)]
    for part, said in zip(FAULTS[name], places, strict=True):
        assert part in line[said:]
    assert f"the command has {len(places)} faults: (1) " in line


def test_a_later_fault_of_another_kind_is_also_named():
    assert "(2) unknown option --bogus" in fault("--host a, b --bogus x")


def test_words_that_are_programs_are_not_hosts():
    assert shutil.which("sh")
    assert fault("--host a, sh") == ""
