"""The summary of an mpirun command has few lines, and each variable once."""

from __future__ import annotations

import shlex

from poprun_py.planning.views.command_summary import command_summary


def a_command(count):
    parts = [
        f"-np 1 -x RANK={index} -x WORLD_SIZE={count} -x PATH -host h "
        "python -I -S main.py -- python3 train.py --name 'a b' -x 1"
        for index in range(count)
    ]
    return shlex.split(f"/mpi/mpirun --bind-to none --mca btl self,sm {' : '.join(parts)}")


FIRST = "/mpi/mpirun --bind-to none --mca btl self,sm (-vv logs the whole command)"
SHARED = "WORLD_SIZE=2 PATH -host h python3 train.py --name 'a b' -x 1"


def test_shared_variables_stand_once_and_own_ones_at_their_instance():
    assert command_summary(a_command(2)).splitlines() == [
        FIRST,
        f"  every instance: -np 1 {SHARED}",
        "  instance 0: RANK=0",
        "  instance 1: RANK=1",
    ]


def test_many_instances_have_no_more_lines():
    lines = command_summary(a_command(100)).splitlines()
    assert lines[2:] == [
        *(f"  instance {n}: RANK={n}" for n in range(4)),
        "  and 96 more instances, which differ in the same options",
    ]


def test_a_command_with_one_part_is_not_split():
    command = "mpiexec -bind-to none -n 8 -env NAME -1 -genv B 2 python -I -S main.py -- x"
    assert command_summary(command.split()).splitlines() == [
        "mpiexec -bind-to none (-vv logs the whole command)",
        "  every instance: -n 8 NAME -1 B 2 x",
    ]
    assert command_summary(["mpirun", "x"]).splitlines()[0].startswith("mpirun")
