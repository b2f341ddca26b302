"""Folded commands, which have a line for each option and the same words for every shell."""

from __future__ import annotations

import shlex
import subprocess

import pytest
from hypothesis import given
from hypothesis import strategies as st

from poprun_py import LaunchConfig
from poprun_py.options.command_line import parse
from poprun_py.options.option_origins import from_python
from poprun_py.planning.views.command_text import folded, launch_command

COMMAND = shlex.split(
    "/mpi/bin/mpirun --bind-to none --allow-run-as-root --prtemca plm_slurm_args --overlap "
    "-np 1 -x RANK=0 -x PATH python -I -S main.py -- python3 train.py -n 1 "
    ": -np 1 -x RANK=1 python -I -S main.py -- python3 train.py -n 1"
)


def test_each_option_has_a_line_and_each_part_a_block():
    command = [*COMMAND[:-1], "a b"]
    assert folded(command).split(" \\\n") == [
        "/mpi/bin/mpirun",
        "  --bind-to none",
        "  --allow-run-as-root",
        "  --prtemca plm_slurm_args --overlap",
        "  -np 1",
        "    -x RANK=0",
        "    -x PATH",
        "    python -I -S main.py --",
        "    python3 train.py -n 1",
        "  : -np 1",
        "    -x RANK=1",
        "    python -I -S main.py --",
        "    python3 train.py -n 'a b'",
    ]


def test_mpich_commands_are_folded():
    words = "mpiexec -bind-to none -n 2 -env NAME -1 -envlist A,B python -I -S main.py -- x"
    assert folded(words.split()).split(" \\\n")[2:] == [
        "  -n 2", "    -env NAME -1", "    -envlist A,B", "    python -I -S main.py --", "    x",
    ]  # fmt: skip


WORDS = st.one_of(
    st.text(st.characters(blacklist_characters="\0", blacklist_categories=["Cs"]), max_size=12),
    st.sampled_from(["-x", "-np", "--mca", "--", "-I", "-S", "\\", "\\\n", "$HOME", "'", "a=b c"]),
)


@given(st.lists(WORDS, min_size=1, max_size=20), st.booleans())
def test_shlex_reads_the_same_words(words, in_a_command):
    # shlex returns a line end after a backslash as a word; a shell does not.
    words = [word for word in words if word not in ("\n", ":")] or ["x"]
    words = [*COMMAND, *words] if in_a_command else words
    back = shlex.split(folded(words))
    assert [word for word in back if word != "\n"] == words


def test_bash_reads_the_same_words():
    odd = [
        "",
        "two words",
        "line\nend",
        "back\\\nslash",
        "$HOME",
        "`x`",
        "it's",
        '"q"',
        "*",
        "~",
        "#",
    ]
    words = ["printf", "%s\\0", *COMMAND[1:], *odd, ":", "-np", *odd]
    done = subprocess.run(["bash", "-c", folded(words)], capture_output=True, text=True, check=True)
    assert done.stdout.split("\0")[:-1] == words[2:]


@pytest.mark.parametrize(
    "fields",
    [
        {},
        {"num_instances": 4, "num_replicas": 8, "program": ("python3", "a b.py", "--n", "1")},
        {"host": "n[0-3]", "num_instances": 4, "numa_aware": False, "smt": True},
        {"oversubscribe": True, "allow_run_as_root": False, "verbosity": 2},
        {"timeout": 5400.5, "grace": 3, "hang_timeout": "auto"},
        {"num_instances": 8, "only_output_from_instance": (0, 2, 3, 4)},
        {"mpi_global_args": ("--tag-output", "--timeout"), "ssh_args": "-p 2222"},
        {"num_instances": 2, "instance_mpi_local_args": ("1:-x A=1", "0:-x B")},
        {"program": ("-m", "package.module")},
    ],
)
def test_the_launch_command_gives_the_same_options(fields):
    config = LaunchConfig(**fields)
    words = shlex.split(launch_command(config).replace("\\\n", ""))[1:]
    values = parse(words)
    assert values.pop("program") == (config.program or ("PROGRAM",))
    assert LaunchConfig(program=config.program, **values) == config


def test_a_long_launch_has_a_line_for_each_option_and_no_values_of_env():
    config = LaunchConfig(
        num_instances=2, env=("TOKEN=hush", "HOME"), process_placement="packnuma",
        program=("sh", "-c", "exit 1"),
    )  # fmt: skip
    assert launch_command(config).split(" \\\n") == [
        "poprun-py",
        "  --num-instances 2",
        "  --process-placement packnuma",
        "  --env TOKEN",
        "  --env HOME",
        "  sh -c 'exit 1'",
    ]


def test_all_instances_are_written_as_all():
    name = "only_output_from_instance"
    config = LaunchConfig(origins={name: from_python(name)})
    assert launch_command(config) == "poprun-py --only-output-from-instance all PROGRAM"
