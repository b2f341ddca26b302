"""Declarations of all options of a launch.

The command line, environment variables, configuration files, keyword arguments of Python, help
texts, shell completion and reference pages are made from these declarations.
"""

from __future__ import annotations

from dataclasses import dataclass, field, fields
from functools import partial
from typing import Any

from popdist_py.environment import TIMELINE_MIB, TORCH_BACKENDS
from poprun_py.options.byte_sizes import SIZE
from poprun_py.options.option_types import (
    AUTO,
    AUTO_YES_NO,
    COUNT_OR_AUTO,
    FILE_OR_AUTO,
    FLAG,
    FOREVER,
    INDICES,
    JOB,
    LINE_PREFIX,
    MAX_INSTANCES,
    METRICS_DESTINATION,
    NAME,
    PATH,
    POD,
    TEXT,
    TIME,
    TIME_OR_AUTO,
    TIME_OR_FOREVER,
    TOPOLOGY_FORM,
    YES_NO,
    Option,
    OptionType,
    choice,
    whole_number,
)
from poprun_py.options.run_labels import NOTE, RUN_NAME, TAG

GROUPS = {
    "Job": "number of instances, replicas and IPUs",
    "Hosts": "hosts on which the instances run",
    "Placement": "NUMA nodes, CPUs and threads of each instance",
    "Inspection": "views of plans, machines and running jobs, mostly without a program",
    "Output": "output, records and metrics of the running job",
    "Supervision": "time limits, signals and failures",
    "Environment": "variables of the instances, and packages that they import",
    "MPI": "the MPI implementation that starts the instances",
    "Configuration": "files with options, and the other sources of options",
    "IPU hardware": "the pod of emulated IPUs, and PopRun's options for partitions",
}

# Pairs of options that exclude each other.
EXCLUSIVE = (
    ("host", "host_file"),
    ("hardware", "hardware_root"),
    ("num_instances", "nproc_per_node"),
    ("run", "dry_run"),
    ("wait_for_resources", "share_cores"),
)

# Options that concern a single launch. Saved plans do not contain these options, but configuration
# files may contain them.
OF_THIS_LAUNCH = ("verbosity", "wait_for_resources", "share_cores", "run_name", "tag", "note")

# The maximum number of IPUs of a job. A larger number of IPUs is a typing error, because no IPU
# system has so many IPUs. A plan lists every IPU, and would become too long with more IPUs.
MAX_IPUS = 1_048_576


def _option(group: str, default: Any, type: OptionType, help: str, **properties: Any) -> Any:
    """Return a dataclass field that declares an option; ``properties`` go to ``Option``."""
    declared = Option(group=group, default=default, type=type, help=help, **properties)
    return field(default=default, metadata={"option": declared})


_job = partial(_option, "Job")
_hosts = partial(_option, "Hosts")
_placement = partial(_option, "Placement")
_inspection = partial(_option, "Inspection")
_output = partial(_option, "Output")
_supervision = partial(_option, "Supervision")
_environment = partial(_option, "Environment")
_mpi = partial(_option, "MPI")
_configuration = partial(_option, "Configuration")
_ipu = partial(_option, "IPU hardware")


# The declarations are formatted by hand: the first line of each has the name, the default and the
# type of the option, and the lines below have the help and other properties.
# fmt: off
# LaunchConfig generates its own methods. To generate them here too would delay every launch.
@dataclass(frozen=True, kw_only=True, slots=True, init=False, repr=False, eq=False)
class DeclaredOptions:
    """A dataclass with a field for each option; the field's metadata contains its ``Option``."""

    num_instances: int = _job(1, whole_number(1, maximum=MAX_INSTANCES),
        "Number of instances (processes). The replicas are split evenly over the instances.",
        short="-n")
    nproc_per_node: int | str | None = _job(None, COUNT_OR_AUTO,
        "Number of instances on each host, instead of --num-instances. auto (or cpu): one per"
        " CPU of this machine.")
    num_replicas: int = _job(None, whole_number(1, maximum=MAX_IPUS),
        "Number of replicas of the model in all instances together. Unset: one per instance.")
    ipus_per_replica: int = _job(1, whole_number(1, maximum=4_096),
        "Number of IPUs of each replica (model parallelism); a power of two.")
    ipu_model: str | None = _job(None, choice("mk1", "mk2", "bow"),
        "IPU type that sets the memory size and the speed that all models assume (POPDIST_IPU). A"
        " model that does not fit is rejected. Unset: a model that does not fit into an Mk2 causes"
        " a warning. The command poprun sets mk2 for programs that import poptorch.")
    num_ilds: int | None = _job(None, whole_number(1),
        "Number of IPU-Link domains. Each gets the same number of instances and has at most 64"
        " IPUs. Unset: as many as the partition has, else as few as possible.")
    executable_cache_path: str | None = _job(None, PATH,
        "Folder for compiled executables; every host must be able to access it.")

    host: str | None = _hosts(None, TEXT,
        "Hosts, separated by commas. host[0-2,4] is a range. NAME:SLOTS limits the number of"
        " instances of a host. Unset: the hosts of the Slurm allocation, else this machine.",
        short="-H")
    host_file: str | None = _hosts(None, PATH,
        "File with one host per line; cannot be combined with --host.")
    host_subnet: str | None = _hosts(None, TEXT,
        "Network interface, or subnet in CIDR notation, for the traffic between hosts.")
    ssh_args: str | None = _hosts(None, TEXT,
        "Arguments of every ssh command, separated by blanks, such as '-p 2222 -i KEY'. A single"
        " argument must not contain a blank.")
    ssh_config: str | None = _hosts(None, PATH,
        "ssh configuration file to use instead of ~/.ssh/config.")
    check: bool = _hosts(False, FLAG,
        "Check every host and exit without a launch. A table shows a fix for each problem.",
        saved=False)
    no_check: bool = _hosts(False, FLAG,
        "Skip the short check before a launch on other hosts.")
    sync: str | None = _hosts(None, PATH,
        "Before the launch, copy this folder to the same path on every host (with rsync, which"
        " transfers only the changes).")
    synchronise_python_venv: bool = _hosts(False, YES_NO,
        "Copy the virtual environment to the hosts before the launch, as PopRun does.")
    synchronise_poplar_sdk: bool = _hosts(False, YES_NO,
        "An option of PopRun without effect: there is no Poplar SDK to copy to the hosts.")
    distribute_ssh_key: bool = _hosts(False, YES_NO,
        "An option of PopRun without effect: ssh keys are not copied to the hosts.")

    process_placement: str = _placement(
        "spreadnuma", choice("spreadnuma", "packnuma", "spreadcores", "spreadl3", "disabled"),
        "How a host's NUMA nodes and cores are divided among its instances.")
    numa_aware: bool | None = _placement(None, YES_NO,
        "An older option of PopRun. yes: instance i of a host gets NUMA node i mod nodes. no:"
        " instances are not placed. Unset: --process-placement decides.")
    cores_per_instance: int | None = _placement(None, whole_number(1),
        "Number of cores of each instance. Unset: an even share of the host's cores.")
    reserve_cores: int = _placement(0, whole_number(0),
        "Number of cores of each instance that compute threads leave free for data loading.")
    smt: bool = _placement(False, YES_NO,
        "Run one compute thread per hardware thread (SMT) instead of one per core.")
    oversubscribe: bool = _placement(False, FLAG,
        "Allow more instances than CPUs on a host.")
    strict_binding: bool = _placement(False, FLAG,
        "End the launch if the kernel reports a binding that differs from the plan.")
    wait_for_resources: float | str | None = _placement(None, TIME_OR_FOREVER,
        "Wait if other jobs hold too many of this machine's cores or of the pod's IPUs. Jobs are"
        " served in order of arrival. =TIME limits the wait; without =TIME, it has no limit.",
        implied=FOREVER)
    share_cores: str = _placement(AUTO, AUTO_YES_NO,
        "Whether to share cores if other jobs hold too many. yes: share. no: do not start. auto:"
        " share, unless --cores-per-instance or --reserve-cores asks for cores.")
    hardware: str | None = _placement(None, PATH,
        "Make the plan for another machine, described in this file by --print-hardware=json.")
    hardware_root: str | None = _placement(None, PATH,
        "Plan for the machine whose sys/ and proc/ were copied to this folder.")

    print_topology: str = _inspection("no", TOPOLOGY_FORM,
        "Print where each instance runs. yes: PopRun's table. tree: NUMA nodes and CPUs. Other"
        " forms: a picture of the cores, or JSON. svg and html print a file, and start nothing.",
        saved=False)
    print_hardware: str | None = _inspection(None, choice("table", "json"),
        "Print the processors and the memory of the hosts. Without a program, exit afterwards.",
        implied="table", saved=False)
    print_leases: str | None = _inspection(None, choice("table", "json"),
        "Print which jobs hold CPUs of this machine, and which jobs wait for CPUs, for all users."
        " Then exit.", implied="table", saved=False)
    stacks: str | None = _inspection(None, JOB,
        "Print the Python stacks of every instance of a running job and exit; the job keeps"
        " running. JOB is a process id, or the name or folder of a run.", saved=False)
    status: str | None = _inspection(None, JOB,
        "Print the state of every instance of a running job and exit; the job keeps running. JOB is"
        " a process id, or the name or folder of a run. Without JOB: the newest running job.",
        implied="newest", saved=False)
    status_format: str = _inspection("text", choice("text", "json"),
        "Output format of --status.", saved=False)
    add_host: str | None = _inspection(None, JOB,
        "Add a host to a running job and exit; the job keeps running. Example: --add-host lr-3"
        " node4. JOB is a process id, or the name or folder of a run.", saved=False)
    dry_run: bool = _inspection(False, FLAG,
        "Print the topology and the full mpirun command, without a launch.", saved=False)
    export_plan: str | None = _inspection(None, PATH,
        "Write the launch plan to this file as JSON. -: standard output. The job is only started if"
        " --run is given.", saved=False)
    run: bool = _inspection(False, FLAG,
        "Run the job in addition to --export-plan or --export-config=-.", saved=False)
    from_plan: str | None = _inspection(None, PATH,
        "Run a plan that --export-plan saved, in the folder where the plan was made.", saved=False)

    only_output_from_instance: tuple[int, ...] | None = _output(None, INDICES,
        "Show the output of these instances only, such as 0,2-3. The output of an instance that"
        " fails is shown as well.")
    output: str = _output("tag", LINE_PREFIX,
        "Prefix of each output line: PopRun's tag [1,INDEX]<stream>:, the tag and the time of day,"
        " or nothing.")
    output_dir: str | None = _output(None, PATH,
        "Folder in which each run gets a subfolder with report.json, report.html and attempt-N/"
        " (the instances' output and all training steps). The link latest points to the newest"
        " run.")
    log_limit: str = _output("1GiB", SIZE,
        "Maximum size of the output files of each instance in --output-dir. Longer output loses its"
        " middle: instance-0.stdout.1 keeps the beginning, and instance-0.stdout keeps the newest"
        " part. The word none means no limit.")
    run_name: str | None = _output(None, RUN_NAME,
        "Name of the run and of its folder in --output-dir. If a run has this name already, the new"
        " run gets the next free name, such as NAME-2. Unset: a name made of the time.")
    tag: tuple[str, ...] = _output((), TAG,
        "KEY=VALUE label of the run, such as lr=0.1. The report shows it, and poprun-py runs --tag"
        " selects by it. May be repeated.", repeatable=True)
    note: str | None = _output(None, NOTE,
        "Remark about the run, shown in its report, such as the purpose of the run.")
    timeline: str | None = _output(None, FILE_OR_AUTO,
        "Record the activities of every instance in this file; ui.perfetto.dev can open it. auto:"
        " timeline.json.gz in the run's folder (--output-dir), else in the current folder.",
        implied=AUTO)
    timeline_size: int = _output(TIMELINE_MIB, whole_number(1, "MIB", maximum=1 << 20),
        "Maximum size of the recordings of all instances together. A long run keeps its first"
        " spans, its last spans, and a selection of the spans between them.")
    live: bool = _output(False, FLAG,
        "Show a live view of all instances below the output: state, speed, shares of the time, and"
        " slow instances. Without a terminal, print a line now and then.",
        saved=False)
    metrics_port: int | None = _output(None, whole_number(0, "PORT", maximum=65_535),
        "Serve the job's metrics for Prometheus at http://127.0.0.1:PORT/metrics while it runs. 0:"
        " pick a free port and print it.")
    metrics_to: tuple[str, ...] = _output((), METRICS_DESTINATION,
        "Write the job's metrics for tensorboard[:DIR], as a file csv[:FILE] or jsonl[:FILE]"
        " (default: in the run's folder), or for wandb[:PROJECT]; may be repeated.",
        repeatable=True)
    stdin_instance: int = _output(0, whole_number(0, "INDEX"),
        "Index of the instance that reads the launcher's standard input (keyboard, pipe or file).")
    verbosity: int = _output(0, whole_number(0),
        "-v logs the given options and the actions of the launcher. -vv logs everything, including"
        " the topology and the whole mpirun command.", short="-v")

    timeout: float | None = _supervision(None, TIME,
        "End the job after this time, with exit code 124.")
    grace: float = _supervision(5, TIME,
        "Time between asking instances to stop (SIGTERM, or SIGINT after Ctrl-C) and killing them.")
    hang_timeout: float | str | None = _supervision(None, TIME_OR_AUTO,
        "End a hung job with exit code 124, and print all Python stacks. A job hangs if an"
        " instance completes no training step and shows no other activity for this time. If no"
        " instance counts steps, a job hangs if no instance shows any activity. auto: 20 times the"
        " median step time, at least 10 s; 120 s if no instance counts steps. Unset: no limit.")
    max_restarts: int = _supervision(0, whole_number(0),
        "Maximum number of restarts after failures; the pauses before them are 1, 2, 4, ... s.")
    memory_checkpoints: bool = _supervision(False, FLAG,
        "Keep the newest state of the training in memory, and restart from this state after"
        " failures (see max_restarts). If the failed attempt has made progress, the restart"
        " has no pause.")
    allow_fewer_hosts: bool = _supervision(False, FLAG,
        "Allow a restart without the hosts that were lost. Where too few cores are left, instances"
        " of a program with a PopTorch model run more replicas each.")
    wait_for_hosts: float | str | None = _supervision(None, TIME_OR_FOREVER,
        "Wait for lost hosts. =TIME limits the wait; without =TIME, it has no limit. With"
        " --allow-fewer-hosts, the job goes on meanwhile, and uses a lost host again as soon as the"
        " host answers.",
        implied=FOREVER)

    env: tuple[str, ...] = _environment((), TEXT,
        "NAME=VALUE sets a variable in every instance. NAME alone forwards the launcher's variable,"
        " so that process lists do not show its value. Output and plans never show values.",
        repeatable=True, secret=True)
    env_file: str | None = _environment(None, PATH,
        "File with NAME=VALUE lines; values may be in quotes. --env takes precedence.")
    sdk_names: str = _environment("auto", AUTO_YES_NO,
        "Whether import poptorch, popdist, horovod and popart find this emulation. auto: if these"
        " packages are not installed. yes: always. no: never.")
    torch_backend: str = _environment("auto", choice(*TORCH_BACKENDS),
        "The torch.distributed back end for a program that names gloo, popdist or no back end."
        " auto: the back end that the program names.")

    mpi: str | None = _mpi(None, PATH,
        "mpirun, or the folder of its installation. Unset: mpirun beside this Python, else on"
        " PATH.")
    mpi_global_args: tuple[str, ...] = _mpi((), TEXT,
        "Arguments placed directly after mpirun; may be repeated.", repeatable=True)
    mpi_local_args: tuple[str, ...] = _mpi((), TEXT,
        "Arguments added to every instance's part of the mpirun command; may be repeated.",
        repeatable=True)
    instance_mpi_local_args: tuple[str, ...] = _mpi((), TEXT,
        "INDEX:ARGS adds arguments to one instance's part of the mpirun command; may be repeated.",
        repeatable=True)
    mpi_fast_start: bool = _mpi(True, YES_NO,
        "On a single host, use the MPI transports that start within 0.1 s (Open MPI 5).")
    allow_run_as_root: bool = _mpi(True, YES_NO,
        "Allow mpirun to run as root, as PopRun does.")

    import_config: str | None = _configuration(None, PATH,
        "Read options from this .toml or .json file. Options of the command line take precedence."
        " The word none: read no file, not even pyproject.toml.", saved=False)
    export_config: str | None = _configuration(None, PATH,
        "Write the options in effect and their sources to this .toml or .json file. -: write TOML"
        " to standard output; the job is only started if --run is given.", saved=False)
    overwrite_config: bool = _configuration(False, YES_NO,
        "Allow --export-config and --export-plan to replace an existing file.", saved=False)

    pod: str | None = _ipu(None, POD,
        "Pod with the IPUs of the job: its name, its folder or http://HOST:PORT. The word server:"
        " the V-IPU server of the options below. The word none: no pod. Unset: the only pod of"
        " this machine.")
    vipu_server_host: str | None = _ipu(None, NAME,
        "Name or address of the V-IPU server (--pod server).")
    vipu_server_port: int = _ipu(8090, whole_number(1, "PORT", maximum=65_535),
        "Port of the V-IPU server.")
    vipu_server_timeout: int = _ipu(120, whole_number(1, "SECONDS"),
        "Time limit of a request to the V-IPU server.")
    vipu_partition: str | None = _ipu(None, NAME,
        "V-IPU partition of the job. A missing partition is made. Unset: the partition that"
        " IPUOF_VIPU_API_PARTITION_ID names, else the only partition, else a new one.")
    vipu_partition_attempts: int = _ipu(1, whole_number(1),
        "Number of attempts to make the partition ACTIVE. Each attempt may take"
        " --vipu-server-timeout.")
    vipu_cluster: str | None = _ipu(None, NAME,
        "V-IPU cluster for a new partition; see --vipu-allocation.")
    vipu_allocation: str | None = _ipu(None, NAME,
        "V-IPU allocation for a new partition.")
    update_partition: bool = _ipu(False, YES_NO,
        "Change an existing partition that does not fit the job.")
    reset_partition: bool | None = _ipu(None, YES_NO,
        "Reset the partition before the job. Unset: only if the partition is not reconfigurable.")
    remove_partition: bool = _ipu(True, YES_NO,
        "After the job, remove the partition if the launch made it.")
    sync_type: str | None = _ipu(None, choice(
        "ST_GS2_DEFAULT", "ST_GS2_INDEPENDENT_RAILS", "ST_POD_NATIVE_DEFAULT",
        "ST_POD_NATIVE_REPLICATED_PIPELINE", "c2-compatible", "pod-native-default",
        metavar="NAME"),
        "V-IPU sync type of a new partition.")
    offline_mode: bool = _ipu(False, YES_NO,
        "Run without IPUs: no pod is contacted.")
# fmt: on


OPTIONS: dict[str, Option] = {f.name: f.metadata["option"] for f in fields(DeclaredOptions)}
# Environment variables cannot set these options, because each of these options names a single plan
# or running job.
WITHOUT_VARIABLE = ("from_plan", "stacks", "status", "add_host")
# The prefix of the environment variables that set options.
VARIABLE_PREFIX = "POPRUN_"


def variable_name(field: str) -> str:
    """Return the environment variable that sets an option: ``num_ilds`` -> ``POPRUN_NUM_ILDS``."""
    return f"{VARIABLE_PREFIX}{field.upper()}"


# Maps each environment variable to the field name of the option that the variable sets.
OPTION_VARIABLES = {
    variable_name(field): field for field in OPTIONS if field not in WITHOUT_VARIABLE
}


def is_decided_by_plan(name: str) -> bool:
    """Tell whether a saved plan fixes an option, so that --from-plan excludes the option."""
    return name in ("import_config", "export_config") or (
        OPTIONS[name].saved and name not in OF_THIS_LAUNCH
    )
