"""Refused command lines: each says in one line why, and starts nothing.

Refusals of single values are in options/test_command_line.py, those of files that the option reads
beside the tests of these files.
"""

from __future__ import annotations

import shlex

import pytest

from poprun_py.command.cli import run

# The words, and a part of what is said.
REFUSED = [
    ("--import-config /no/such.toml x", "No such file"),
    ("--import-config /dev/null x", "unknown suffix"),
    ("--from-plan /dev/null", "not JSON"),
    ("--from-plan /etc/hostname prog", "cannot be used together"),
    ("--from-plan p.json --import-config c.toml", "cannot be used together"),
    ("--from-plan p.json --export-config c.toml", "cannot be used together"),
    ("--hardware /dev/null x", "not JSON"),
    ("--hardware a --hardware-root b x", "cannot be used together"),
    ("--host a --host-file b x", "cannot be used together"),
    ("--host a,,b x", "an entry is empty"),
    ("--host 'a b' x", "without blanks"),
    ("--host-file /dev/null x", "the file names no host; expected one host per line"),
    ("--host-subnet 10.0.0.0/99 --dry-run x", "--host-subnet '10.0.0.0/99': "),
    ("--env 1A=2 x", "expected NAME=VALUE"),
    ("--env NOT_SET_ANYWHERE x", "the variable is not set in the launcher's environment; give"),
    ("--env-file /no/file x", "No such file"),
    ('--mpi-global-args "\'" x', "no closing quotation"),
    ("--instance-mpi-local-args x x", "INDEX"),
    ("--instance-mpi-local-args '7:-x A' x", "expected the index of an instance, from 0 to 0"),
    ("--only-output-from-instance 1 x", "an index of an instance from 0 to 0"),
    ("--ipus-per-replica 3 x", "power of two"),
    ("--num-ilds 2 x", "--num-ilds 2"),
    ("--num-replicas 1048576 --ipus-per-replica 2 x", "2097152 IPUs: expected"),
    ("-n 3 --host a,b x", "over 2 hosts"),
    ("-n 2 --host a:1 x", "1 slot, but 2 instances are"),
    ("-n 4 --num-replicas 2 x", "0.5"),
    ("--run --dry-run x", "--run and --dry-run cannot be used together"),
    ("--run --export-plan /dev/null", "no program is given; expected"),
    ("--print-topology svg --run true", "--print-topology svg and --run"),
    ("--print-topology svg --print-hardware true", "--print-topology svg and --print-hardware"),
    ("scale train.py", "scale needs --instances with numbers of instances"),
    ("scale --instances 1,2", "scale needs a PROGRAM"),
    ("scale --instances 1,2 --", "scale needs a PROGRAM"),
    ("scale --instances 2,x train.py", "numbers of instances, such as 1,2,4 or 1-4"),
    (
        "scale --instances 1,1025 train.py",
        ("--instances 1025: 1025 instances are planned on a host with"),
    ),
    ("scale --instances 1,3 --num-replicas 4 train.py", "--instances 3: --num-replicas 4 cannot"),
    (
        "scale -n 2 --instances 1 train.py",
        ("--num-instances cannot be used with scale, because scale launches"),
    ),
    (
        "scale --dry-run --instances 1 train.py",
        ("--dry-run cannot be used with scale, because scale launches"),
    ),
    (
        "scale --live --instances 1 train.py",
        ("--live cannot be used with scale, because scale launches several jobs"),
    ),
    (
        "scale --version --instances 1 train.py",
        ("--version cannot be used with scale, because scale launches"),
    ),
    ("scale --timeline=t.json.gz --instances 1 train.py", "give --timeline without FILE"),
    ("scale --metrics-to csv:a.csv --instances 1 train.py", "each run needs a file of its own"),
    ("scale --instances 1 --repeats 0 train.py", "0 is not in the range"),
    ("scale --instances 1 --output x.png train.py", "expected a file name that ends in .html"),
    ("scale --bogus --instances 1 train.py", "unknown option --bogus"),
    ("scale --instances 1 train.py --instances", "requires an argument"),
]
# What the machine or the network lacks.
NOT_STARTED = [
    ("--mpi /bin/true --dry-run x", "expected Open MPI 4 or 5, or MPICH"),
    ("--mpi /no/such --dry-run x", "--mpi /no/such"),
    ("-n 2 --host 127.0.0.1,elsewhere --host-subnet banana --dry-run x",
     ("host 127.0.0.1 has no network banana, which --host-subnet names; the networks of the "
      "host are: ")),
    ("scale --instances 1,2 other.py", "other.py does not exist"),
]  # fmt: skip


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """Be in a folder with a program that must not run."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "train.py").write_text("open('ran', 'w')")
    return tmp_path


@pytest.mark.parametrize(
    ("words", "code", "said"),
    [
        *((words, 2, said) for words, said in REFUSED),
        *((words, 3, said) for words, said in NOT_STARTED),
    ],
)
def test_a_refused_command_says_why_in_one_line_and_starts_nothing(
    words, code, said, folder, capsys
):
    assert run(shlex.split(words)) == code
    shown = capsys.readouterr()
    assert shown.out == ""
    assert said in shown.err
    assert shown.err.count("\n") == 1
    assert [path.name for path in folder.iterdir()] == ["train.py"]
