"""The command ``poprun-py-pod``, which shows and changes pods of emulated IPUs and their parts.

Exit codes: 0 done; 1 the pod refused; 2 wrong usage; 3 the pod cannot be reached or read.
"""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Sequence
from typing import NoReturn

import click

from poprun_py.command.click_errors import usage_errors
from poprun_py.command.pods.cluster_verbs import (
    create_allocation,
    create_cluster,
    remove_allocation,
    remove_cluster,
)
from poprun_py.command.pods.command_grammar import CONTEXT, ObjectGroup, VerbGroup
from poprun_py.command.pods.partition_verbs import (
    create_partition,
    fail_partition,
    remove_partition,
    reset_partition,
)
from poprun_py.command.pods.pod_access import RefusedError
from poprun_py.command.pods.pod_verbs import create_pod, get_pod, list_pods, remove_pod, serve_pod
from poprun_py.command.pods.show_verbs import GET_VERBS, LIST_VERBS
from poprun_py.terminal import (
    UnwritableError,
    command_name,
    exit_code_of,
    exit_with,
    flush_stdout,
    prepare_streams,
    print_error,
    print_out,
)
from poprun_py.versions import version_text

_HELP = """Make, show, reset and remove partitions of a pod of emulated IPUs.

Commands have V-IPU's form: VERB OBJECT [NAME] [OPTIONS]. Objects may be singular or plural.
A pod consists of agents (IPU-Machines attached to hosts), which are joined into clusters. Users
make partitions of the agents in an allocation, and jobs run on partitions. VERB OBJECT --help
describes each command.

\b
Examples:
  poprun-py-pod create pod lab --type POD64
  poprun-py-pod create partition p16 --size 16 --reconfigurable --wait 60
  poprun-py-pod list partitions
  poprun-py-pod list devices
  poprun-py-pod get partition p16 --showjson
  poprun-py --vipu-partition p16 -n 4 --num-replicas 16 train.py
  poprun-py-pod remove partition p16

Exit codes: 0 done, 1 refused, 2 usage, 3 the pod cannot be reached or read.
"""


def _verb(name: str, text: str, *objects: click.Command) -> ObjectGroup:
    commands = {str(each.name): each for each in objects}
    return ObjectGroup(
        name,
        help=text,
        commands=commands,
        context_settings=CONTEXT,
        options_metavar="",
        subcommand_metavar="OBJECT [NAME] [OPTIONS]",
    )


def _show_version(context: click.Context, _: click.Parameter, value: bool) -> None:
    if value and not context.resilient_parsing:
        print_out(version_text("text"))
        context.exit()


COMMAND = VerbGroup(
    "poprun-py-pod",
    help=_HELP,
    context_settings=CONTEXT,
    subcommand_metavar="VERB OBJECT [NAME] [OPTIONS]",
    params=[
        click.Option(
            ["--version"],
            is_flag=True,
            is_eager=True,
            expose_value=False,
            callback=_show_version,
            help="Show the version.",
        )
    ],
    commands={
        "create": _verb(
            "create", "Make a partition, an allocation, a cluster, or a pod.",
            *(create_partition, create_allocation, create_cluster, create_pod),
        ),
        "list": _verb("list", "List all objects of a kind, one line each.", *LIST_VERBS, list_pods),
        "get": _verb("get", "Show one object in detail.", *GET_VERBS, get_pod),
        "reset": _verb("reset", "Bring a partition into its initial state.", reset_partition),
        "fail": _verb(
            "fail", "Put a partition into the state ERROR, as broken hardware would.",
            fail_partition,
        ),
        "remove": _verb(
            "remove", "Remove a partition, an allocation, a cluster, or a pod.",
            *(remove_partition, remove_allocation, remove_cluster, remove_pod),
        ),
        "serve": serve_pod,
    },
)  # fmt: skip


def main() -> NoReturn:
    """Run ``poprun-py-pod`` with the arguments of this process and exit with its exit code."""
    name = command_name()
    if f"_{name.replace('-', '_').upper()}_COMPLETE" in os.environ:
        COMMAND.main(prog_name=name)
    prepare_streams()
    exit_with(run(sys.argv[1:]))


def run(words: Sequence[str]) -> int:
    """Run ``poprun-py-pod`` with the arguments ``words`` and return its exit code."""
    return exit_code_of(lambda: _run(words))


def _run(words: Sequence[str]) -> int:
    try:
        with usage_errors():
            code = COMMAND.main(list(words), prog_name=command_name(), standalone_mode=False)
        return code if isinstance(code, int) else 0
    except RefusedError as error:
        # A refusal is printed in V-IPU's form, without poprun-py's prefix for errors, because
        # scripts search the output for V-IPU's line.
        with contextlib.suppress(UnwritableError):
            flush_stdout()
        print_error(" ".join(str(error).split()))
        return error.exit_code


if __name__ == "__main__":
    main()
