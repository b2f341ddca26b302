"""The command ``poprun-py-pod``, which shows and changes pods of emulated IPUs and their parts.

Exit codes: 0 done; 1 the pod refused the request; 2 wrong usage; 3 the pod cannot be reached or
read.
"""

from __future__ import annotations

import contextlib
import os
from typing import Any, NoReturn

import click

from poprun_py.command.click_commands import CONTEXT, run_process, version_option
from poprun_py.command.pods.command_grammar import ObjectGroup, VerbGroup
from poprun_py.command.pods.partition_verbs import (
    create_partition,
    fail_partition,
    remove_partition,
    reset_partition,
)
from poprun_py.command.pods.pod_access import RefusedError
from poprun_py.command.pods.pod_verbs import (
    create_allocation,
    create_cluster,
    create_pod,
    remove_allocation,
    remove_cluster,
    remove_pod,
    serve_pod,
)
from poprun_py.command.pods.show_verbs import GET_VERBS, LIST_VERBS
from poprun_py.errors import UnwritableError
from poprun_py.terminal import command_name, flush_stdout, print_error

_HELP = """Make, show, reset and remove partitions of a pod of emulated IPUs.

Commands have the form of V-IPU's commands: VERB OBJECT [NAME] [OPTIONS]. The OBJECT may be
singular or plural, such as partition or partitions. A pod consists of agents, which are
IPU-Machines attached to hosts. A cluster is a set of agents. An allocation is a set of agents of
one cluster. Users make partitions from the IPUs of an allocation, and each job runs on one
partition. Type poprun-py-pod VERB OBJECT --help for a description of the command
VERB OBJECT.

\b
Examples:
  poprun-py-pod create pod lab --type POD64
  poprun-py-pod create partition p16 --size 16 --reconfigurable --wait 60
  poprun-py-pod list partitions
  poprun-py-pod list devices
  poprun-py-pod get partition p16 --showjson
  poprun-py --vipu-partition p16 -n 4 --num-replicas 16 train.py
  poprun-py-pod remove partition p16

Exit codes: 0 if the command succeeded, 1 if the pod refused the request, 2 for wrong usage, and 3
if the pod cannot be reached or read.
"""


class _PodCommand(VerbGroup):
    def invoke(self, ctx: click.Context) -> Any:
        try:
            return super().invoke(ctx)
        except RefusedError as error:
            # A refusal is printed in V-IPU's form, without poprun-py's prefix for errors, because
            # scripts search the output for V-IPU's line.
            with contextlib.suppress(UnwritableError):
                flush_stdout()
            print_error(" ".join(str(error).split()))
            return error.exit_code


_VERBS: tuple[click.Command, ...] = (
    ObjectGroup(
        "create", "Make a partition, an allocation, a cluster, or a pod.",
        *(create_partition, create_allocation, create_cluster, create_pod),
    ),
    ObjectGroup("list", "List all objects of one kind, such as all partitions.", *LIST_VERBS),
    ObjectGroup("get", "Show one object in detail.", *GET_VERBS),
    ObjectGroup("reset", "Reset a partition to its initial state.", reset_partition),
    ObjectGroup(
        "fail", "Put a partition into the state ERROR, as broken hardware would.", fail_partition
    ),
    ObjectGroup(
        "remove", "Remove a partition, an allocation, a cluster, or a pod.",
        *(remove_partition, remove_allocation, remove_cluster, remove_pod),
    ),
    serve_pod,
)  # fmt: skip
COMMAND = version_option("--version")(
    _PodCommand(
        "poprun-py-pod",
        help=_HELP,
        context_settings=CONTEXT,
        subcommand_metavar="VERB OBJECT [NAME] [OPTIONS]",
        commands=_VERBS,
    )
)


def main() -> NoReturn:
    """Run ``poprun-py-pod`` with this process's arguments; exit with the command's exit code."""
    name = command_name()
    if f"_{name.replace('-', '_').upper()}_COMPLETE" in os.environ:
        COMMAND.main(prog_name=name)
    run_process(COMMAND)


if __name__ == "__main__":
    main()
