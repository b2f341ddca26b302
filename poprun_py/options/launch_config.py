"""LaunchConfig: every option of the launcher, once, with its default, help and check.

A frozen value: it never reads the environment, a disk or a device. The parser, the help, the
configuration files and the reference pages follow from its fields. config_files.py reads files.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, fields, replace
from os import PathLike, fspath
from typing import TYPE_CHECKING, Any

from popdist_py.device_numbers import LINK_DOMAIN_IPUS
from popdist_py.environment import TIMELINE_MIB, TORCH_BACKENDS
from popdist_py.errors import counted
from poprun_py.errors import UsageError
from poprun_py.on_use import on_use
from poprun_py.options.link_domains import roomy_link_domains
from poprun_py.options.metrics_destinations import METRICS_DESTINATION, TENSORBOARD
from poprun_py.options.option_origins import Origin, as_default, from_python
from poprun_py.options.option_types import (
    COUNT_OR_AUTO,
    FILE_OR_AUTO,
    FLAG,
    FOREVER,
    INDICES,
    MAX_INSTANCES,
    NAME,
    PATH,
    SECONDS,
    SECONDS_OR_AUTO,
    SECONDS_OR_FOREVER,
    TEXT,
    YES_NO,
    YES_NO_WORDS,
    Kind,
    Option,
    choice,
    is_word,
    option,
    spelled,
    whole,
)
from poprun_py.value_display import Displayed

if TYPE_CHECKING:
    from collections.abc import Sequence
    from typing import Unpack

    from poprun_py.options.keyword_types import LaunchOptions, Word

GROUPS = {
    "Job": "how many instances, replicas and IPUs",
    "Hosts": "where instances run",
    "Placement": "which NUMA nodes, CPUs and threads each instance gets",
    "Inspection": "look before anything starts; the program may be left out",
    "Output": "what is shown while the job runs",
    "Supervision": "limits, signals and failures",
    "Environment": "variables of the instances, and the names that they import",
    "MPI": "the MPI that starts the instances",
    "Configuration": "options from and to files; the other places of options",
    "IPU hardware": "the pod of emulated IPUs, and PopRun's options of its partitions",
}

# Two ways to say one thing, or a contradiction: only one of a pair may be given.
EXCLUSIVE = (
    ("host", "host_file"),
    ("hardware", "hardware_root"),
    ("num_instances", "nproc_per_node"),
    ("run", "dry_run"),
    ("wait_for_resources", "share_cores"),
)

# Kept in files, but not decided by a saved plan: they are about one launch of it.
OF_THIS_LAUNCH = ("verbosity", "wait_for_resources", "share_cores")

# Protocol names of V-IPU, and the two that its command line is known to take.
_SYNC_TYPES = (
    "ST_GS2_DEFAULT",
    "ST_GS2_INDEPENDENT_RAILS",
    "ST_POD_NATIVE_DEFAULT",
    "ST_POD_NATIVE_REPLICATED_PIPELINE",
    "c2-compatible",
    "pod-native-default",
)

# Larger than any IPU system. A plan lists every IPU, so a typing slip must have a limit.
MAX_IPUS = 1_048_576

_POD = replace(
    PATH, metavar="POD", expected="the name of a pod, its folder, http://HOST:PORT, server or none"
)
_JOB = replace(
    PATH, metavar="JOB", expected="a process id, the name of a run, or the folder of one"
)
TOPOLOGY_FORMS = ("yes", "no", "tree", "cores", "json", "svg", "html")
# These are whole files on standard output: nothing else may be written there.
_TOPOLOGY_FILES = ("svg", "html")


def _yes_no_or_word(text: str) -> str:
    """Return a word of several; yes and no may be written as for every yes|no value."""
    word = text.lower()
    return word if word not in YES_NO_WORDS else "yes" if YES_NO_WORDS[word] else "no"


_TOPOLOGY = Kind(
    metavar="|".join(TOPOLOGY_FORMS),
    expected=f"{', '.join(TOPOLOGY_FORMS[:-1])} or {TOPOLOGY_FORMS[-1]}",
    read=_yes_no_or_word,
    accepts=lambda v: v in TOPOLOGY_FORMS,
    choices=TOPOLOGY_FORMS,
)
_SDK_NAMES = Kind(
    metavar="auto|yes|no",
    expected="auto, yes or no",
    read=_yes_no_or_word,
    accepts=lambda v: isinstance(v, bool) or v in ("auto", "yes", "no"),
    choices=("auto", "yes", "no"),
    keep=lambda v: v if isinstance(v, str) else "yes" if v else "no",
    is_text_in_files=True,
)


@dataclass(frozen=True, kw_only=True, slots=True, repr=False)
class LaunchConfig(Displayed):
    """Everything that decides a launch: ``program`` and the options of the command line.

    A program ``-m MODULE ...`` is a Python module. ``num_replicas`` is ``num_instances`` where it
    is not given; with ``nproc_per_node`` both are decided when the hosts are known (``on_hosts``).
    ``origins`` holds, by option, where its value was given.

    Raises:
        UsageError: a value is not accepted, or values contradict one another.
    """

    program: tuple[str, ...] = field(default=())

    num_instances: int = option(
        1,
        whole(1, maximum=MAX_INSTANCES),
        "Job",
        "Instances (processes). The replicas are split evenly over them.",
        short="-n",
    )
    nproc_per_node: int | str | None = option(
        None, COUNT_OR_AUTO, "Job",
        "Instances on each host, instead of --num-instances; auto (or cpu): the CPUs of this"
        " machine.",
    )  # fmt: skip
    num_replicas: int = option(
        None, whole(1, maximum=MAX_IPUS), "Job",
        "Replicas of the model over all instances. Unset: as many as instances.",
    )  # fmt: skip
    ipus_per_replica: int = option(
        1,
        whole(1, maximum=4_096),
        "Job",
        "IPUs of one replica (model parallelism); a power of two.",
    )
    ipu_model: str | None = option(
        None, choice("mk1", "mk2", "bow"), "Job",
        "IPU whose memory and time the models of all instances have (POPDIST_IPU): one that does"
        " not fit is refused. Unset: a warning if a model does not fit into an Mk2. The command"
        " poprun sets mk2 for programs that import poptorch.",
    )  # fmt: skip
    num_ilds: int | None = option(
        None, whole(1), "Job", "IPU-Link domains; each gets the same number of instances and has at"
        " most 64 IPUs. Unset: those of the partition, else as few as hold the IPUs.",
    )  # fmt: skip
    executable_cache_path: str | None = option(
        None, PATH, "Job", "Folder in which compiled executables are kept, seen by every host."
    )

    host: str | None = option(
        None, TEXT, "Hosts",
        "Hosts, separated by commas, with ranges: host[0-2,4]; name:slots limits the instances"
        " of a host. Unset: the Slurm allocation, else this machine.",
        short="-H",
    )  # fmt: skip
    host_file: str | None = option(
        None, PATH, "Hosts", "File with one host a line; not together with --host."
    )
    host_subnet: str | None = option(
        None, TEXT, "Hosts", "Interface name or CIDR for the traffic between hosts."
    )
    ssh_args: str | None = option(
        None, TEXT, "Hosts", "Arguments of every ssh, such as '-p 2222 -i KEY'; no blanks in them."
    )
    ssh_config: str | None = option(
        None, PATH, "Hosts", "ssh configuration file to use instead of ~/.ssh/config."
    )
    check: bool = option(
        False, FLAG, "Hosts", "Check every host, print a table with fixes, and start nothing.",
        saved=False,
    )  # fmt: skip
    no_check: bool = option(
        False, FLAG, "Hosts", "Skip the short check that comes before a launch on other hosts."
    )
    sync: str | None = option(
        None, PATH, "Hosts",
        "Copy this folder to the same path on every host first (rsync: only what changed).",
    )  # fmt: skip
    synchronise_python_venv: bool = option(
        False, YES_NO, "Hosts", "PopRun's option to copy the virtual environment to the hosts."
    )
    synchronise_poplar_sdk: bool = option(
        False, YES_NO, "Hosts", "PopRun's option to copy the SDK to the hosts; there is none here."
    )
    distribute_ssh_key: bool = option(
        False, YES_NO, "Hosts", "PopRun's option to spread the ssh key to the hosts."
    )

    process_placement: str = option(
        "spreadnuma",
        choice("spreadnuma", "packnuma", "spreadcores", "spreadl3", "disabled"),
        "Placement",
        "How a host's NUMA nodes and cores are divided among its instances.",
    )
    numa_aware: bool | None = option(
        None, YES_NO, "Placement",
        "PopRun's older option: yes gives local instance i node i mod nodes, no disables"
        " placement. Unset: --process-placement decides.",
    )  # fmt: skip
    cores_per_instance: int | None = option(
        None, whole(1), "Placement", "Cores of each instance. Unset: an even share of the host."
    )
    reserve_cores: int = option(
        0,
        whole(0),
        "Placement",
        "Cores of each instance kept free of compute threads, for data loading.",
    )
    smt: bool = option(
        False, YES_NO, "Placement", "Run a compute thread on every SMT sibling, not one per core."
    )
    oversubscribe: bool = option(
        False, FLAG, "Placement", "Allow more instances than CPUs on a host."
    )
    strict_binding: bool = option(
        False,
        FLAG,
        "Placement",
        "End the launch when the kernel reports another binding than planned.",
    )
    wait_for_resources: float | str | None = option(
        None, SECONDS_OR_FOREVER, "Placement", "Wait, in order of arrival, while other jobs hold"
        " too many of this machine's cores, then while others have the pod's IPUs: alone as long"
        " as it takes, =TIME so long at most.",
        implied=FOREVER,
    )  # fmt: skip
    share_cores: bool = option(
        False, YES_NO, "Placement", "Run on cores that other jobs hold where too few are left,"
        " instead of refusing.",
    )  # fmt: skip
    hardware: str | None = option(
        None, PATH, "Placement", "Plan for the machine saved by --print-hardware=json."
    )
    hardware_root: str | None = option(
        None,
        PATH,
        "Placement",
        "Plan for the machine whose sys/ and proc/ were copied to this folder.",
    )

    print_topology: str = option(
        "no", _TOPOLOGY, "Inspection",
        "Print who runs where: PopRun's table, a tree with NUMA nodes and CPUs,"
        " a picture of the cores, or JSON; svg and html draw a picture or a page for a file, and"
        " start nothing.",
        saved=False,
    )  # fmt: skip
    print_hardware: str | None = option(
        None, choice("table", "json"), "Inspection",
        "Print what is known of the hosts' processors and memory, and stop without a program.",
        implied="table", saved=False,
    )  # fmt: skip
    print_leases: str | None = option(
        None, choice("table", "json"), "Inspection",
        "Print which jobs of all users hold which CPUs of this machine, and which wait, and stop.",
        implied="table", saved=False,
    )  # fmt: skip
    stacks: int | None = option(
        None, whole(1, "PID"), "Inspection",
        "Print what every instance of the running job of process PID is doing, and stop.",
        saved=False,
    )  # fmt: skip
    status: str | None = option(
        None, _JOB, "Inspection",
        "Print how every instance of a running job is doing, and stop: alone for the only or newest"
        " job, =PID for that of a process, =NAME for that of a run.",
        implied="newest", saved=False,
    )  # fmt: skip
    status_format: str = option(
        "text", choice("text", "json"), "Inspection", "How --status prints it.", saved=False
    )
    dry_run: bool = option(
        False, FLAG, "Inspection", "Print the topology and the full mpirun command; start nothing.",
        saved=False,
    )  # fmt: skip
    export_plan: str | None = option(
        None, PATH, "Inspection", "Write the whole launch plan as JSON, and start nothing unless"
        " --run is given; - is standard output.",
        saved=False,
    )  # fmt: skip
    run: bool = option(
        False, FLAG, "Inspection", "Run the job as well after --export-plan.", saved=False
    )
    from_plan: str | None = option(
        None, PATH, "Inspection", "Run a plan saved by --export-plan instead of making one, in the"
        " folder where it was made.",
        saved=False,
    )  # fmt: skip

    only_output_from_instance: tuple[int, ...] | None = option(
        None, INDICES, "Output", "Show the output of these instances only, such as 0,2-3; an"
        " instance that fails is heard all the same.",
    )  # fmt: skip
    output: str = option(
        "tag", choice("tag", "time", "plain"), "Output",
        "Before each line PopRun's tag [1,INDEX]<stream>:, the time of day as well, or nothing.",
    )  # fmt: skip
    output_dir: str | None = option(
        None, PATH, "Output", "Folder in which every run gets one of its own, and the link latest"
        " names the newest: attempt-N/ with the instances' whole output and all training steps, and"
        " report.json with report.html.",
    )  # fmt: skip
    timeline: str | None = option(
        None, FILE_OR_AUTO, "Output", "Record what every instance does when into this file, for"
        " ui.perfetto.dev; auto: timeline.json.gz in the run's folder (--output-dir), else here.",
        implied="auto",
    )  # fmt: skip
    timeline_size: int = option(
        TIMELINE_MIB, whole(1, "MIB", maximum=1 << 20), "Output", "What all instances together may"
        " record at most; of a long run the first and the last spans are kept, and some between.",
    )  # fmt: skip
    live: bool = option(
        False, FLAG, "Output", "Keep a view of all instances below the output: what each one does,"
        " how fast, where its time goes, which is slow; without a terminal a line now and then.",
        saved=False,
    )  # fmt: skip
    metrics_port: int | None = option(
        None, whole(0, "PORT", maximum=65_535), "Output", "Serve the job's numbers while it runs,"
        " for Prometheus, at http://127.0.0.1:PORT/metrics; 0: a free port, which is said.",
    )  # fmt: skip
    metrics_to: tuple[str, ...] = option(
        (), METRICS_DESTINATION, "Output", "Write the job's numbers for tensorboard[:DIR] (in the"
        " run's folder) or wandb[:PROJECT]; may be repeated.",
        repeatable=True,
    )  # fmt: skip
    stdin_instance: int = option(
        0, whole(0, "INDEX"), "Output", "The instance that gets the launcher's standard input: the"
        " keyboard, a pipe or a file.",
    )  # fmt: skip
    verbosity: int = option(
        0, whole(0), "Output", "-v logs what the launcher does, -vv everything, with the topology.",
        short="-v",
    )  # fmt: skip

    timeout: float | None = option(
        None, SECONDS, "Supervision", "End the job after this time with exit code 124."
    )
    grace: float = option(
        5,
        SECONDS,
        "Supervision",
        "Time between asking instances to stop (SIGTERM, or SIGINT after Ctrl-C) and killing them.",
    )
    hang_timeout: float | str | None = option(
        None, SECONDS_OR_AUTO, "Supervision",
        "End the job with exit code 124 and all Python stacks when an instance makes no step for"
        " so long and nothing else moves in it, or, where none counts steps, in any; auto: 20 times"
        " the median step, at least 10 s; 120 s without steps. Unset: never.",
    )  # fmt: skip
    max_restarts: int = option(
        0, whole(0), "Supervision", "Start a failed job again so many times, after 1, 2, 4, ... s."
    )
    allow_fewer_hosts: bool = option(
        False, FLAG, "Supervision", "A restart may leave out hosts that were lost."
    )

    env: tuple[str, ...] = option(
        (), TEXT, "Environment",
        "NAME=VALUE sets a variable in every instance. NAME forwards the launcher's: better for"
        " secrets, which are then in no list of processes. Values are never shown, nor in plans.",
        repeatable=True, secret=True,
    )  # fmt: skip
    env_file: str | None = option(
        None,
        PATH,
        "Environment",
        "File of NAME=VALUE lines, values in quotes or not; --env wins over it.",
    )

    sdk_names: str = option(
        "auto",
        _SDK_NAMES,
        "Environment",
        "Whether import poptorch, popdist, horovod and popart find this emulation: auto where they"
        " are not installed, yes even where they are, no never.",
    )
    torch_backend: str = option(
        "auto",
        choice(*TORCH_BACKENDS),
        "Environment",
        "The back end of torch.distributed for a program that names gloo, popdist or none; auto:"
        " what it names.",
    )

    mpi: str | None = option(
        None,
        PATH,
        "MPI",
        "mpirun (or its installation folder). Unset: beside this Python, then on PATH.",
    )
    mpi_global_args: tuple[str, ...] = option(
        (), TEXT, "MPI", "Arguments placed directly after mpirun; may be repeated.", repeatable=True
    )
    mpi_local_args: tuple[str, ...] = option(
        (), TEXT, "MPI", "Arguments added to every instance's part; may be repeated.",
        repeatable=True,
    )  # fmt: skip
    instance_mpi_local_args: tuple[str, ...] = option(
        (), TEXT, "MPI", "INDEX:ARGS adds arguments to one instance's part; may be repeated.",
        repeatable=True,
    )  # fmt: skip
    mpi_fast_start: bool = option(
        True,
        YES_NO,
        "MPI",
        "On one host choose the transports that start within 0.1 s (Open MPI 5).",
    )
    allow_run_as_root: bool = option(True, YES_NO, "MPI", "Let mpirun run as root, as PopRun does.")

    import_config: str | None = option(
        None, PATH, "Configuration", "Read options from a .toml or .json file; typed ones win."
        " none: read no file, pyproject.toml included.",
        saved=False,
    )  # fmt: skip
    export_config: str | None = option(
        None,
        PATH,
        "Configuration",
        "Write the options in force to a .toml or .json file, with the place that gave each.",
        saved=False,
    )
    overwrite_config: bool = option(
        False, YES_NO, "Configuration", "Let --export-config replace an existing file.", saved=False
    )

    pod: str | None = option(
        None, _POD, "IPU hardware", "The pod whose IPUs the job takes: its name, folder or http://"
        "HOST:PORT; server: the V-IPU server below; none. Unset: the only pod of this machine.",
    )  # fmt: skip
    vipu_server_host: str | None = option(
        None, NAME, "IPU hardware", "Name or address of the V-IPU server (--pod server)."
    )
    vipu_server_port: int = option(
        8090, whole(1, "PORT", maximum=65_535), "IPU hardware", "Port of the V-IPU server."
    )
    vipu_server_timeout: int = option(
        120, whole(1, "SECONDS"), "IPU hardware", "Time limit of requests to the V-IPU server."
    )
    vipu_partition: str | None = option(
        None, NAME, "IPU hardware", "V-IPU partition to use; made if absent. Unset:"
        " IPUOF_VIPU_API_PARTITION_ID, the only one, or one for this launch.",
    )  # fmt: skip
    vipu_partition_attempts: int = option(
        1,
        whole(1),
        "IPU hardware",
        "Tries to bind the partition, each of --vipu-server-timeout, until it is ACTIVE.",
    )
    vipu_cluster: str | None = option(
        None,
        NAME,
        "IPU hardware",
        "V-IPU cluster for a new partition; see --vipu-allocation.",
    )
    vipu_allocation: str | None = option(
        None, NAME, "IPU hardware", "V-IPU allocation for a new partition."
    )
    update_partition: bool = option(
        False, YES_NO, "IPU hardware", "Change a partition that does not fit."
    )
    reset_partition: bool | None = option(
        None,
        YES_NO,
        "IPU hardware",
        "Reset the partition first. Unset: only if not reconfigurable.",
    )
    remove_partition: bool = option(
        True, YES_NO, "IPU hardware", "Remove a partition that the launch made."
    )
    sync_type: str | None = option(
        None, spelled(*_SYNC_TYPES), "IPU hardware", "V-IPU sync type of a new partition."
    )
    offline_mode: bool = option(
        False,
        YES_NO,
        "IPU hardware",
        "Neither require nor attach IPUs: no pod is asked.",
    )

    origins: Mapping[str, Origin] = field(default_factory=dict, compare=False)

    def __post_init__(self) -> None:
        for name, opt in options().items():
            value = getattr(self, name)
            if value is not None or _DEFAULTS[name] is not None:
                object.__setattr__(self, name, opt.check(self.named(name), value))
        # A text would pass for a sequence of its letters.
        words = self.program if isinstance(self.program, list | tuple) else [None]
        words = tuple(fspath(w) if isinstance(w, PathLike) else w for w in words)
        if not all(map(is_word, words)):
            raise UsageError(
                f"program {self.program!r}: expected a list of texts without NUL characters, the "
                "program and its arguments"
            )
        object.__setattr__(self, "program", words)
        self._check_combinations()
        if self.nproc_per_node is None:
            replicas: int | None = self.num_replicas
            if replicas is None:
                object.__setattr__(self, "num_replicas", self.num_instances)
            self._check_counts()

    @classmethod
    def from_file(
        cls,
        path: str | PathLike[str],
        *,
        program: Sequence[Word] | None = None,
        **options: Unpack[LaunchOptions],
    ) -> LaunchConfig:
        """Return the configuration of a file as --import-config reads it; what is given here wins.

        Raises:
            UsageError: the file is not there or not accepted, or a value is not.
        """
        config: LaunchConfig = on_use("options.python_keywords").config_from_file(
            path, options, program
        )
        return config

    def replace(
        self, *, program: Sequence[Word] | None = None, **options: Unpack[LaunchOptions]
    ) -> LaunchConfig:
        """Return this configuration with other values; None gives an option its default again.

        Replicas that were not given stay as many as the instances.

        Raises:
            UsageError: a value is not accepted, or values contradict one another.
        """
        config: LaunchConfig = on_use("options.python_keywords").changed_config(
            self, options, program
        )
        return config

    def __repr__(self) -> str:
        # What differs from the defaults; values that may be secret stay out of logs and messages.
        shown = [
            f"{f.name}={'...' if f.name != 'program' and _OPTIONS[f.name].secret else repr(value)}"
            for f in fields(self)
            if f.name != "origins"
            and (value := getattr(self, f.name)) not in (f.default, self._default(f.name))
        ]
        return f"LaunchConfig({', '.join(shown)})"

    # --- where values come from ---------------------------------------------------------------

    def _default(self, name: str) -> Any:
        """Return the value of a field that is not given."""
        return self.num_instances if name == "num_replicas" else _DEFAULTS[name]

    def is_given(self, name: str) -> bool:
        """Tell whether the value of a field was given, or differs from its default."""
        value = getattr(self, name)
        return name in self.origins or value not in (self._default(name), _DEFAULTS[name])

    def origin(self, name: str) -> Origin:
        """Return where the value of an option was given; values without a place are Python's."""
        if name in self.origins:
            return self.origins[name]
        if self.is_given(name):
            return from_python(name)
        return as_default(name, "as many as instances" if name == "num_replicas" else "the default")

    def named(self, name: str) -> str:
        """Return an option as it was written: ``--host``, or ``host in pyproject.toml``."""
        return self.origin(name).named

    def shown(self, name: str) -> str:
        """Return an option with its value as it was written: ``POPRUN_NUM_INSTANCES=2``."""
        value = getattr(self, name)
        if isinstance(value, bool):
            value = "yes" if value else "no"
        return self.origin(name).shown(value)

    def on_hosts(self, num_hosts: int, cpus: int = 1) -> LaunchConfig:
        """Return the configuration with the instances that ``nproc_per_node`` means.

        Args:
            num_hosts: the hosts of the job.
            cpus: what ``auto`` stands for: the CPUs of a host.

        Raises:
            UsageError: the numbers of instances, replicas and IPUs contradict one another.
        """
        if self.nproc_per_node is None:
            return self
        share = self.nproc_per_node if isinstance(self.nproc_per_node, int) else cpus
        given = self.origin("nproc_per_node").shown(self.nproc_per_node)
        means = "" if share == self.nproc_per_node else f" ({counted(share, 'CPU')})"
        hosts = f" x {num_hosts} hosts" if num_hosts > 1 else ""
        return replace(
            self,
            num_instances=share * num_hosts,
            nproc_per_node=None,
            origins={
                **{name: o for name, o in self.origins.items() if name != "nproc_per_node"},
                "num_instances": Origin(
                    self.origin("nproc_per_node").place, given + means + hosts, " = ", " instances"
                ),
            },
        )

    @property
    def prints_file(self) -> bool:
        """Tell whether all of standard output is a file of --print-topology: no job starts."""
        return self.print_topology in _TOPOLOGY_FILES

    # --- checks -------------------------------------------------------------------------------

    def _check_counts(self) -> None:
        """Check the equation between instances, replicas, IPUs and IPU-Link domains."""
        instances, replicas = self.num_instances, self.num_replicas
        if replicas % instances:
            divisors = [n for n in range(1, min(replicas, 4096) + 1) if replicas % n == 0]
            nearby = sorted(sorted(divisors, key=lambda n: abs(n - instances))[:4])
            raise UsageError(
                f"{self.shown('num_replicas')} cannot be split evenly over "
                f"{self.shown('num_instances')} ({replicas} / {instances} = "
                f"{replicas / instances:.3g}): expected a number of instances that divides "
                f"{replicas}, such as {', '.join(map(str, nearby))}"
            )
        width = self.ipus_per_replica
        if width & (width - 1):
            raise UsageError(
                f"{self.shown('ipus_per_replica')}: expected a power of two (1, 2, 4, 8, ...), "
                "the sizes in which IPUs are handed out"
            )
        if replicas * width > MAX_IPUS:
            raise UsageError(
                f"{self.shown('num_replicas')} x {self.shown('ipus_per_replica')} = "
                f"{replicas * width} IPUs: expected at most {MAX_IPUS}"
            )
        if self.num_ilds is not None:
            self._check_link_domains(self.num_ilds, replicas * width)
        for name in ("only_output_from_instance", "stdin_instance"):
            given = getattr(self, name)
            last = max(given or (0,)) if isinstance(given, tuple) else given or 0
            if last >= instances:
                raise UsageError(
                    f"{self.origin(name).shown(last)}: expected an index "
                    f"from 0 to {instances - 1} ({self.shown('num_instances')})"
                )

    def _check_link_domains(self, num_ilds: int, num_ipus: int) -> None:
        """Check that the IPU-Link domains divide the instances and hold the IPUs."""
        if self.num_instances % num_ilds:
            raise UsageError(
                f"{self.shown('num_instances')} cannot be split evenly over "
                f"{self.shown('num_ilds')}: expected a multiple of {num_ilds} instances, at "
                "least one for each IPU-Link domain"
            )
        if num_ipus > num_ilds * LINK_DOMAIN_IPUS:
            fitting = roomy_link_domains(self.num_instances, num_ipus)
            least = -(-num_ipus // LINK_DOMAIN_IPUS)
            expected = (
                f"expected {' or '.join(map(str, fitting))}, which divide"
                f"{'s' if len(fitting) == 1 else ''} {self.shown('num_instances')}"
                if fitting
                else f"expected at least {least}, and a multiple of so many instances"
            )
            raise UsageError(
                f"{self.shown('num_ilds')} leaves {num_ipus // num_ilds} of {num_ipus} IPUs in "
                f"each IPU-Link domain, at most {LINK_DOMAIN_IPUS} fit: {expected}"
            )

    def _check_combinations(self) -> None:
        """Refuse options that exclude one another."""
        for one, other in EXCLUSIVE:
            if self.is_given(one) and self.is_given(other):
                raise UsageError(
                    f"{self.named(one)} and {self.named(other)} exclude one another: give one"
                )
        if self.output_dir is None and TENSORBOARD in self.metrics_to:
            raise UsageError(
                f"{self.origin('metrics_to').shown(TENSORBOARD)}: there is no folder of the run: "
                "give tensorboard:DIR, or --output-dir"
            )
        for other in ("run", "print_hardware"):
            if self.prints_file and self.is_given(other):
                raise UsageError(
                    f"{self.shown('print_topology')} and {self.named(other)} exclude one another: "
                    "the picture is all of standard output"
                )


def options() -> dict[str, Option]:
    """Return every option by field name, in the order of declaration."""
    return _OPTIONS


def is_decided_by_plan(name: str) -> bool:
    """Tell whether a saved plan has decided an option, so that it cannot stand beside one."""
    return name in ("import_config", "export_config") or (
        _OPTIONS[name].saved and name not in OF_THIS_LAUNCH
    )


_OPTIONS: dict[str, Option] = {
    f.name: f.metadata["option"] for f in fields(LaunchConfig) if "option" in f.metadata
}
_DEFAULTS: dict[str, Any] = {f.name: f.default for f in fields(LaunchConfig)}
