"""The options of a launch as keywords, with the types that checkers and editors read.

Written by tools/keyword_types.py from what LaunchConfig declares; nothing is decided here.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from os import PathLike
from typing import Literal, TypeAlias, TypedDict

# What becomes a word of a command line or the value of a variable.
Word: TypeAlias = str | int | float | PathLike[str]


class LaunchOptions(TypedDict, total=False):
    """Every option that a launch from Python takes; one that is left out has its default."""

    # Job: how many instances, replicas and IPUs.

    num_instances: int
    """Instances (processes). The replicas are split evenly over them."""

    nproc_per_node: int | Literal["auto", "cpu"] | None
    """Instances on each host, instead of --num-instances; auto (or cpu): the CPUs of this machine.
    """

    num_replicas: int | None
    """Replicas of the model over all instances. Unset: as many as instances."""

    ipus_per_replica: int
    """IPUs of one replica (model parallelism); a power of two."""

    ipu_model: Literal["mk1", "mk2", "bow"] | None
    """IPU whose memory and time the models of all instances have (POPDIST_IPU): one that does not
    fit is refused. Unset: a warning if a model does not fit into an Mk2. The command poprun
    sets mk2 for programs that import poptorch.
    """

    num_ilds: int | None
    """IPU-Link domains; each gets the same number of instances and has at most 64 IPUs. Unset:
    those of the partition, else as few as hold the IPUs.
    """

    executable_cache_path: str | PathLike[str] | None
    """Folder in which compiled executables are kept, seen by every host."""

    # Hosts: where instances run.

    hosts: str | Sequence[str] | None
    """Hosts as a list, such as ["a", "b:2"], or as the text of ``host``; not together with it."""

    host: str | None
    """Hosts, separated by commas, with ranges: host[0-2,4]; name:slots limits the instances of a
    host. Unset: the Slurm allocation, else this machine.
    """

    host_file: str | PathLike[str] | None
    """File with one host a line; not together with --host."""

    host_subnet: str | None
    """Interface name or CIDR for the traffic between hosts."""

    ssh_args: str | None
    """Arguments of every ssh, such as '-p 2222 -i KEY'; no blanks in them."""

    ssh_config: str | PathLike[str] | None
    """ssh configuration file to use instead of ~/.ssh/config."""

    no_check: bool
    """Skip the short check that comes before a launch on other hosts."""

    sync: str | PathLike[str] | None
    """Copy this folder to the same path on every host first (rsync: only what changed)."""

    synchronise_python_venv: bool
    """PopRun's option to copy the virtual environment to the hosts."""

    synchronise_poplar_sdk: bool
    """PopRun's option to copy the SDK to the hosts; there is none here."""

    distribute_ssh_key: bool
    """PopRun's option to spread the ssh key to the hosts."""

    # Placement: which NUMA nodes, CPUs and threads each instance gets.

    process_placement: Literal["spreadnuma", "packnuma", "spreadcores", "spreadl3", "disabled"]
    """How a host's NUMA nodes and cores are divided among its instances."""

    numa_aware: bool | None
    """PopRun's older option: yes gives local instance i node i mod nodes, no disables placement.
    Unset: --process-placement decides.
    """

    cores_per_instance: int | None
    """Cores of each instance. Unset: an even share of the host."""

    reserve_cores: int
    """Cores of each instance kept free of compute threads, for data loading."""

    smt: bool
    """Run a compute thread on every SMT sibling, not one per core."""

    oversubscribe: bool
    """Allow more instances than CPUs on a host."""

    strict_binding: bool
    """End the launch when the kernel reports another binding than planned."""

    wait_for_resources: float | str | None
    """Wait, in order of arrival, while other jobs hold too many of this machine's cores, then
    while others have the pod's IPUs: alone as long as it takes, =TIME so long at most.
    """

    share_cores: bool
    """Run on cores that other jobs hold where too few are left, instead of refusing."""

    hardware: str | PathLike[str] | None
    """Plan for the machine saved by --print-hardware=json."""

    hardware_root: str | PathLike[str] | None
    """Plan for the machine whose sys/ and proc/ were copied to this folder."""

    # Output: what is shown while the job runs.

    only_output_from_instance: int | str | Sequence[int] | None
    """Show the output of these instances only, such as 0,2-3; an instance that fails is heard all
    the same.
    """

    output: Literal["tag", "time", "plain"]
    """Before each line PopRun's tag [1,INDEX]<stream>:, the time of day as well, or nothing."""

    output_dir: str | PathLike[str] | None
    """Folder in which every run gets one of its own, and the link latest names the newest:
    attempt-N/ with the instances' whole output and all training steps, and report.json with
    report.html.
    """

    timeline: str | PathLike[str] | None
    """Record what every instance does when into this file, for ui.perfetto.dev; auto:
    timeline.json.gz in the run's folder (--output-dir), else here.
    """

    timeline_size: int
    """What all instances together may record at most; of a long run the first and the last spans
    are kept, and some between.
    """

    live: bool
    """Keep a view of all instances below the output: what each one does, how fast, where its time
    goes, which is slow; without a terminal a line now and then.
    """

    metrics_port: int | None
    """Serve the job's numbers while it runs, for Prometheus, at http://127.0.0.1:PORT/metrics; 0:
    a free port, which is said.
    """

    metrics_to: Sequence[str]
    """Write the job's numbers for tensorboard[:DIR] (in the run's folder) or wandb[:PROJECT]; may
    be repeated.
    """

    stdin_instance: int
    """The instance that gets the launcher's standard input: the keyboard, a pipe or a file."""

    verbosity: int
    """-v logs what the launcher does, -vv everything, with the topology."""

    # Supervision: limits, signals and failures.

    timeout: float | str | None
    """End the job after this time with exit code 124."""

    grace: float | str
    """Time between asking instances to stop (SIGTERM, or SIGINT after Ctrl-C) and killing them."""

    hang_timeout: float | str | None
    """End the job with exit code 124 and all Python stacks when an instance makes no step for so
    long and nothing else moves in it, or, where none counts steps, in any; auto: 20 times the
    median step, at least 10 s; 120 s without steps. Unset: never.
    """

    max_restarts: int
    """Start a failed job again so many times, after 1, 2, 4, ... s."""

    allow_fewer_hosts: bool
    """A restart may leave out hosts that were lost."""

    # Environment: variables of the instances, and the names that they import.

    env: Mapping[str, Word] | Sequence[str]
    """NAME=VALUE sets a variable in every instance. NAME forwards the launcher's: better for
    secrets, which are then in no list of processes. Values are never shown, nor in plans.
    """

    env_file: str | PathLike[str] | None
    """File of NAME=VALUE lines, values in quotes or not; --env wins over it."""

    sdk_names: Literal["auto", "yes", "no"]
    """Whether import poptorch, popdist, horovod and popart find this emulation: auto where they
    are not installed, yes even where they are, no never.
    """

    torch_backend: Literal["auto", "gloo", "popdist"]
    """The back end of torch.distributed for a program that names gloo, popdist or none; auto: what
    it names.
    """

    # MPI: the MPI that starts the instances.

    mpi: str | PathLike[str] | None
    """mpirun (or its installation folder). Unset: beside this Python, then on PATH."""

    mpi_global_args: Sequence[str]
    """Arguments placed directly after mpirun; may be repeated."""

    mpi_local_args: Sequence[str]
    """Arguments added to every instance's part; may be repeated."""

    instance_mpi_local_args: Sequence[str]
    """INDEX:ARGS adds arguments to one instance's part; may be repeated."""

    mpi_fast_start: bool
    """On one host choose the transports that start within 0.1 s (Open MPI 5)."""

    allow_run_as_root: bool
    """Let mpirun run as root, as PopRun does."""

    # IPU hardware: the pod of emulated IPUs, and PopRun's options of its partitions.

    pod: str | PathLike[str] | None
    """The pod whose IPUs the job takes: its name, folder or http://HOST:PORT; server: the V-IPU
    server below; none. Unset: the only pod of this machine.
    """

    vipu_server_host: str | None
    """Name or address of the V-IPU server (--pod server)."""

    vipu_server_port: int
    """Port of the V-IPU server."""

    vipu_server_timeout: int
    """Time limit of requests to the V-IPU server."""

    vipu_partition: str | None
    """V-IPU partition to use; made if absent. Unset: IPUOF_VIPU_API_PARTITION_ID, the only one, or
    one for this launch.
    """

    vipu_partition_attempts: int
    """Tries to bind the partition, each of --vipu-server-timeout, until it is ACTIVE."""

    vipu_cluster: str | None
    """V-IPU cluster for a new partition; see --vipu-allocation."""

    vipu_allocation: str | None
    """V-IPU allocation for a new partition."""

    update_partition: bool
    """Change a partition that does not fit."""

    reset_partition: bool | None
    """Reset the partition first. Unset: only if not reconfigurable."""

    remove_partition: bool
    """Remove a partition that the launch made."""

    sync_type: (
        Literal[
            "ST_GS2_DEFAULT",
            "ST_GS2_INDEPENDENT_RAILS",
            "ST_POD_NATIVE_DEFAULT",
            "ST_POD_NATIVE_REPLICATED_PIPELINE",
            "c2-compatible",
            "pod-native-default",
        ]
        | None
    )
    """V-IPU sync type of a new partition."""

    offline_mode: bool
    """Neither require nor attach IPUs: no pod is asked."""
