"""PopTorch's tutorial on pipelining: what it has its reader run, and the figures of ours."""

from __future__ import annotations

from tools.pages.seed_texts.values import Figure, Text, TextCommand

__all__ = ["FIGURES", "TEXT"]

_FOLDER = "examples/pipelining"
_KEEP = (r"^Epoch ", r"\| Accuracy:.* 100%", r"^100%", r"^Accuracy on test set", r"^profile: ")
_SHORT = (
    "Two steps of an epoch and of the test: 8,000 of the 60,000 pictures, which takes less of your "
    "time; without `--steps` all of them."
)
_PROGRAM = ("python", "mnist_pipeline.py", "--data-dir", "{data}/pipelining", "--steps", "2")
_SERVER = "A server waits for a browser, and nobody opens one here. A test runs the notebook."

TEXT = Text(
    title="Parallel execution using pipelining",
    page="pipelining.md",
    commands=(
        TextCommand(
            text="python3 -m pip install -r requirements.txt",
            shows=(),
            here=(),
            folder=_FOLDER,
            why="The folder has this file; what it names is installed with the project.",
        ),
        TextCommand(
            text="python3 -m pip install jupyter",
            shows=(),
            here=(),
            folder=_FOLDER,
            why="Any notebook server opens `walkthrough.ipynb`; none is needed to run its cells.",
        ),
        TextCommand(
            text="jupyter-notebook --no-browser --port <port number>",
            shows=(),
            here=(),
            folder=_FOLDER,
            why=_SERVER,
        ),
        TextCommand(
            text="ssh -NL <port number>:localhost:<port number> <your username>@<remote machine>",
            shows=(),
            here=(),
            folder=_FOLDER,
            why=_SERVER,
        ),
        TextCommand(
            text="train(training_model, training_data); test(inference_model, test_data)",
            shows=(
                "Epoch 1/3",
                "Loss:0.1422 | Accuracy:95.78%: 100%|██████████| 15/15 [01:37<00:00,  6.49s/it]",
                "Epoch 2/3",
                "Loss:0.0909 | Accuracy:97.10%: 100%|██████████| 15/15 [00:00<00:00, 15.04it/s]",
                "Epoch 3/3",
                "Loss:0.0707 | Accuracy:97.80%: 100%|██████████| 15/15 [00:01<00:00, 14.89it/s]",
                "100%|██████████| 12/12 [00:40<00:00,  3.37s/it]Accuracy on test set: 98.41%",
            ),
            here=("python", "walkthrough.py", "--data-dir", "{data}/pipelining"),
            folder=_FOLDER,
            why="The notebook's cells as a script, in full. The text's first step has more than a "
            "minute of compilation, and its other steps an IPU; here two cores compute all.",
            keep=_KEEP,
            seconds=600,
        ),
        TextCommand(
            text="python3 mnist_pipeline.py",
            shows=(),
            here=_PROGRAM,
            folder=_FOLDER,
            why=_SHORT,
            keep=_KEEP,
        ),
        TextCommand(
            text="python3 mnist_pipeline.py -h",
            shows=(),
            here=("python", "mnist_pipeline.py", "-h"),
            folder=_FOLDER,
            why="The text lists its options in words. `--gradient-accumulation`, "
            "`--inference-iterations`, `--data-dir`, `--steps`, `--workers`, `--device` and "
            "`--seed` are ours.",
            keep=(r"^  -", r"^usage"),
            numbers_vary=False,
        ),
        TextCommand(
            text="python3 mnist_pipeline.py --learning-rate 0.002 --debug --epochs 5",
            shows=(),
            here=(*_PROGRAM, "--learning-rate", "0.002", "--debug", "--epochs", "5"),
            folder=_FOLDER,
            why="The log is that of PopTorch's Python side; there is no compiler for IPUs below "
            f"it that would log more. {_SHORT}",
            keep=(*_KEEP, r"\[debug\]"),
            seconds=240,
        ),
        TextCommand(
            text="python3 mnist_pipeline.py --profile --profile-dir pipeline_profile",
            shows=(),
            here=(
                *_PROGRAM,
                "--epochs",
                "1",
                "--profile",
                "--profile-dir",
                "{out}/pipeline_profile",
            ),
            folder=_FOLDER,
            why="In place of a `profile.pop` for the Graph Analyser there are reports as text, "
            f"JSON and a page, all modelled, and a timeline of this machine. {_SHORT}",
            keep=_KEEP,
        ),
        TextCommand(
            text="python3 mnist_pipeline.py --strategy sharded --profile --profile-dir "
            "sharding_profile",
            shows=(),
            here=(
                *(*_PROGRAM, "--epochs", "1", "--strategy", "sharded"),
                *("--profile", "--profile-dir", "{out}/sharding_profile"),
            ),
            folder=_FOLDER,
            why="The same numbers come out as pipelined, in another order of the IPUs' work. "
            "`figures.py --compare` draws both profiles.",
            keep=_KEEP,
        ),
        TextCommand(
            text="python3 mnist_pipeline.py --offload-optimiser",
            shows=(),
            here=(*_PROGRAM, "--epochs", "1", "--offload-optimiser"),
            folder=_FOLDER,
            why="Where the optimiser's state lies changes no number of the training; what it "
            "costs is modelled, and drawn by `figures.py offload`.",
            keep=_KEEP,
        ),
    ),
)


def _figure(name: str, *marks: str) -> Figure:
    program = ("python", "examples/pipelining/figures.py", name, "--output", "{file}")
    return Figure(f"pipelining-{name}.svg", program, marks, same_each_time=True)


FIGURES = (
    _figure("ramp-up", "all-ipus-work", "after 9 steps", "ramp-up-backward-3-5"),
    _figure("strategies", "pipelined: 22 steps", "sharded: 64 steps", "sharded-forward-3-4"),
    _figure("progression", "progression-forward-3-4", "progression-backward-0-11", "#5fbf77"),
    _figure("offload", "state-on-2", "state-off-2", "update-off-2"),
)
