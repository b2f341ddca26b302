"""The reference, from the declarations of options and commands.

That is docs/options/, docs/commands.md and docs/environment-variables.md.

"""

from __future__ import annotations

from pathlib import Path

from poprun_py.options.declared_options import GROUPS, OPTION_VARIABLES, OPTIONS
from poprun_py.options.help_pages import default_text
from poprun_py.options.option_types import FLAG, Option, option_name
from tools.pages.website.commands import FILES, LAUNCHER, Described, described, shared_options
from tools.pages.website.variables import VARIABLES

ROOT = Path(__file__).resolve().parents[2]

INDEX = """# Options of poprun-py

Write an option as `--option VALUE` or `--option=VALUE`, with hyphens or underscores. A unique
prefix of its name is accepted. A `yes|no` value may also be `on`, `off`, `true`, `false`, `1` or
`0`. A `TIME` is a number of seconds, or a text such as `90s`, `5m`, `1h30m` or `2d`. `INDICES` are
`1`, `0,2-3` or `all`.

Options end at the program, and all words after the program belong to it. A program whose name ends
in `.py` runs under the Python of `poprun-py`. So does `-m MODULE`, as with `python -m`. `-np` and
`--np` mean `-n`, as in mpirun.

`poprun-py --help` shows the most used options. `--help GROUP`, `--help OPTION` and `--help all`
show the others. If an option has no effect, a warning says why.

| group | contents |
|---|---|
"""

PLACES = """
## Places of options

| place | the same option | takes precedence over |
|---|---|---|
| command line | `--num-instances 2` | all other places |
| variable | `POPRUN_NUM_INSTANCES=2` | files |
| file of `--import-config` | `num-instances = 2` (JSON: `"num_instances": 2`) | pyproject.toml |
| pyproject.toml | `num-instances = 2` in the table `[tool.poprun-py]` | defaults |

Options are merged one by one. A list, such as `env`, is replaced as a whole. Of two options that
exclude each other, the option of the stronger place is used. Error messages name a value as it was
given: `num-replicas = 8 in pyproject.toml`.

- **Variables.** An empty variable counts as not set. The variable of a repeatable option has one
  value per line. `POPRUN_LOG_LEVEL` (`TRACE`, `DEBUG`, `INFO`, `WARN`, ...) has the same effect as
  `-vv`, `-v` or nothing. An unknown `POPRUN_` variable gives a warning. Instances do not get these
  variables, since a launcher that an instance starts would read them. An exception is
  `POPRUN_LEASES`, the folder in which jobs keep
  [their leases of cores](../placement.md#jobs-side-by-side), or `none`.
- **pyproject.toml.** The launcher uses the nearest file that has the table, from the working folder
  upward to the top of the repository (the folder with `.git`). Paths in the file are relative to
  it. A file in a folder above is not read if another user may have put it there, as in /tmp.
- `--import-config none` reads no file, not even pyproject.toml.
- `--export-config` writes the place of each value: as a comment in TOML, under `sources` in JSON.
- `-v` logs the files and variables that gave options. `--help`, `--version` and `--stacks` do not
  read them. With `--from-plan`, only options that the plan has not decided are read.
"""

INSTANCES_GET = """
## What instances get besides

- On other hosts, the launcher's settings of our libraries: every variable that begins with
  `POPDIST_`, `POPTORCH_` or `POPLAR_`. They travel over the launcher's own connection and stand on
  no command line; `--env` and `-x` win over them. `PATH`, `LD_LIBRARY_PATH` and `PYTHONPATH` are
  forwarded as PopRun does. Nothing else travels by itself but thread variables that you set
  (`OMP_NUM_THREADS`, `MKL_NUM_THREADS`, ...); else `OMP_NUM_THREADS` is planned for each host's
  CPUs.
- `POPDIST_SDK_NAMES`, which is `--sdk-names`, and for it a folder of `poprun-py` first on
  `PYTHONPATH`: [programs of the SDK](../port-poptorch.md).
- `POPDIST_TORCH_BACKEND`, which is `--torch-backend`, read where torch is imported:
  [torch.distributed](../torch-backend.md).
- What torchrun sets, for scripts written for it: `RANK`, `WORLD_SIZE`, `LOCAL_RANK`,
  `LOCAL_WORLD_SIZE`, `GROUP_RANK` (also as `NODE_RANK`: the index of the host), `GROUP_WORLD_SIZE`
  (the hosts), `ROLE_NAME`, `ROLE_RANK`, `ROLE_WORLD_SIZE`, `MASTER_ADDR`, `MASTER_PORT`,
  `TORCHELASTIC_RUN_ID`, `TORCHELASTIC_RESTART_COUNT`, `TORCHELASTIC_MAX_RESTARTS`,
  `TORCHELASTIC_USE_AGENT_STORE` (`False`: instance 0 opens the store) and
  `TORCH_NCCL_ASYNC_ERROR_HANDLING`. Not `TORCHELASTIC_ERROR_FILE`: failures are reported with their
  traceback anyway.
- `ACCELERATE_USE_CPU=true` in jobs of several instances, on hosts without GPUs, unless the user
  sets it: Accelerate and the Trainer of Transformers else train a model of its own in every
  instance, in silence.
- `GOMP_SPINCOUNT=30000` in every Python, unless the user sets it or `OMP_WAIT_POLICY`:
  [waiting threads](../emulation.md#threads-that-wait) sleep after about a millisecond. Instances on
  other hosts get the user's value too.
"""

PODS = """
What a job does with which partition, and how pods are made and served: [Pods](../pods.md).
"""

LEASES = """
Cores are leased from other jobs: [Jobs side by side](../placement.md#jobs-side-by-side). IPUs are
shared by [pods](../pods.md).
"""

# What the declarations do not say, by page.
_BELOW = {
    "Configuration": PLACES,
    "Environment": INSTANCES_GET,
    "IPU hardware": PODS,
    "Placement": LEASES,
}


COMMANDS = """# Commands

`poprun-py` itself starts programs: [its options](options/index.md). The commands here look at runs
and devices, and make partitions; each has this text as its `--help` and in its manual (`man
poprun-py`, `man poprun-py-pod`, `man gc-info`, `man gc-monitor`).
"""

ENVIRONMENT = """# Environment variables

What can be set from outside. Each option of the launcher that may stand in a file has a variable
too: they are listed at the end; [configuration](options/configuration.md#places-of-options) tells
which place of options wins. What instances get from the launcher:
[environment](options/environment.md).
"""


def pages() -> dict[str, str]:
    """Return every page of docs/options/ by file name: an index, and one for each group."""
    index = [INDEX]
    made = {}
    for group, purpose in GROUPS.items():
        name = _file(group)
        index.append(f"| [{group}]({name}) | {purpose} |\n")
        rows = [_row(field, opt) for field, opt in OPTIONS.items() if opt.group == group]
        made[name] = (
            f"# {group}\n\n{purpose[0].upper()}{purpose[1:]}. [All groups](index.md).\n\n"
            "| option | default | meaning |\n|---|---|---|\n"
            + "".join([*rows, _BELOW.get(group, "")])
        )
    return {"index.md": "".join(index), **made}


def pages_beside() -> dict[str, str]:
    """Return the pages of docs/ itself: the commands, and the variables."""
    return {"commands.md": _commands(), "environment-variables.md": _variables()}


def _commands() -> str:
    made = [COMMANDS]
    for name, command in {**LAUNCHER, **FILES}.items():
        each, *below = described(name, command)
        made += [f"\n## {name}\n", *_told(each)]
        shared = shared_options(below)
        if shared:
            made += ["\nOptions of all its commands:\n", _table(shared)]
        for one in below:
            made += [f"\n### {one.name}\n", *_told(one, shared)]
    return "".join(made)


def _told(each: Described, shared: tuple[tuple[str, str], ...] = ()) -> list[str]:
    made = [f"\n```text\n{each.usage}\n```\n"]
    for paragraph in each.paragraphs:
        text = f"```text\n{paragraph.text}\n```" if paragraph.is_kept else _plain(paragraph.text)
        made.append(f"\n{text}\n")
    own = tuple(option for option in each.options if option not in shared)
    return [*made, _table(own)] if own else made


def _table(rows: tuple[tuple[str, str], ...]) -> str:
    lines = [f"| `{_cell(names)}` | {_plain(_cell(text))} |\n" for names, text in rows]
    return "".join(["\n| option | meaning |\n|---|---|\n", *lines])


_FROM_PYTHON = """\
The command reads all of these variables. Jobs of [Python](python.md#several-jobs-threads) read
`POPRUN_POD`, `POPRUN_SHARE_CORES` and `POPRUN_WAIT_FOR_RESOURCES` only.
"""


def _variables() -> str:
    made = [ENVIRONMENT]
    for place, variables in VARIABLES.items():
        rows = "".join(f"| `{name}` | {meaning} |\n" for name, meaning in variables.items())
        made.append(f"\n## {place}\n\n| variable | meaning |\n|---|---|\n{rows}")
    rows = "".join(
        f"| `{name}` | [`{option_name(field)}`](options/{_file(OPTIONS[field].group)}) |\n"
        for name, field in sorted(OPTION_VARIABLES.items())
    )
    made.append(
        f"\n## Options of the launcher\n\n{_FROM_PYTHON}\n| variable | option |\n|---|---|\n{rows}"
    )
    return "".join(made)


def _cell(text: str) -> str:
    return text.replace("|", "\\|")


def _plain(text: str) -> str:
    """Return text in which Markdown finds no markup."""
    return text.replace("*", "\\*").replace("<", "\\<")


def _file(group: str) -> str:
    return f"{group.lower().replace(' ', '-')}.md"


def _row(field: str, opt: Option) -> str:
    if field == "verbosity":
        return f"| `-v`, `-vv`, `--verbose`, `--vv` |  | {opt.help} |\n"
    metavar = opt.type.metavar.replace("|", "\\|")
    value = f"[={metavar}]" if opt.implied else "" if opt.type is FLAG else f" {metavar}"
    spelled = f"`{opt.short}`, " if opt.short else ""
    default = default_text(opt)
    repeat = " May be repeated." if opt.repeatable and "repeated" not in opt.help else ""
    return f"| {spelled}`{option_name(field)}{value}` | {default} | {opt.help}{repeat} |\n"


def files() -> dict[Path, str]:
    """Return every page of the reference by its file."""
    docs = ROOT / "docs"
    return {
        **{docs / "options" / name: text for name, text in pages().items()},
        **{docs / name: text for name, text in pages_beside().items()},
    }
