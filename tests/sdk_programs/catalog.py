"""What is run of the tutorials: programs with their words, and command lines of the launcher.

Data only. ``running`` runs it, ``test_programs`` compares, and ``tutorials_verbatim`` makes a
page of it, with what ``printed/`` holds.

A program consists of cells. ``# %% from the text`` begins what is printed in a tutorial, ``# %%
typed by the reader`` what its text leaves to its reader; a repair of the text's form is noted in
the same line. What is re-created from memory has no cells: its docstring names the original.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

__all__ = ["COMMANDS", "RUNS", "Command", "Run", "Within"]

#: The folder of the programs and of what they printed.
HERE = Path(__file__).resolve().parents[2] / "tests" / "sdk_programs"


@dataclass(frozen=True)
class Within:
    """The number that the only group of ``pattern`` finds is from ``low`` to ``high``."""

    pattern: str
    low: float
    high: float


@dataclass(frozen=True)
class Run:
    """A program that is run as a user does.

    ``command`` is what the reader types; the program stands in ``file``, below this folder.
    ``launcher`` are options of poprun-py, or none for a process alone; ``notebook`` runs the file
    as the cells of a notebook. ``text`` is what the tutorial shows, ``about`` says what is another
    here. Of what it shows, the ``last`` lines count, or all with 0. The weights of ``saves``
    instances are in checkpoints afterwards.
    """

    name: str
    title: str
    file: str
    command: str
    text: str = ""
    about: str = ""
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

    ``repaired`` says what ``commands/NAME.repaired.sh`` repairs, and ``as_printed`` what happens
    without it. ``rows`` are the hosts, IPU-Link domains, instances and replicas of the plan.
    """

    name: str
    rows: tuple[int, int, int, int]
    about: str
    repaired: str = ""
    as_printed: str = ""


_DATA = 'Tutorial "Efficient data loading with PopTorch"'
_PIPELINE = 'Tutorial "PopTorch parallel execution using pipelining"'
_HANDS_ON = "IPU hands-on session, day 3: optimisation"
_COURSE = 'MLOps course, "Distributed data loading" and "Distributed training"'
_MEMORY = "Re-created from memory"
_ACCURACY = r"Accuracy on test set: ([\d.]+)%"
# Replicas run one after the other, because compiling a graph costs more than these few steps.
_LOOP = (("POPTORCH_DEFAULT_OPTIONS", '{"Emulator.replicaExecution": "loop"}'),)

RUNS = (
    Run(
        "data-loading", _DATA, "programs/data_loading.py",
        "python3 data_loading.py",
        text="DataLoader throughput: 70523 items/s\nReal data throughput: 17150 items/s",
        about="800 of the 10,000 pictures: one step. The loader has the step ready before the "
        "clock starts, so that its number says little; `benchmarks/dataloader.py` measures.",
        items=800,
    ),
    Run(
        "data-loading-replicas", _DATA, "programs/data_loading.py",
        "python3 data_loading.py --synthetic-data --replicas 4",
        text="DataLoader throughput: 182716 items/s\nSynthetic data throughput: 40773 items/s",
        about="3,200 of the 10,000 pictures: one step of four replicas, which share this machine's "
        "cores: the text's gain by replication is hardware's.",
        items=3200, environ=_LOOP,
    ),
    Run(
        "data-loading-options", _DATA, "programs/data_loading_options.py",
        "python3 data_loading_options.py",
        items=640, numbers_vary=False,
    ),
    Run(
        "pipelining-notebook", _PIPELINE, "programs/pipelining_walkthrough.py",
        "python3 pipelining_walkthrough.py",
        text="Epoch 1/3\n"
        "Loss:0.1422 | Accuracy:95.78%: 100%|██████████| 15/15 [01:37<00:00,  6.49s/it]\n"
        "Epoch 2/3\n"
        "Loss:0.0909 | Accuracy:97.10%: 100%|██████████| 15/15 [00:00<00:00, 15.04it/s]\n"
        "Epoch 3/3\n"
        "Loss:0.0707 | Accuracy:97.80%: 100%|██████████| 15/15 [00:01<00:00, 14.89it/s]\n"
        "100%|██████████| 12/12 [00:40<00:00,  3.37s/it]Accuracy on test set: 98.41%",
        about="8,000 pictures instead of 60,000: 2 steps an epoch instead of 15, so that the "
        "accuracy is lower. What a notebook shows of the options below its cells is tested too.",
        notebook=True, within=(Within(_ACCURACY, 50, 100),),
    ),
    Run(
        "pipelining-as-a-script", _PIPELINE, "programs/pipelining_walkthrough.py",
        "python3 pipelining_walkthrough.py",
        about="The notebook as a script has no `if __name__ == '__main__':`, of which the text "
        "says that the asynchronous loader needs it: refused with that reason.",
        code=1, last=1, numbers_vary=False,
    ),
    Run(
        "mnist-pipeline", _PIPELINE, "programs/mnist_pipeline.py",
        "python3 mnist_pipeline.py",
        within=(Within(_ACCURACY, 50, 100),),
    ),
    Run(
        "mnist-pipeline-debug", _PIPELINE, "programs/mnist_pipeline.py",
        "python3 mnist_pipeline.py --learning-rate 0.002 --debug --epochs 5",
        within=(Within(_ACCURACY, 70, 100),),
    ),
    Run(
        "mnist-pipeline-profile", _PIPELINE, "programs/mnist_pipeline.py",
        "python3 mnist_pipeline.py --profile --profile-dir pipeline_profile",
        about="In place of the Graph Analyser's report a timeline is written.",
        within=(Within(_ACCURACY, 50, 100),),
    ),
    Run(
        "mnist-pipeline-sharded", _PIPELINE, "programs/mnist_pipeline.py",
        "python3 mnist_pipeline.py --strategy sharded --profile --profile-dir sharding_profile",
        within=(Within(_ACCURACY, 80, 100),),
    ),
    Run(
        "mnist-pipeline-offload", _PIPELINE, "programs/mnist_pipeline.py",
        "python3 mnist_pipeline.py --offload-optimiser",
        about="Where the optimiser's state lies changes no number here.",
        within=(Within(_ACCURACY, 50, 100),),
    ),
    Run(
        "hands-on", _HANDS_ON, "programs/hands_on/main.py",
        "python main.py --batch-size 8 --precision 16.16 --gradient-accumulation 8"
        " --device-iteration 1 --eight-bit-io --async-dataloader --epochs 1",
        text="Namespace(async_dataloader=False, batch_size=64, device_iterations=1,  \n"
        "eight_bit_io=False, epochs=5, gradient_accumulation=3, precision='16.16', replicas=1)\n"
        "[Epoch 01]: 100%|██████████| 24/24 [08:32<00:00, 21.35s/it, loss=1.27, acc=50]\n"
        "[Epoch 01] loss: 1.758, acc: 34.2",
        about="The slides' last command with a micro-batch of 8 instead of 64, one device "
        "iteration instead of 4 and one epoch of 65 pictures: ResNet-101 on two cores. Half "
        "gradients times the slides' loss scaling of 1000 just fit with 64 pictures, and overflow "
        "with 4.",
        within=(Within(r"loss: ([\d.]+), acc", 0, 10),), environ=_LOOP,
    ),
    Run(
        "hands-on-single", _HANDS_ON, "programs/hands_on/main.py",
        "python main.py --batch-size 8 --precision 32.32 --gradient-accumulation 3 --epochs 1",
        text="Namespace(async_data_loader=False, batch_size=64, device_iterations=1,  \n"
        "eight_bit_io=False, epochs=1, gradient_accumulation=3, precision='32.32', replicas=1)",
        about="The slides' first command with a micro-batch of 8 instead of 64. With 64 it ends "
        "with an out-of-memory error of the IPU, there and here.",
        within=(Within(r"loss: ([\d.]+), acc", 0, 10),), environ=_LOOP,
    ),
    Run(
        "hands-on-fragments", _HANDS_ON, "programs/hands_on_fragments.py",
        "python3 hands_on_fragments.py",
        numbers_vary=False,
    ),
    Run(
        "cores", _COURSE, "programs/cores.py", "python cores.py",
    ),
    Run(
        "my-dataset", _COURSE, "programs/my_dataset.py", "python my_dataset.py",
        about="As printed the block is no Python: `def __init__(self, ...)`.",
        numbers_vary=False,
    ),
    Run(
        "lfw", _COURSE, "programs/lfw_dataset.py", "python lfw_dataset.py",
        about="48 generated pictures instead of the 13,233 faces.", numbers_vary=False,
    ),
    Run(
        "lfw-visualize", _COURSE, "programs/lfw_dataset.py",
        "python lfw_dataset.py -visualize_batch", numbers_vary=False,
    ),
    Run(
        "lfw-timing", _COURSE, "programs/lfw_dataset.py",
        "python lfw_dataset.py -get_timing -num_workers 1",
    ),
    Run(
        "data-parallel", _COURSE, "programs/data_parallel.py", "python data_parallel.py",
        about="Without GPUs `nn.DataParallel` runs the module where it is.",
    ),
    Run(
        "introduction", _MEMORY, "recreated/introduction.py", "python introduction.py",
        within=(Within(r"Eval accuracy: ([\d.]+)%", 60, 100),),
    ),
    Run(
        "mnist-poptorch", _MEMORY, "recreated/mnist_poptorch.py",
        "python mnist_poptorch.py --epochs 1", within=(Within(_ACCURACY, 50, 100),),
    ),
    Run(
        "mixed-precision", _MEMORY, "recreated/mixed_precision.py",
        "python mixed_precision.py --model-half --data-half --optimizer-half --stochastic-rounding"
        " --partials-half",
        within=(Within(r"Eval accuracy: ([\d.]+)%", 60, 100),),
    ),
    Run(
        "observing-tensors", _MEMORY, "recreated/observing_tensors.py",
        "python observing_tensors.py", numbers_vary=False,
    ),
    Run(
        "pipelines-and-phases", _MEMORY, "recreated/pipelines_and_phases.py",
        "python pipelines_and_phases.py", numbers_vary=False,
    ),
    Run(
        "multi-conv", _MEMORY, "recreated/multi_conv.py", "python multi_conv.py",
    ),
    Run(
        "custom-op", _MEMORY, "recreated/custom_op.py", "python custom_op.py",
        about="A compiled operation is refused, in words that say what to do.",
        numbers_vary=False, code=7,
    ),
    Run(
        "loops-and-slices", _MEMORY, "recreated/loops_and_slices.py",
        "python loops_and_slices.py", numbers_vary=False, by_default=True,
    ),
    Run(
        "schedules-and-state", _MEMORY, "recreated/schedules_and_state.py",
        "python schedules_and_state.py", numbers_vary=False,
    ),
    Run(
        "bert-pipeline", _MEMORY, "recreated/bert_pipeline.py", "python bert_pipeline.py",
        numbers_vary=False,
    ),
    Run(
        "popdist-training-alone", _MEMORY, "recreated/popdist_training.py",
        "python popdist_training.py --batch-size 4 --device-iterations 4 --epochs 1",
        within=(Within(r"loss ([\d.]+)", 0, 20),), environ=_LOOP, saves=1,
    ),
    Run(
        "popdist-training", _MEMORY, "recreated/popdist_training.py",
        "python popdist_training.py --batch-size 4 --epochs 1",
        launcher=("--num-instances", "2", "--num-replicas", "4"), environ=_LOOP, saves=2,
    ),
    Run(
        "bert-metrics-alone", _MEMORY, "recreated/bert_metrics.py", "python bert_metrics.py",
    ),
    Run(
        "bert-metrics", _MEMORY, "recreated/bert_metrics.py", "python bert_metrics.py",
        launcher=("--num-instances", "2", "--num-replicas", "4"),
    ),
)  # fmt: skip

_CNN_HOSTS = "Hosts are the text's `xxx.xxx.xxx.1`: planned, not started."

COMMANDS = (
    Command(
        "pod16", rows=(1, 1, 8, 16),
        about="Planned; and run with a stand-in for train.py, which names its replicas.",
    ),
    Command(
        "pod64",
        repaired="Two backslashes end their lines, without a blank behind them, and points in "
        "`xxx,xxx,xxx.0/16`.",
        as_printed="the command has 3 faults: (1) program ' --vipu-partition=pod64_partition_name' "
        "is an option after a blank",
        rows=(4, 1, 32, 64), about=_CNN_HOSTS,
    ),
    Command(
        "pod128",
        repaired="The blank in the list of hosts, where a line was broken, and `train.py` behind "
        "`python3`.",
        as_printed="the command has 2 faults: (1) --host has a blank after xxx.xxx.1.4",
        rows=(8, 2, 64, 128), about=_CNN_HOSTS,
    ),
    Command(
        "pod256",
        repaired="Three blanks and one missing comma in the list of hosts, and `train.py` behind "
        "`python3`.",
        as_printed="the command has 2 faults: (1) --host has a blank after xxx.xxx.1.4, "
        "xxx.xxx.2.4, xxx.xxx.3.4, and no comma between xxx.xxx.2.4 and xxx.xxx.3.1",
        rows=(16, 4, 128, 256), about=_CNN_HOSTS,
    ),
)  # fmt: skip
