"""Programs of the tutorials that run unchanged, and command lines of the launcher.

This module contains data only. ``running`` runs the programs, and ``test_programs`` compares their
output with ``printed/``.

A program consists of cells. A cell below ``# %% from the text`` is printed in a tutorial. A cell
below ``# %% typed by the reader`` contains parts that the text leaves to its reader, such as
imports. The same line names a repair of the text's form. Programs that were re-created from memory
have no cells, and their docstrings name the originals.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

__all__ = ["COMMANDS", "RUNS", "Command", "Run", "Within"]

#: The folder of the programs and their recorded outputs.
HERE = Path(__file__).resolve().parent


@dataclass(frozen=True)
class Within:
    """Limits of the number that the only group of ``pattern`` finds."""

    pattern: str
    low: float
    high: float


@dataclass(frozen=True)
class Run:
    """A program that runs as a user runs it.

    Attributes:
        file: The program, below this folder.
        command: The command that the reader types.
        launcher: Options of poprun-py; empty for one process without a launcher.
        notebook: Whether the file runs as the cells of a notebook.
        items: The number of items that ``TensorDataset`` keeps; 0 for all.
        environ: Environment variables of the program.
        code: The expected exit code.
        last: The number of last lines that are compared; 0 for all.
        numbers_vary: Whether the numbers in the output differ between runs.
        within: Limits of numbers in the output.
        by_default: Whether the test is a default test instead of a long one.
        saves: The number of instances whose checkpoints are compared.
    """

    name: str
    file: str
    command: str
    launcher: tuple[str, ...] = ()
    notebook: bool = False
    items: int = 0
    environ: tuple[tuple[str, str], ...] = ()
    code: int = 0
    last: int = 0
    numbers_vary: bool = True
    within: tuple[Within, ...] = ()
    by_default: bool = False
    saves: int = 0

    @property
    def words(self) -> list[str]:
        """The program's own arguments."""
        return self.command.split()[2:]


@dataclass(frozen=True)
class Command:
    """A command line of the launcher, as printed in ``commands/NAME.sh``.

    Attributes:
        rows: The numbers of hosts, IPU-Link domains, instances and replicas of the plan.
        repaired: The repairs in ``commands/NAME.repaired.sh``; empty if none is needed.
        as_printed: A part of the error without the repairs.
    """

    name: str
    rows: tuple[int, int, int, int]
    repaired: str = ""
    as_printed: str = ""


_ACCURACY = r"Accuracy on test set: ([\d.]+)%"
# Replicas run one after the other, because compiling a graph costs more than these few steps.
_LOOP = (("POPTORCH_DEFAULT_OPTIONS", '{"Emulator.replicaExecution": "loop"}'),)

RUNS = (
    # The data set has 800 of the 10,000 pictures, which is one step. The loader prepares it before
    # the clock starts, so its printed rate is not a measurement.
    Run(
        "data-loading", "programs/data_loading.py",
        "python3 data_loading.py",
        items=800,
    ),
    # The data set has 3,200 of the 10,000 pictures, which is one step of four replicas.
    Run(
        "data-loading-replicas", "programs/data_loading.py",
        "python3 data_loading.py --synthetic-data --replicas 4",
        items=3200, environ=_LOOP,
    ),
    Run(
        "data-loading-options", "programs/data_loading_options.py",
        "python3 data_loading_options.py",
        items=640, numbers_vary=False,
    ),
    # The data set has 8,000 pictures instead of 60,000, so the accuracy is lower than the text's.
    Run(
        "pipelining-notebook", "programs/pipelining_walkthrough.py",
        "python3 pipelining_walkthrough.py",
        notebook=True, within=(Within(_ACCURACY, 50, 100),),
    ),
    # The notebook lacks the `if __name__ == '__main__':` that the asynchronous loader needs in a
    # script. The program therefore ends with an error that names this reason.
    Run(
        "pipelining-as-a-script", "programs/pipelining_walkthrough.py",
        "python3 pipelining_walkthrough.py",
        code=1, last=1, numbers_vary=False,
    ),
    Run(
        "mnist-pipeline", "programs/mnist_pipeline.py",
        "python3 mnist_pipeline.py",
        within=(Within(_ACCURACY, 50, 100),),
    ),
    Run(
        "mnist-pipeline-debug", "programs/mnist_pipeline.py",
        "python3 mnist_pipeline.py --learning-rate 0.002 --debug --epochs 5",
        within=(Within(_ACCURACY, 70, 100),),
    ),
    # The program writes a timeline instead of the Graph Analyser's report.
    Run(
        "mnist-pipeline-profile", "programs/mnist_pipeline.py",
        "python3 mnist_pipeline.py --profile --profile-dir pipeline_profile",
        within=(Within(_ACCURACY, 50, 100),),
    ),
    Run(
        "mnist-pipeline-sharded", "programs/mnist_pipeline.py",
        "python3 mnist_pipeline.py --strategy sharded --profile --profile-dir sharding_profile",
        within=(Within(_ACCURACY, 80, 100),),
    ),
    Run(
        "mnist-pipeline-offload", "programs/mnist_pipeline.py",
        "python3 mnist_pipeline.py --offload-optimiser",
        within=(Within(_ACCURACY, 50, 100),),
    ),
    # This is the slides' last command with a micro-batch of 8 instead of 64, one device iteration
    # instead of 4, and one epoch of 65 pictures, because ResNet-101 runs on two cores. With smaller
    # micro-batches, half gradients overflow with the slides' loss scaling of 1000.
    Run(
        "hands-on", "programs/hands_on/main.py",
        "python main.py --batch-size 8 --precision 16.16 --gradient-accumulation 8"
        " --device-iteration 1 --eight-bit-io --async-dataloader --epochs 1",
        within=(Within(r"loss: ([\d.]+), acc", 0, 10),), environ=_LOOP,
    ),
    # This is the slides' first command with a micro-batch of 8 instead of 64. With 64, it ends with
    # an out-of-memory error of the IPU in the text and here.
    Run(
        "hands-on-single", "programs/hands_on/main.py",
        "python main.py --batch-size 8 --precision 32.32 --gradient-accumulation 3 --epochs 1",
        within=(Within(r"loss: ([\d.]+), acc", 0, 10),), environ=_LOOP,
    ),
    Run(
        "hands-on-fragments", "programs/hands_on_fragments.py",
        "python3 hands_on_fragments.py",
        numbers_vary=False,
    ),
    Run(
        "cores", "programs/cores.py", "python cores.py",
    ),
    # The printed block, `def __init__(self, ...)`, is not valid Python.
    Run(
        "my-dataset", "programs/my_dataset.py", "python my_dataset.py",
        numbers_vary=False,
    ),
    # The data set has 48 generated pictures instead of the 13,233 faces.
    Run(
        "lfw", "programs/lfw_dataset.py", "python lfw_dataset.py",
        numbers_vary=False,
    ),
    Run(
        "lfw-visualize", "programs/lfw_dataset.py",
        "python lfw_dataset.py -visualize_batch", numbers_vary=False,
    ),
    Run(
        "lfw-timing", "programs/lfw_dataset.py",
        "python lfw_dataset.py -get_timing -num_workers 1",
    ),
    # Without GPUs, `nn.DataParallel` runs the module on the CPU.
    Run(
        "data-parallel", "programs/data_parallel.py", "python data_parallel.py",
    ),
    Run(
        "introduction", "recreated/introduction.py", "python introduction.py",
        within=(Within(r"Eval accuracy: ([\d.]+)%", 60, 100),),
    ),
    Run(
        "mnist-poptorch", "recreated/mnist_poptorch.py",
        "python mnist_poptorch.py --epochs 1", within=(Within(_ACCURACY, 50, 100),),
    ),
    Run(
        "mixed-precision", "recreated/mixed_precision.py",
        "python mixed_precision.py --model-half --data-half --optimizer-half --stochastic-rounding"
        " --partials-half",
        within=(Within(r"Eval accuracy: ([\d.]+)%", 60, 100),),
    ),
    Run(
        "observing-tensors", "recreated/observing_tensors.py",
        "python observing_tensors.py", numbers_vary=False,
    ),
    Run(
        "pipelines-and-phases", "recreated/pipelines_and_phases.py",
        "python pipelines_and_phases.py", numbers_vary=False,
    ),
    Run(
        "multi-conv", "recreated/multi_conv.py", "python multi_conv.py",
    ),
    # Compiled operations are rejected, and the error names the alternative.
    Run(
        "custom-op", "recreated/custom_op.py", "python custom_op.py",
        numbers_vary=False, code=7,
    ),
    Run(
        "loops-and-slices", "recreated/loops_and_slices.py",
        "python loops_and_slices.py", numbers_vary=False, by_default=True,
    ),
    Run(
        "schedules-and-state", "recreated/schedules_and_state.py",
        "python schedules_and_state.py", numbers_vary=False,
    ),
    Run(
        "bert-pipeline", "recreated/bert_pipeline.py", "python bert_pipeline.py",
        numbers_vary=False,
    ),
    Run(
        "popdist-training-alone", "recreated/popdist_training.py",
        "python popdist_training.py --batch-size 4 --device-iterations 4 --epochs 1",
        within=(Within(r"loss ([\d.]+)", 0, 20),), environ=_LOOP, saves=1,
    ),
    Run(
        "popdist-training", "recreated/popdist_training.py",
        "python popdist_training.py --batch-size 4 --epochs 1",
        launcher=("--num-instances", "2", "--num-replicas", "4"), environ=_LOOP, saves=2,
    ),
    Run(
        "bert-metrics-alone", "recreated/bert_metrics.py", "python bert_metrics.py",
    ),
    Run(
        "bert-metrics", "recreated/bert_metrics.py", "python bert_metrics.py",
        launcher=("--num-instances", "2", "--num-replicas", "4"),
    ),
)  # fmt: skip

COMMANDS = (
    # This command is planned, and also runs a stand-in for train.py, which names its replicas.
    Command(
        "pod16", rows=(1, 1, 8, 16),
    ),
    # The hosts of the following commands are placeholders, so the commands are only planned.
    Command(
        "pod64",
        repaired="Two backslashes end their lines, without a blank behind them, and points in "
        "`xxx,xxx,xxx.0/16`.",
        as_printed="the command has 3 faults: (1) program ' --vipu-partition=pod64_partition_name' "
        "is an option that begins with a blank",
        rows=(4, 1, 32, 64),
    ),
    Command(
        "pod128",
        repaired="The blank in the list of hosts, where a line was broken, and `train.py` behind "
        "`python3`.",
        as_printed="the command has 2 faults: (1) --host has a blank after xxx.xxx.1.4",
        rows=(8, 2, 64, 128),
    ),
    Command(
        "pod256",
        repaired="Three blanks and one missing comma in the list of hosts, and `train.py` behind "
        "`python3`.",
        as_printed="the command has 2 faults: (1) --host has a blank after xxx.xxx.1.4, "
        "xxx.xxx.2.4, xxx.xxx.3.4, and no comma between xxx.xxx.2.4 and xxx.xxx.3.1",
        rows=(16, 4, 128, 256),
    ),
)  # fmt: skip
