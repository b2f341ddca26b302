"""The sections of docs/performance.md on many instances and on long runs; performance.py writes it.

Rows of benchmarks/results.json in, text out. Nothing is measured here.
"""

from __future__ import annotations

from typing import Any

from tools.pages.performance_collectives import table_line

__all__ = ["long_runs", "many_instances"]

MIB = 1 << 20
# The job that is reckoned, and what the launcher allows: mpirun_process, launcher_channel.
INSTANCES, HOSTS = 4096, 256
OWN_FILES, FILES_WITH_FOLDER = 32, 3
# Hard limits: of older distributions, and systemd's.
FEW_FILES, MANY_FILES = 4096, 524_288
CONNECT_SECONDS = 20

MANY = """
## Many instances

Jobs on this machine, most of whose instances share a core (`benchmarks/many.py`): *sleep* starts
and waits, *init* also calls `popdist_py.init()` and a barrier; mpirun's *init* imports NumPy and
mpi4py. *start*: seconds until the last instance has written a line; *end*: from when they may end
until the job has. *MB*, *files*: memory and open files besides the programs, for each instance;
*program*: MB of each program. In brackets: a bare mpirun.

| program | instances | start | end | MB | files | program |
|---|--:|--:|--:|--:|--:|--:|
"""
FEW_HOSTS = """
Jobs of one sleeping instance on each host; all these hosts share two cores. *first host*: all that
is there besides the program, CPU time with that of every ssh.

| hosts | start | first host: CPU ms | MB | open files |
|--:|--:|--:|--:|--:|
"""
PLANS = """
Planning (`--dry-run`), the whole process:

| instances | hosts | seconds | MB |
|--:|--:|--:|--:|
"""
PAPER = """
### {instances:,} instances on {hosts} hosts, on paper

512 instances on 8 hosts are started by a test; at this size only the plan is measured: what one
more instance and one more host cost at the largest sizes above, times as many. Every ssh comes from
the first host, since other hosts need no way to one another; every instance has one connection to
the launcher; and each host starts its own {per_host} instances while the others start theirs.

| on the first host | one more instance | one more host | {instances:,} on {hosts} |
|---|--:|--:|--:|
"""
PAPER_END = """
The first host's cores share {cpu:.0f} s, of which {ssh:.0f} s are ssh's: the launcher asks each
host, and mpirun starts a daemon there. Nearly all of it is the agreement on keys (sntrup761,
OpenSSH's choice since 9.0); `--ssh-args -oKexAlgorithms=curve25519-sha256` took a sixth of it here.
Hosts have 10 s to answer, and 0.1 s more for each that is asked at the same time: at most 128.

The first thing to end is the hard limit of open files: this job needs {files:,} of them, or
{all_files:,} with `--output-dir`. In the order of sizes:

| what | ends at | what to do |
|---|--:|---|
"""
NOT_KNOWN = """
What this leaves out: MPI's own exchange of addresses among {hosts} daemons, and a login service
that sees {hosts} logins twice within seconds (the launcher's question, then mpirun's). Under Slurm
there is no ssh, and `srun`'s own tree starts the daemons.
"""
LONG = """
## Long runs

{steps:,} steps of a small net on two instances, in {seconds:.0f} s (`benchmarks/long_run.py`;
`make test-soak` holds it to its bounds): what each process held in the second fifth of it, and in
the last one where that differs. The screen has {line:.0f} bytes a line, and {left} in shared
memory.

| process | own MB | shared MB | open files | threads |
|---|--:|--:|--:|--:|
"""
LONG_STEPS = """
Microseconds of a step, of the fastest tenth, beside hand-written steps of the same net in between;
end / start is what remains when the hand-written steps' own change is taken off.

| instance | start | end | hand-written, start | hand-written, end | end / start |
|--:|--:|--:|--:|--:|--:|
"""


def many_instances(found: dict[str, Any]) -> list[str]:
    """Return what one more instance costs, and what thousands would."""
    parts = [MANY]
    jobs = {(row["program"], row["way"], row["instances"]): row for row in found["jobs"]}
    for program, way, instances in jobs:
        if way != "ours":
            continue
        ours, theirs = (jobs[program, each, instances] for each in ("ours", "mpirun"))
        cells = [program, instances]
        for key, each, form in (
            ("seconds_to_last_line", 1, ".2f"),
            ("seconds_to_end", 1, ".2f"),
            ("mb", instances, ".1f"),
            ("descriptors", instances, ".0f"),
            ("program_mb", instances, ".1f"),
        ):
            cells.append(f"{ours[key] / each:{form}} ({theirs[key] / each:{form}})")
        parts.append(table_line(cells))
    if "hosts" not in found:
        return parts
    parts.append(FEW_HOSTS)
    for row in found["hosts"]:
        cells = [row["hosts"], f"{row['seconds_to_last_line']:.1f}"]
        cells += [f"{row[key]:.0f}" for key in ("cpu_ms", "mb", "descriptors")]
        parts.append(table_line(cells))
    parts.append(PLANS)
    for row in found["plans"]:
        cells = [f"{row['instances']:,}", row["hosts"], f"{row['seconds']:.2f}"]
        parts.append(table_line([*cells, f"{row['mb']:.0f}"]))
    return [*parts, *_on_paper(found)]


def _on_paper(found: dict[str, Any]) -> list[str]:
    """Return what the job of thousands would take, and where it would end."""
    slope = {(row["program"], row["of"]): row for row in found["slopes"] if row["way"] == "ours"}
    instance, host = slope["sleep", "instances"], slope["sleep", "hosts"]
    base = next(row for row in found["jobs"] if row["way"] == "ours")
    per_host = INSTANCES // HOSTS
    parts = [PAPER.format(instances=INSTANCES, hosts=HOSTS, per_host=per_host)]
    # A slope over hosts holds that of the one instance on each.
    own = {
        key: max(0.0, host[key] - instance[f"launcher_{key}"])
        for key in ("mb", "descriptors", "cpu_ms")
    }
    rows = (
        ("CPU time to start, s", "cpu_ms", 1000, ".1f"),
        ("memory, MB", "mb", 1, ".0f"),
        ("open files of all processes", "descriptors", 1, ".0f"),
    )
    for title, key, unit, form in rows:
        each = instance[f"launcher_{key}"]
        # Its own instances have wrappers beside the launcher's part.
        at_home = (instance[key] - each) * per_host
        whole = base[key] + INSTANCES * each + HOSTS * own[key] + at_home
        cells = [title, f"{each / unit:.2g}", f"{own[key] / unit:.2g}", f"{whole / unit:,{form}}"]
        parts.append(table_line(cells))
    parts.append(table_line(["ssh processes", 0, 1, f"{HOSTS - 1:,}"]))
    lines = next(row["lines_per_second"] for row in found["lines"] if row["way"] == "ours")
    share = f"{lines / INSTANCES:.0f} each"
    parts.append(table_line([f"lines of output a second, of {lines:,.0f}", "", "", share]))
    ssh = HOSTS * own["cpu_ms"] / 1000
    cpu = ssh + INSTANCES * instance["launcher_cpu_ms"] / 1000
    end = PAPER_END.format(
        **{"ssh": ssh, "cpu": cpu, "files": OWN_FILES + INSTANCES},
        all_files=OWN_FILES + FILES_WITH_FOLDER * INSTANCES,
    )
    parts += [end, *map(table_line, _limits(instance, lines))]
    return [*parts, NOT_KNOWN.format(hosts=HOSTS)]


def _limits(instance: dict[str, Any], lines: float) -> list[list[str]]:
    """Return where the launcher's tree ends, the least job first."""
    accepted = 1000 * CONNECT_SECONDS / instance["launcher_cpu_ms"]
    ends = [
        (
            (FEW_FILES - OWN_FILES) // FILES_WITH_FOLDER,
            f"a hard limit of {FEW_FILES:,} open files, with `--output-dir`; without it at "
            f"{FEW_FILES - OWN_FILES:,} instances",
            "raise it (`ulimit -Hn`); the launcher refuses to start and names the number it needs",
        ),
        (
            (MANY_FILES - OWN_FILES) // FILES_WITH_FOLDER,
            f"systemd's hard limit of {MANY_FILES:,} open files, with `--output-dir`",
            "likewise",
        ),
        (
            accepted,
            f"the launcher's CPU time for all connections is the {CONNECT_SECONDS} s that an "
            "instance waits for its own",
            "fewer, larger instances: replicas within one cost the launcher nothing",
        ),
        (
            lines,
            "every instance writes a line a second",
            "write less: lines travel to the launcher whether they are shown or not",
        ),
    ]
    return [[what, f"{at:,.0f} instances", todo] for at, what, todo in sorted(ends)]


def long_runs(found: dict[str, Any]) -> list[str]:
    """Return what a long training held and how fast it was, at its start and its end."""
    instances, left = found["instances"], len(found["left_in_shared_memory"])
    steps = instances[0]["steps"]
    head = LONG.format(
        steps=steps,
        seconds=found["seconds"],
        line=found["bytes_of_log_per_line"],
        left=f"{left} files are left" if left else "nothing is left",
    )
    parts = [head]
    for row in found["processes"]:
        cells = [row["process"]]
        for key in ("private_bytes", "shared_bytes"):
            cells.append(_change([f"{each / MIB:.1f}" for each in row[key]]))
        cells += [_change(row[key]) for key in ("descriptors", "threads")]
        parts.append(table_line(cells))
    parts.append(LONG_STEPS)
    for index, row in enumerate(instances):
        cells = [index, *(f"{each:.0f}" for each in (*row["fast_us"], *row["plain_us"]))]
        parts.append(table_line([*cells, f"{row['end/start']:.3f}"]))
    return parts


def _change(pair: list[Any]) -> str:
    start, end = pair
    return f"{start}" if start == end else f"{start} → {end}"
