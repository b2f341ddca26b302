"""The course on distributed data loading and training, second module: what its reader runs."""

from __future__ import annotations

from tools.pages.seed_texts.values import Figure, Quantity, Text, TextCommand

__all__ = ["FIGURES", "TEXT"]

_COURSE = "examples/course"
_SMALL = ("--data-dir", "{data}", "--epochs", "1", "--items", "2001")
_LAUNCH = ("python", "-m", "poprun_py", "--num-instances", "2", "--output", "plain")
_CLOTHES = (
    "The data are outlines of handwritten digits in FashionMNIST's files, and few of them, so that "
    "accuracies are not those of clothes."
)
_MODELLED = (
    "This machine has no two devices: transfers and computing are those of the model of the IPU, "
    "and torch's own nn.DataParallel runs the model once on a CPU. What is sent is counted while "
    "the steps are done one by one."
)

TEXT = Text(
    title="The course on distributed data loading and training: distributed training",
    page="course.md",
    commands=(
        TextCommand(
            text="preds = model(input)  # nn.DataParallel(model, device_ids=[0, 1])",
            shows=(),
            here=("python", "data_parallel.py", "--data-dir", "{data}", "--batch-size", "64"),
            folder=_COURSE,
            why=_MODELLED,
            keep=(r"^  ", r"^largest difference", r"^torch's own"),
        ),
        TextCommand(
            text="for _ in range(n_reps): out = model(batch)",
            shows=(),
            here=("python", "data_parallel.py", "--data-dir", "{data}"),
            folder=_COURSE,
            why=_MODELLED + " The batch size from which it pays off is that of the model.",
            keep=(r"^microseconds", r"^batch ", r"faster"),
            numbers_vary=False,
        ),
        TextCommand(
            text="the same, with the batch size played around with, and measured",
            shows=(),
            here=(
                "python", "data_parallel.py", "--data-dir", "{data}", "--compute", "host",
                "--batch-size", "8", "32", "128",
            ),
            folder=_COURSE,
            why="Computing is measured on one core, which is far slower than a device: beside it "
            "the modelled transfers are short.",
            keep=(r"^microseconds", r"^batch "),
        ),
        TextCommand(
            text="Empirically distributed data parallel tends to be 2-3 times faster than data "
            "parallel.",
            shows=(),
            here=("python", "threads_or_processes.py", "--steps", "20", "--repetitions", "3"),
            folder=_COURSE,
            why="The text's factor is that of GPUs. Here, two threads are compared with two "
            "processes on two cores.",
            keep=(r"^DDP is",),
            quantities=(
                Quantity("DDP's speed over DP's:", 2.5, r"^DDP is ([\d.]+) times", factor=1.25),
            ),
            compared="The text's 2 to 3 is taken as 2.5 within a factor of 1.25.",
            at_most_partly=True,
            seconds=300,
        ),
        TextCommand(
            text="distributed_example.sh",
            shows=(),
            here=(
                "bash", "distributed_example.sh", *_SMALL, "--show-environment", "--show-samples",
            ),
            folder=_COURSE,
            why="The course's own script is not part of its text; ours starts two processes of "
            "this host. " + _CLOTHES,
            keep=(r"^[A-Z_]+=", r"^rank ", r"^together ", r"^epoch \d+: last", r"^test accuracy"),
        ),
        TextCommand(
            text="distributed_example.py, what the DDP wrapper does",
            shows=(),
            here=(*_LAUNCH, "distributed_example.py", *_SMALL, "--without-ddp"),
            folder=_COURSE,
            why="Without the wrapper each rank trains for itself, and the weights part.",
            keep=(r"^epoch \d+: last", r"^test accuracy"),
        ),
        TextCommand(
            text="distributed_example.py, what dist.barrier() does",
            shows=(),
            here=(*_LAUNCH, "distributed_example.py", *_SMALL, "--late-rank", "2"),
            folder=_COURSE,
            why="A rank that comes late stands for a slow disk.",
            keep=(r"^rank ",),
        ),
        TextCommand(
            text="Try to benchmark the runs using 1 and 2 GPUs",
            shows=(),
            here=("python", "speed_up.py", "--steps", "20", "--repetitions", "2"),
            folder=_COURSE,
            why="A device is a core of this machine, and an instance has one.",
            keep=(r"^one instance",),
            seconds=180,
        ),
        TextCommand(
            text='trainer = Trainer(accelerator="gpu", gpus=2)',
            shows=(),
            here=(*_LAUNCH, "lightning_example.py", *_SMALL),
            folder=_COURSE,
            why="Lightning 2 names the flag devices, and a device of accelerator cpu is a process. "
            + _CLOTHES,
            keep=(r"epoch\(s\) in",),
        ),
        TextCommand(
            text="How much of a speedup can you actually get? Why can you not get a speedup of 2?",
            shows=(),
            here=("python", "speed_up.py", "--steps", "20", "--repetitions", "2"),
            folder=_COURSE,
            why="Each reason is measured apart, on the cores of this machine.",
            keep=(r"^[a-zD].*\d%", r"^serial share", r"^start", r"^  speed-up"),
            seconds=180,
        ),
    ),
)  # fmt: skip

FIGURES: tuple[Figure, ...] = (
    Figure(
        name="course-data-parallel.svg",
        command=("python", "examples/course/data_parallel.py", "--figure", "{file}"),
        marks=("one-device", "replicate-model", "compute", "gather-outputs"),
        same_each_time=True,
    ),
    Figure(
        name="course-speed-up.svg",
        command=("python", "examples/course/speed_up.py", "--figure", "{file}"),
        marks=("one-instance", "half-a-step-of-one", "optimiser", "reduction", "unexplained"),
        same_each_time=False,
        seconds=240,
    ),
)
