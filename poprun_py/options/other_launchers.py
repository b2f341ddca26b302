"""Options of other launchers, and what a user of poprun-py does in place of each.

An error message about an unknown option names the launcher that has the option. A test compares the
table in docs/ddp-and-mpi.md with these messages. The table is read only after a mistake.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

TORCHRUN = "torchrun"
ACCELERATE = "accelerate launch"
DEEPSPEED = "deepspeed"
HOROVOD = "horovodrun"
OPEN_MPI = "mpirun"
MPICH = "mpiexec of MPICH"
SLURM = "srun and sbatch"
# Names that no launcher above has, but that users try.
GUESSED = ""


@dataclass(frozen=True, slots=True)
class ForeignOption:
    """Options of other launchers with the same purpose, and the advice for their users.

    Attributes:
        advice: What to do in place of giving the option. Options of poprun-py are in backquotes.
        spellings: The spellings of the option by launcher, separated by blanks, with hyphens.
    """

    advice: str
    spellings: Mapping[str, str]


# The spelling of a long option has two hyphens, also where the launcher accepts one.
FOREIGN_OPTIONS = (
    # --- numbers and hosts -----------------------------------------------------------------------
    ForeignOption(
        "give the number of instances with `--num-instances N`",
        {
            OPEN_MPI: "-c",
            SLURM: "--ntasks",
            HOROVOD: "--num-proc",
            ACCELERATE: "--num-processes",
            GUESSED: "--nprocs --num-procs --num-ranks --num-workers --processes --workers"
            " --world-size",
        },
    ),
    ForeignOption(
        "give the number of instances on each host with `--nproc-per-node N`",
        {
            OPEN_MPI: "-N --npernode --ppr",
            MPICH: "--ppn --perhost",
            SLURM: "--ntasks-per-node",
            DEEPSPEED: "--num-gpus --num-accelerators",
        },
    ),
    ForeignOption(
        "name the hosts with `--host node[0-1]`, or leave it out for this machine and inside Slurm",
        {
            TORCHRUN: "--nnodes",
            ACCELERATE: "--num-machines",
            DEEPSPEED: "--num-nodes",
            SLURM: "-N --nodes",
        },
    ),
    ForeignOption(
        "name the hosts with `--host node0:2,node1:2`",
        {
            MPICH: "--hosts",
            HOROVOD: "--hosts --slots-per-host --host-discovery-script",
            DEEPSPEED: "-i --include -e --exclude",
            SLURM: "-w --nodelist -x --exclude",
        },
    ),
    ForeignOption(
        "give the file with the hosts with `--host-file FILE`",
        {
            OPEN_MPI: "--hostfile --machinefile --default-hostfile",
            MPICH: "-f --machinefile",
            HOROVOD: "--hostfile",
            DEEPSPEED: "--hostfile",
            ACCELERATE: "--mpirun-hostfile --deepspeed-hostfile",
            SLURM: "-F --nodefile",
        },
    ),
    ForeignOption(
        "the number of instances is fixed: give `--num-instances N`; a job that loses a host"
        " restarts with `--max-restarts N` and `--allow-fewer-hosts`",
        {HOROVOD: "--min-np --max-np --min-num-proc --max-num-proc --elastic-timeout"},
    ),
    ForeignOption(
        "name the network with `--host-subnet INTERFACE`",
        {HOROVOD: "--network-interface --network-interfaces", MPICH: "--iface"},
    ),
    ForeignOption(
        "give options of ssh with `--ssh-args`, such as `--ssh-args '-p 2222 -i KEY'`",
        {HOROVOD: "-p --ssh-port -i --ssh-identity-file", DEEPSPEED: "--ssh-port"},
    ),
    ForeignOption(
        "leave it out: the launcher connects the instances, and sets `MASTER_ADDR`, `MASTER_PORT`"
        " and the ranks",
        {
            TORCHRUN: "--rdzv-backend --rdzv-endpoint --rdzv-id --rdzv-conf --node-rank"
            " --master-addr --master-port --local-addr --use-env --monitor-interval --start-method"
            " --role",
            ACCELERATE: "--machine-rank --main-process-ip --main-process-port --same-network"
            " --rdzv-backend --rdzv-conf --monitor-interval --role",
            DEEPSPEED: "--node-rank --master-addr --master-port --no-local-rank --no-ssh"
            " --force-multi --launcher",
        },
    ),
    ForeignOption(
        "leave it out: without `--host`, a job runs on this machine alone",
        {TORCHRUN: "--standalone"},
    ),
    ForeignOption(
        "leave it out: the launcher chooses the transports of MPI (`--mpi-fast-start`)",
        {HOROVOD: "--gloo --jsrun --tcp --mpi-threads-disable", MPICH: "--launcher --rmk"},
    ),
    ForeignOption(
        "leave it out: the launcher waits for all instances",
        {HOROVOD: "--start-timeout --gloo-timeout-seconds"},
    ),
    # --- the program -----------------------------------------------------------------------------
    ForeignOption(
        "leave it out: a program whose name does not end in .py runs as it is",
        {TORCHRUN: "--no-python --run-path", ACCELERATE: "--no-python", DEEPSPEED: "--no-python"},
    ),
    ForeignOption(
        "all instances run one program: let it choose its work by `RANK` or"
        " `popdist_py.getInstanceIndex()`",
        {OPEN_MPI: "--app", MPICH: "--configfile", SLURM: "--multi-prog"},
    ),
    ForeignOption(
        "run `cd DIR` first: the instances run in the folder in which poprun-py was started",
        {
            OPEN_MPI: "--wdir --wd",
            MPICH: "--wdir",
            SLURM: "-D --chdir",
            GUESSED: "--cwd --workdir --working-dir --working-directory",
        },
    ),
    ForeignOption(
        "set or forward a variable with `--env NAME=VALUE` or `--env NAME`",
        {
            OPEN_MPI: "-x",
            MPICH: "--genv --genvlist --genvall --envlist --envall",
            SLURM: "--export",
        },
    ),
    ForeignOption(
        "copy a folder to every host with `--sync DIR`",
        {OPEN_MPI: "--preload-files --preload-binary --preload-files-dest-dir"},
    ),
    ForeignOption(
        "leave it out: instance 0 reads the keyboard or a pipe; `--stdin-instance` names another",
        {SLURM: "-i --input --pty", GUESSED: "--interactive"},
    ),
    ForeignOption(
        "choose this in the program; options of the program stand behind its name",
        {
            ACCELERATE: "--mixed-precision --use-fsdp --use-deepspeed --use-megatron-lm"
            " --use-parallelism-config --use-tp --dynamo-backend --zero-stage"
            " --gradient-accumulation-steps --downcast-bf16 --main-training-function",
            DEEPSPEED: "--deepspeed --deepspeed-config --autotuning",
        },
    ),
    ForeignOption(
        "leave it out: instances compute on CPUs",
        {
            ACCELERATE: "--cpu --multi-gpu --gpu-ids --tpu --ipex --use-xpu --use-cpu",
            GUESSED: "--gpu --device --devices",
        },
    ),
    # --- cores and memory ------------------------------------------------------------------------
    ForeignOption(
        "every instance gets cores of its own, near one another; `--process-placement` chooses how,"
        " and `--process-placement disabled` binds nothing",
        {
            OPEN_MPI: "--bind-to --map-by --rank-by --bynode --byslot --bycore --bysocket",
            MPICH: "--bind-to --map-by",
            SLURM: "--cpu-bind --mem-bind --distribution --hint",
            HOROVOD: "--binding-args --thread-affinity",
            ACCELERATE: "--enable-cpu-affinity",
            TORCHRUN: "--numa-binding",
            DEEPSPEED: "--bind-cores-to-rank --bind-core-list",
        },
    ),
    ForeignOption(
        "give the number of cores of each instance with `--cores-per-instance N`",
        {
            OPEN_MPI: "--cpus-per-proc --cpus-per-rank --pe",
            SLURM: "-c --cpus-per-task",
            ACCELERATE: "--num-cpu-threads-per-process",
            GUESSED: "--cpus",
        },
    ),
    ForeignOption(
        "run `taskset -c LIST poprun-py ...`: a job uses only the CPUs that it may use",
        {OPEN_MPI: "--cpu-set --cpu-list"},
    ),
    ForeignOption(
        "run one thread for each hardware thread with `--smt yes`",
        {OPEN_MPI: "--use-hwthread-cpus", SLURM: "--threads-per-core"},
    ),
    ForeignOption(
        "leave it out: more instances than CPUs are refused without `--oversubscribe`",
        {OPEN_MPI: "--nooversubscribe"},
    ),
    ForeignOption(
        "allow more instances than CPUs with `--oversubscribe`",
        {SLURM: "-O --overcommit"},
    ),
    ForeignOption(
        "give `--share-cores no`, or wait for free cores with `--wait-for-resources`",
        {SLURM: "--exclusive"},
    ),
    ForeignOption(
        "leave it out: a job starts at once, and shares cores if too few are free"
        " (`--share-cores no` refuses)",
        {SLURM: "--overlap --immediate"},
    ),
    ForeignOption(
        "give it to sbatch or salloc: poprun-py runs inside the allocation",
        {
            SLURM: "-p --partition -A --account -q --qos --reservation -C --constraint --gres"
            " --gpus --gpus-per-node --gpus-per-task --mem --mem-per-cpu --mem-per-gpu -a --array"
            " -d --dependency --begin --mail-type --mail-user --licenses --nice --requeue --wrap"
        },
    ),
    # --- MPI -------------------------------------------------------------------------------------
    ForeignOption(
        "pass it to mpirun with `--mpi-global-args`, such as `--mpi-global-args='--mca KEY VALUE'`",
        {
            OPEN_MPI: "--mca --gmca --omca --prtemca --pmixmca --tune --personality"
            " --runtime-options --xterm",
            HOROVOD: "--mpi-args",
            DEEPSPEED: "--launcher-args",
        },
    ),
    ForeignOption(
        "name the MPI with `--mpi DIR`",
        {OPEN_MPI: "--prefix"},
    ),
    # --- output and records ----------------------------------------------------------------------
    ForeignOption(
        "keep the whole output of every instance in files with `--output-dir DIR`",
        {
            TORCHRUN: "--log-dir -r --redirects -t --tee --logs-specs",
            OPEN_MPI: "--output-filename",
            HOROVOD: "--output-filename",
            SLURM: "-o -e --error --open-mode",
            ACCELERATE: "--log-dir --tee",
            DEEPSPEED: "--enable-each-rank-log",
            GUESSED: "--log-file --logdir --logs --save-dir",
        },
    ),
    ForeignOption(
        "leave it out: instances write each line at once",
        {SLURM: "-u --unbuffered"},
    ),
    ForeignOption(
        "choose the instances with `--only-output-from-instance 0,2-3`",
        {TORCHRUN: "--local-ranks-filter"},
    ),
    ForeignOption(
        "leave it out: each line begins with its instance; `--output plain` removes that",
        {OPEN_MPI: "--tag-output", SLURM: "-l --label", MPICH: "-l --prepend-rank"},
    ),
    ForeignOption(
        "add the time of day to each line with `--output time`",
        {
            OPEN_MPI: "--timestamp-output",
            HOROVOD: "--prefix-output-with-timestamp --prefix-timestamp",
        },
    ),
    ForeignOption(
        "print where the instances run with `--print-topology yes`",
        {
            OPEN_MPI: "--display --display-map --display-devel-map",
            MPICH: "--print-rank-map --print-all-exitcodes",
        },
    ),
    ForeignOption(
        "print the CPUs of every instance with `--print-topology cores`",
        {OPEN_MPI: "--report-bindings", MPICH: "--print-bindings"},
    ),
    ForeignOption(
        "print the processors of the hosts with `--print-hardware`",
        {OPEN_MPI: "--display-allocation --display-topo"},
    ),
    ForeignOption(
        "print the plan and the command with `--dry-run`",
        {OPEN_MPI: "--do-not-launch --show-progress", SLURM: "--test-only"},
    ),
    ForeignOption(
        "record a timeline with `--timeline FILE`",
        {HOROVOD: "--timeline-filename --timeline-mark-cycles", GUESSED: "--profile --trace"},
    ),
    ForeignOption(
        "write the log of the launcher with `-v` or `-vv`",
        {HOROVOD: "--log-level", ACCELERATE: "--debug", GUESSED: "--loglevel"},
    ),
    ForeignOption(
        "print the versions of all packages with `--version-format full-text`",
        {HOROVOD: "--check-build"},
    ),
    ForeignOption(
        "name the run with `--run-name NAME`",
        {SLURM: "-J --job-name", GUESSED: "--name --run-id"},
    ),
    ForeignOption(
        "add a note to the run with `--note TEXT`",
        {SLURM: "--comment", GUESSED: "--description"},
    ),
    ForeignOption(
        "read options from a file with `--import-config FILE`",
        {HOROVOD: "--config-file", ACCELERATE: "--config-file", GUESSED: "--config"},
    ),
    ForeignOption(
        "list the running jobs with `poprun-py jobs`, and end one with `poprun-py stop JOB`",
        {GUESSED: "--list --ps --kill --cancel"},
    ),
    ForeignOption(
        "list the recorded runs with `poprun-py runs`",
        {GUESSED: "--history --list-runs"},
    ),
    # --- limits and failures ---------------------------------------------------------------------
    ForeignOption(
        "limit the time with `--timeout TIME`, such as 90s, 5m or 1h30m",
        {SLURM: "-t --time --signal", GUESSED: "--time-limit --max-time --walltime"},
    ),
    ForeignOption(
        "restart after failures with `--max-restarts N`",
        {
            OPEN_MPI: "--enable-recovery",
            HOROVOD: "--reset-limit --blacklist-cooldown-range",
            DEEPSPEED: "--elastic-training --min-elastic-nodes --max-elastic-nodes",
            GUESSED: "--retries --restarts",
        },
    ),
    ForeignOption(
        "leave it out: the job ends when an instance fails",
        {SLURM: "-K --kill-on-bad-exit"},
    ),
    ForeignOption(
        "end a job that hangs with `--hang-timeout auto`; its report has all Python stacks",
        {
            HOROVOD: "--no-stall-check --stall-check-warning-time-seconds"
            " --stall-check-shutdown-time-seconds",
            OPEN_MPI: "--get-stack-traces --report-state-on-timeout",
        },
    ),
    ForeignOption(
        "leave it out: gradients are packed and reduced without settings",
        {
            HOROVOD: "--fusion-threshold-mb --cycle-time-ms --cache-capacity --disable-cache"
            " --autotune --autotune-log-file --autotune-warmup-samples --hierarchical-allreduce"
            " --hierarchical-allgather --num-nccl-streams"
        },
    ),
)


def foreign_options(spelled: str) -> dict[str, list[str]]:
    """Return advice for the users of an option, each with the launchers that have the option.

    The list of launchers is empty for a name that no launcher has. Underscores count as hyphens,
    one hyphen before a long name counts as two, and the value of a one-letter option may be
    attached to the letter.
    """
    name = spelled.partition("=")[0].replace("_", "-")
    is_short = not name.startswith("--")
    long_name = f"-{name}" if is_short and len(name) > 2 else name
    return _matches(long_name) or (_matches(name[:2]) if is_short else {})


def foreign_hint(spelled: str) -> str:
    """Return the end of the message about an unknown option; empty if no launcher has the option.

    The text names the launchers, and says what to do in place of giving the option.
    """
    found = {
        advice.replace("`", ""): launchers for advice, launchers in foreign_options(spelled).items()
    }
    if len(found) <= 1:
        return "".join(
            f"{f', an option of {_listed(launchers)}' if launchers else ''}: {advice}"
            for advice, launchers in found.items()
        )
    cases = (
        f"if you mean the option of {_listed(launchers)}, {advice}"
        for advice, launchers in found.items()
    )
    return f"; {'; '.join(cases)}"


def _matches(name: str) -> dict[str, list[str]]:
    found = {}
    for option in FOREIGN_OPTIONS:
        having = [who for who, spellings in option.spellings.items() if name in spellings.split()]
        if having:
            found[option.advice] = [launcher for launcher in having if launcher != GUESSED]
    return found


def _listed(launchers: list[str]) -> str:
    *others, last = launchers
    return f"{', '.join(others)} and {last}" if others else last
