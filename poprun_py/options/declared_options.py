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
    "Inspection": "views of plans, machines and running jobs",
    "Output": "output, records and metrics of the running job",
    "Supervision": "time limits, signals and failures",
    "Environment": "variables of the instances, and packages that they import",
    "MPI": "the MPI implementation that starts the instances",
    "Configuration": "configuration files, and other sources of options",
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
        "Number of instances on each host, in place of --num-instances. The values auto and cpu"
        " mean one instance for each CPU of this machine.")
    num_replicas: int = _job(None, whole_number(1, maximum=MAX_IPUS),
        "Number of replicas of the model in all instances together. By default, each instance has"
        " one replica.")
    ipus_per_replica: int = _job(1, whole_number(1, maximum=4_096),
        "Number of IPUs of each replica (model parallelism). The number must be a power of two.")
    ipu_model: str | None = _job(None, choice("mk1", "mk2", "bow"),
        "Type of IPU whose memory and speed are emulated for all models (POPDIST_IPU). A model that"
        " does not fit into the memory of this IPU is rejected. By default, a model that does not"
        " fit into the memory of an Mk2 causes a warning."
        " If the launcher is started as poprun, the default for programs that import poptorch is"
        " mk2.")
    num_ilds: int | None = _job(None, whole_number(1),
        "Number of IPU-Link domains. Each domain gets the same number of instances and has at most"
        " 64 IPUs. By default, a job uses all IPU-Link domains of its partition. Without a"
        " partition, a job uses as few domains as possible.")
    executable_cache_path: str | None = _job(None, PATH,
        "Folder for compiled executables. Every host must be able to access this folder.")

    host: str | None = _hosts(None, TEXT,
        "Hosts, separated by commas. host[0-2,4] is a range of hosts. NAME:SLOTS limits the"
        " instances on the host NAME. By default, a job uses the Slurm allocation's hosts, else"
        " this machine.",
        short="-H")
    host_file: str | None = _hosts(None, PATH,
        "File with one host per line. --host-file and --host cannot be used together.")
    host_subnet: str | None = _hosts(None, TEXT,
        "Network interface, or subnet in CIDR notation, for the traffic between hosts.")
    ssh_args: str | None = _hosts(None, TEXT,
        "Arguments of every ssh command, separated by blanks, such as '-p 2222 -i KEY'. A single"
        " argument of ssh must not contain a blank.")
    ssh_config: str | None = _hosts(None, PATH,
        "Configuration file of ssh, used in place of ~/.ssh/config.")
    check: bool = _hosts(False, FLAG,
        "Check every host, print a table with a fix for each problem, and exit without a launch.",
        saved=False)
    no_check: bool = _hosts(False, FLAG,
        "Skip the short check of other hosts before a launch.")
    sync: str | None = _hosts(None, PATH,
        "Copy this folder to the same path on every host before the launch. rsync copies the"
        " folder, and transfers only the changes.")
    synchronise_python_venv: bool = _hosts(False, YES_NO,
        "Copy the Python virtual environment to the hosts before the launch, as PopRun does.")
    synchronise_poplar_sdk: bool = _hosts(False, YES_NO,
        "This option of PopRun has no effect, because there is no Poplar SDK to copy to the hosts.")
    distribute_ssh_key: bool = _hosts(False, YES_NO,
        "This option of PopRun has no effect: poprun-py does not copy ssh keys to the hosts.")

    process_placement: str = _placement(
        "spreadnuma", choice("spreadnuma", "packnuma", "spreadcores", "spreadl3", "disabled"),
        "How a host's cores are divided among its instances. spreadnuma gives each instance whole"
        " NUMA nodes. packnuma fills one NUMA node after another. spreadcores divides the cores"
        " evenly, on any NUMA nodes. spreadl3 gives each instance whole groups of cores with a"
        " common L3 cache. disabled does not bind instances to cores.")
    numa_aware: bool | None = _placement(None, YES_NO,
        "An older option of PopRun for the placement. With yes, instance i of a host gets NUMA node"
        " number i modulo the number of nodes. With no, instances are not bound to cores. By"
        " default, --process-placement decides the placement.")
    cores_per_instance: int | None = _placement(None, whole_number(1),
        "Number of cores of each instance. By default, the instances of a host divide its cores"
        " evenly.")
    reserve_cores: int = _placement(0, whole_number(0),
        "Number of cores of each instance that its compute threads leave free for data loading.")
    smt: bool = _placement(False, YES_NO,
        "Run one compute thread on each hardware thread (SMT), instead of one on each core.")
    oversubscribe: bool = _placement(False, FLAG,
        "Allow more instances than CPUs on a host.")
    strict_binding: bool = _placement(False, FLAG,
        "End the launch if the kernel reports a CPU binding that differs from the plan.")
    wait_for_resources: float | str | None = _placement(None, TIME_OR_FOREVER,
        "Delay the start of the job while other jobs use too many of this machine's cores or of the"
        " pod's IPUs. Waiting jobs start in order of arrival. --wait-for-resources=TIME limits the"
        " waiting time. Without =TIME, the waiting time has no limit.",
        implied=FOREVER)
    share_cores: str = _placement(AUTO, AUTO_YES_NO,
        "Whether this job may use the same cores as other jobs, if too few cores are free. With"
        " yes, the job uses the same cores. With no, the job does not start. With auto, the job"
        " uses the same cores unless --cores-per-instance or --reserve-cores is given.")
    hardware: str | None = _placement(None, PATH,
        "Plan the job for another machine, which this file describes. --print-hardware=json prints"
        " such a file.")
    hardware_root: str | None = _placement(None, PATH,
        "Plan the job for another machine, whose folders sys/ and proc/ were copied to this"
        " folder.")

    print_topology: str = _inspection("no", TOPOLOGY_FORM,
        "Print where each instance runs as PopRun's table (yes), a tree of NUMA nodes (tree), a"
        " picture of the cores (cores) or JSON (json), and start the job. svg and html print an"
        " image or a page to standard output, and do not start the job.",
        saved=False)
    print_hardware: str | None = _inspection(None, choice("table", "json"),
        "Print the processors and the memory of the hosts. Without PROGRAM, poprun-py then exits.",
        implied="table", saved=False)
    print_leases: str | None = _inspection(None, choice("table", "json"),
        "Print which jobs of all users hold CPUs of this machine, and which jobs wait for CPUs."
        " Then exit.", implied="table", saved=False)
    stacks: str | None = _inspection(None, JOB,
        "Print the Python stacks of every instance of a running job, and exit. The job keeps"
        " running. JOB is a process id, or the name or folder of a run.", saved=False)
    status: str | None = _inspection(None, JOB,
        "Print the state of every instance of a running job, and exit. The job keeps running. JOB"
        " is a process id, or the name or folder of a run. Without JOB, the newest running job is"
        " shown.",
        implied="newest", saved=False)
    status_format: str = _inspection("text", choice("text", "json"),
        "Output format of --status.", saved=False)
    add_host: str | None = _inspection(None, JOB,
        "Add a host to a running job, and exit. The job keeps running. For example, --add-host lr-3"
        " node4 adds the host node4 to the job lr-3. JOB is a process id, or the name or folder of"
        " a run.", saved=False)
    dry_run: bool = _inspection(False, FLAG,
        "Print the topology and the full mpirun command, and do not start the job.", saved=False)
    export_plan: str | None = _inspection(None, PATH,
        "Write the launch plan to this file as JSON. If PATH is -, the plan is written to standard"
        " output. With --export-plan, the job only starts if --run is given.", saved=False)
    run: bool = _inspection(False, FLAG,
        "Start the job in addition to --export-plan or --export-config=-.", saved=False)
    from_plan: str | None = _inspection(None, PATH,
        "Run the job of a plan that --export-plan saved. The job runs in the folder where the plan"
        " was made.", saved=False)

    only_output_from_instance: tuple[int, ...] | None = _output(None, INDICES,
        "Show only the output of these instances, such as 0,2-3. The output of an instance that"
        " fails is also shown.")
    output: str = _output("tag", LINE_PREFIX,
        "Prefix of each output line. The value tag means PopRun's tag [1,INDEX]<stream>:, and time"
        " means the tag and the time of day. The value plain means no prefix.")
    output_dir: str | None = _output(None, PATH,
        "Folder in which each run gets a subfolder with report.json, report.html and attempt-N/"
        " (the instances' output and all training steps). The link latest points to the newest"
        " run.")
    log_limit: str = _output("1GiB", SIZE,
        "Maximum size of the output files of each instance in --output-dir. The middle of longer"
        " output is deleted. instance-0.stdout.1 then has the beginning of the output of instance"
        " 0, and instance-0.stdout has its newest part. The value none means no limit.")
    run_name: str | None = _output(None, RUN_NAME,
        "Name of the run and of its folder in --output-dir. If the name is in use, the new run gets"
        " the next free name, such as NAME-2. By default, the name is made from the time.")
    tag: tuple[str, ...] = _output((), TAG,
        "Label KEY=VALUE of the run, such as lr=0.1. The run's report shows its tags. poprun-py"
        " runs --tag selects runs by their tags. --tag may be repeated.", repeatable=True)
    note: str | None = _output(None, NOTE,
        "Remark about the run, such as its purpose. The run's report shows this note.")
    timeline: str | None = _output(None, FILE_OR_AUTO,
        "Record the activities of every instance in this file. ui.perfetto.dev can open the file."
        " The value auto, or no value, means timeline.json.gz in the run's folder (--output-dir)."
        " Without --output-dir, auto means timeline.json.gz in the current folder.",
        implied=AUTO)
    timeline_size: int = _output(TIMELINE_MIB, whole_number(1, "MIB", maximum=1 << 20),
        "Maximum size of the timeline recordings of all instances together. A long run keeps its"
        " first spans, its last spans, and a selection of the spans between them.")
    live: bool = _output(False, FLAG,
        "Show a live view of all instances below the output: their state, speed, use of time, and"
        " slow instances. Without a terminal, print a line of progress now and then.",
        saved=False)
    metrics_port: int | None = _output(None, whole_number(0, "PORT", maximum=65_535),
        "Serve the job's metrics for Prometheus at http://127.0.0.1:PORT/metrics while the job"
        " runs. Port 0 picks a free port and prints it.")
    metrics_to: tuple[str, ...] = _output((), METRICS_DESTINATION,
        "Write the job's metrics for tensorboard[:DIR] or wandb[:PROJECT], or to a file csv[:FILE]"
        " or jsonl[:FILE]. By default, DIR and FILE are in the run's folder. --metrics-to may be"
        " repeated.",
        repeatable=True)
    stdin_instance: int = _output(0, whole_number(0, "INDEX"),
        "Index of the instance that reads the launcher's standard input (keyboard, pipe or file).")
    verbosity: int = _output(0, whole_number(0),
        "-v logs the given options and the launcher's actions. -vv logs everything, including the"
        " topology and the mpirun command.", short="-v")

    timeout: float | None = _supervision(None, TIME,
        "End the job after this time, with exit code 124.")
    grace: float = _supervision(5, TIME,
        "Time between the signal that asks instances to stop and the signal that kills them. The"
        " first signal is SIGTERM, or SIGINT after Ctrl-C.")
    hang_timeout: float | str | None = _supervision(None, TIME_OR_AUTO,
        "End a hung job with exit code 124, and print all Python stacks. A job hangs if an instance"
        " completes no training step and shows no other activity for this time. If no instance"
        " counts steps, a job hangs if no instance shows any activity for this time. The value auto"
        " means 20 times the median step time, and at least 10 s. If no instance counts steps, auto"
        " means 120 s. By default, hung jobs are not ended.")
    max_restarts: int = _supervision(0, whole_number(0),
        "Maximum number of restarts after failures. The pauses before the restarts take 1, 2, 4,"
        " ... s.")
    memory_checkpoints: bool = _supervision(False, FLAG,
        "Keep the newest state of the training in memory, and restart the job from this state after"
        " failures (see --max-restarts). If the failed attempt has made progress, the job restarts"
        " without a pause.")
    allow_fewer_hosts: bool = _supervision(False, FLAG,
        "Allow a restart without the hosts that were lost. If too few cores are left, each instance"
        " of a program with a PopTorch model runs more replicas.")
    wait_for_hosts: float | str | None = _supervision(None, TIME_OR_FOREVER,
        "Wait for lost hosts. --wait-for-hosts=TIME limits the waiting time. Without =TIME, the"
        " waiting time has no limit. With --allow-fewer-hosts, the job runs without the lost hosts"
        " meanwhile, and uses a lost host again as soon as the host answers.",
        implied=FOREVER)

    env: tuple[str, ...] = _environment((), TEXT,
        "NAME=VALUE sets a variable in every instance. NAME alone forwards the launcher's variable"
        " NAME, so process lists do not show its value. Output and plans never show these values.",
        repeatable=True, secret=True)
    env_file: str | None = _environment(None, PATH,
        "File with NAME=VALUE lines. The values may be in quotes. --env takes precedence over"
        " --env-file.")
    sdk_names: str = _environment("auto", AUTO_YES_NO,
        "Whether the statements import poptorch, popdist, horovod and popart find this emulation."
        " With yes, these imports always find the emulation. With no, these imports never find the"
        " emulation. With auto, these imports find the emulation if the packages of these names are"
        " not installed.")
    torch_backend: str = _environment("auto", choice(*TORCH_BACKENDS),
        "The torch.distributed back end for a program that names gloo, popdist or no back end. With"
        " gloo or popdist, such a program uses this back end. With auto, the program uses the back"
        " end that it names.")

    mpi: str | None = _mpi(None, PATH,
        "Path of mpirun, or of the folder of an MPI installation. By default, the launcher uses the"
        " mpirun beside this Python, or else the first mpirun on PATH.")
    mpi_global_args: tuple[str, ...] = _mpi((), TEXT,
        "Arguments for the mpirun command, placed directly after mpirun. --mpi-global-args may be"
        " repeated.", repeatable=True)
    mpi_local_args: tuple[str, ...] = _mpi((), TEXT,
        "Arguments added to every instance's part of the mpirun command. --mpi-local-args may be"
        " repeated.",
        repeatable=True)
    instance_mpi_local_args: tuple[str, ...] = _mpi((), TEXT,
        "INDEX:ARGS adds the arguments ARGS to the part of instance INDEX in the mpirun command."
        " --instance-mpi-local-args may be repeated.",
        repeatable=True)
    mpi_fast_start: bool = _mpi(True, YES_NO,
        "On a single host, use the MPI transports that start within 0.1 s (Open MPI 5).")
    allow_run_as_root: bool = _mpi(True, YES_NO,
        "Allow mpirun to run as root, as PopRun does.")

    import_config: str | None = _configuration(None, PATH,
        "Read options from this .toml or .json file. Options of the command line take precedence"
        " over the file. With the value none, no file is read, not even"
        " pyproject.toml.", saved=False)
    export_config: str | None = _configuration(None, PATH,
        "Write the options in effect and their sources to this .toml or .json file. If PATH is -,"
        " TOML is written to standard output, and the job only starts if --run is given.",
        saved=False)
    overwrite_config: bool = _configuration(False, YES_NO,
        "Allow --export-config and --export-plan to replace an existing file.", saved=False)

    pod: str | None = _ipu(None, POD,
        "Pod with the IPUs of the job: the pod's name, its folder or http://HOST:PORT. The value"
        " server means the V-IPU server of --vipu-server-host. The value none means no pod. By"
        " default, a job uses the only pod of this machine.")
    vipu_server_host: str | None = _ipu(None, NAME,
        "Name or address of the V-IPU server, for --pod server.")
    vipu_server_port: int = _ipu(8090, whole_number(1, "PORT", maximum=65_535),
        "Port of the V-IPU server, for --pod server.")
    vipu_server_timeout: int = _ipu(120, whole_number(1, "SECONDS"),
        "Time limit of a request to the V-IPU server, in seconds.")
    vipu_partition: str | None = _ipu(None, NAME,
        "V-IPU partition of the job. The launcher makes the partition if it does not exist. By"
        " default, a job uses the partition that IPUOF_VIPU_API_PARTITION_ID names, else the only"
        " partition, else a new partition.")
    vipu_partition_attempts: int = _ipu(1, whole_number(1),
        "Number of attempts to bring the partition into the state ACTIVE. Each attempt may take"
        " --vipu-server-timeout.")
    vipu_cluster: str | None = _ipu(None, NAME,
        "V-IPU cluster for a new partition. --vipu-allocation names the allocation.")
    vipu_allocation: str | None = _ipu(None, NAME,
        "V-IPU allocation (part of a cluster) for a new partition.")
    update_partition: bool = _ipu(False, YES_NO,
        "Change an existing partition that does not fit the job.")
    reset_partition: bool | None = _ipu(None, YES_NO,
        "Reset the partition before the job starts. By default, a partition is reset only if it is"
        " not reconfigurable.")
    remove_partition: bool = _ipu(True, YES_NO,
        "Remove the partition after the job, if the launcher made the partition.")
    sync_type: str | None = _ipu(None, choice(
        "ST_GS2_DEFAULT", "ST_GS2_INDEPENDENT_RAILS", "ST_POD_NATIVE_DEFAULT",
        "ST_POD_NATIVE_REPLICATED_PIPELINE", "c2-compatible", "pod-native-default",
        metavar="NAME"),
        "V-IPU sync type of a new partition: ST_GS2_DEFAULT, ST_GS2_INDEPENDENT_RAILS,"
        " ST_POD_NATIVE_DEFAULT, ST_POD_NATIVE_REPLICATED_PIPELINE, c2-compatible or"
        " pod-native-default.")
    offline_mode: bool = _ipu(False, YES_NO,
        "Run without IPUs, and do not contact a pod.")
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
