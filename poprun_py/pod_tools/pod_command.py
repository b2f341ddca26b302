"""The command ``poprun-py-pod``: its verbs, and words -> exit code.

0 done; 1 the pod refused; 2 usage; 3 the pod cannot be reached or read.
"""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Sequence
from typing import NoReturn

import click

from poprun_py.console import command_name
from poprun_py.errors import UsageError, nearest
from poprun_py.pod_tools import cluster_verbs, partition_verbs, pod_verbs
from poprun_py.pod_tools.command_grammar import CONTEXT, Objects, Verbs
from poprun_py.pod_tools.pod_access import RefusedError
from poprun_py.terminal import (
    UnwritableError,
    exit_code_of,
    exit_with,
    flush_stdout,
    prepare_streams,
    print_error,
    print_out,
)
from poprun_py.versions import version_text

_HELP = """Make, show, reset and remove partitions of a pod of emulated IPUs.

The grammar is that of V-IPU: VERB OBJECT [NAME] [OPTIONS]; objects may be singular or plural. A pod
has agents (IPU-Machines, on hosts) that clusters join; allocations let users have partitions of
them, which jobs run on. Every VERB OBJECT has a --help of its own.

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


def _verb(name: str, text: str, *objects: click.Command) -> Objects:
    commands = {str(each.name): each for each in objects}
    return Objects(
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


COMMAND = Verbs(
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
            *(partition_verbs.CREATE, cluster_verbs.CREATE_ALLOCATION),
            cluster_verbs.CREATE_CLUSTER,
            pod_verbs.CREATE,
        ),
        "list": _verb(
            "list", "List what there is, one line each.",
            *(partition_verbs.LIST, cluster_verbs.LIST_DEVICES, cluster_verbs.LIST_ALLOCATIONS),
            *(cluster_verbs.LIST_CLUSTERS, cluster_verbs.LIST_AGENTS),
            *(cluster_verbs.LIST_ATTRIBUTES, pod_verbs.LIST),
        ),
        "get": _verb(
            "get", "Show one object in detail.",
            *(partition_verbs.GET, cluster_verbs.GET_ALLOCATION, cluster_verbs.GET_CLUSTER),
            *(cluster_verbs.GET_AGENT, cluster_verbs.GET_ATTRIBUTES, pod_verbs.GET),
        ),
        "reset": _verb("reset", "Bring a partition into its initial state.", partition_verbs.RESET),
        "fail": _verb(
            "fail", "Let a partition fail, as broken hardware would.", partition_verbs.FAIL
        ),
        "remove": _verb(
            "remove", "Remove a partition, an allocation, a cluster, or a pod.",
            *(partition_verbs.REMOVE, cluster_verbs.REMOVE_ALLOCATION),
            cluster_verbs.REMOVE_CLUSTER,
            pod_verbs.REMOVE,
        ),
        "serve": pod_verbs.SERVE,
    },
)  # fmt: skip


def main() -> NoReturn:
    """Run the command line of this process and exit with its code."""
    name = command_name()
    if f"_{name.replace('-', '_').upper()}_COMPLETE" in os.environ:
        COMMAND.main(prog_name=name)
    prepare_streams()
    exit_with(run(sys.argv[1:]))


def run(words: Sequence[str]) -> int:
    """Do what ``words`` ask for and return the exit code."""
    return exit_code_of(lambda: _answer_or_refusal(words))


def _answer_or_refusal(words: Sequence[str]) -> int:
    try:
        return _answer(words)
    except RefusedError as error:
        # V-IPU's line, which scripts look for, without a prefix of ours.
        with contextlib.suppress(UnwritableError):
            flush_stdout()
        print_error(" ".join(str(error).split()))
        return error.exit_code


def _answer(words: Sequence[str]) -> int:
    """Do what ``words`` ask for; what click does not accept is a usage error of ours.

    Raises:
        LaunchError: it was refused, or not understood.
    """
    try:
        code = COMMAND.main(list(words), prog_name=command_name(), standalone_mode=False)
    except click.NoSuchOption as error:
        params = error.ctx.command.get_params(error.ctx) if error.ctx else []
        names = (name for param in params for name in param.opts if name.startswith("--"))
        hint = nearest(error.option_name, names)
        raise UsageError(
            f"unknown option {error.option_name}{hint or f'; {_help_of(error.ctx)} lists all'}"
        ) from None
    except click.UsageError as error:
        said = error.format_message().rstrip(".")
        raise UsageError(f"{said}; {_help_of(error.ctx)} tells what is accepted") from None
    except click.ClickException as error:
        raise UsageError(error.format_message()) from None
    except click.Abort:
        raise KeyboardInterrupt from None
    return code if isinstance(code, int) else 0


def _help_of(context: click.Context | None) -> str:
    return f"{context.command_path if context else command_name()} --help"


if __name__ == "__main__":
    main()
