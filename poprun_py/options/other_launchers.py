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
        "name the hosts with `--host node[0-1]`; inside Slurm and on this machine, no option is"
        " needed",
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
        "give a fixed number of instances with `--num-instances N`; to restart a job that loses a"
        " host, give `--max-restarts N` and `--allow-fewer-hosts`",
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
        "remove this option, because the launcher connects the instances, and sets `MASTER_ADDR`,"
        " `MASTER_PORT` and the ranks",
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
        "remove this option, because a job without `--host` runs only on this machine",
        {TORCHRUN: "--standalone"},
    ),
    ForeignOption(
        "remove this option, because the launcher chooses the transports of MPI"
        " (`--mpi-fast-start`)",
        {HOROVOD: "--gloo --jsrun --tcp --mpi-threads-disable", MPICH: "--launcher --rmk"},
    ),
    ForeignOption(
        "remove this option, because the launcher waits for all instances",
        {HOROVOD: "--start-timeout --gloo-timeout-seconds"},
    ),
    # --- the program -----------------------------------------------------------------------------
    ForeignOption(
        "remove this option, because only a program whose name ends in .py runs under Python",
        {TORCHRUN: "--no-python --run-path", ACCELERATE: "--no-python", DEEPSPEED: "--no-python"},
    ),
    ForeignOption(
        "give one program for all instances, which chooses its work by `RANK` or"
        " `popdist_py.getInstanceIndex()`",
        {OPEN_MPI: "--app", MPICH: "--configfile", SLURM: "--multi-prog"},
    ),
    ForeignOption(
        "run `cd DIR` first, because the instances run in the folder in which poprun-py was"
        " started",
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
        "remove this option, because instance 0 reads the keyboard or a pipe; `--stdin-instance`"
        " chooses another instance",
        {SLURM: "-i --input --pty", GUESSED: "--interactive"},
    ),
    ForeignOption(
        "choose this in the program; give options of the program after its name",
        {
            ACCELERATE: "--mixed-precision --use-fsdp --use-deepspeed --use-megatron-lm"
            " --use-parallelism-config --use-tp --dynamo-backend --zero-stage"
            " --gradient-accumulation-steps --downcast-bf16 --main-training-function",
            DEEPSPEED: "--deepspeed --deepspeed-config --autotuning",
        },
    ),
    ForeignOption(
        "remove this option, because instances compute on CPUs",
        {
            ACCELERATE: "--cpu --multi-gpu --gpu-ids --tpu --ipex --use-xpu --use-cpu",
            GUESSED: "--gpu --device --devices",
        },
    ),
    # --- cores and memory ------------------------------------------------------------------------
    ForeignOption(
        "remove this option, because every instance is bound to its own cores;"
        " `--process-placement MODE` chooses these cores, and `--process-placement disabled`"
        " switches the binding off",
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
        "run `taskset -c LIST poprun-py ...`, because a job uses only the CPUs of its launcher",
        {OPEN_MPI: "--cpu-set --cpu-list"},
    ),
    ForeignOption(
        "run one compute thread on each hardware thread with `--smt yes`",
        {OPEN_MPI: "--use-hwthread-cpus", SLURM: "--threads-per-core"},
    ),
    ForeignOption(
        "remove this option, because more instances than CPUs need `--oversubscribe`",
        {OPEN_MPI: "--nooversubscribe"},
    ),
    ForeignOption(
        "allow more instances than CPUs with `--oversubscribe`",
        {SLURM: "-O --overcommit"},
    ),
    ForeignOption(
        "give `--share-cores no` to start only on free cores, or `--wait-for-resources` to wait for"
        " free cores",
        {SLURM: "--exclusive"},
    ),
    ForeignOption(
        "remove this option, because a job starts at once, and shares cores if too few are free;"
        " with `--share-cores no`, such a job does not start",
        {SLURM: "--overlap --immediate"},
    ),
    ForeignOption(
        "give this option to sbatch or salloc, because poprun-py runs inside their allocation",
        {
            SLURM: "-p --partition -A --account -q --qos --reservation -C --constraint --gres"
            " --gpus --gpus-per-node --gpus-per-task --mem --mem-per-cpu --mem-per-gpu -a --array"
            " -d --dependency --begin --mail-type --mail-user --licenses --nice --requeue --wrap"
        },
    ),
    # --- MPI -------------------------------------------------------------------------------------
    ForeignOption(
        "pass this option to mpirun with `--mpi-global-args`, such as"
        " `--mpi-global-args='--mca KEY VALUE'`",
        {
            OPEN_MPI: "--mca --gmca --omca --prtemca --pmixmca --tune --personality"
            " --runtime-options --xterm",
            HOROVOD: "--mpi-args",
            DEEPSPEED: "--launcher-args",
        },
    ),
    ForeignOption(
        "name the folder of the MPI installation with `--mpi DIR`",
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
        "remove this option, because instances write each line at once",
        {SLURM: "-u --unbuffered"},
    ),
    ForeignOption(
        "choose the instances whose output is shown with `--only-output-from-instance 0,2-3`",
        {TORCHRUN: "--local-ranks-filter"},
    ),
    ForeignOption(
        "remove this option, because each line begins with its instance; `--output plain` removes"
        " this prefix",
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
        "remove this option, because the job ends when an instance fails",
        {SLURM: "-K --kill-on-bad-exit"},
    ),
    ForeignOption(
        "end a hung job with `--hang-timeout auto`; the report of the job has all Python stacks",
        {
            HOROVOD: "--no-stall-check --stall-check-warning-time-seconds"
            " --stall-check-shutdown-time-seconds",
            OPEN_MPI: "--get-stack-traces --report-state-on-timeout",
        },
    ),
    ForeignOption(
        "remove this option, because poprun-py packs and reduces gradients without settings",
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
