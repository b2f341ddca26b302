"""PopTorch's tutorial on pipelining: what it has its reader run, and the figures of ours."""

from __future__ import annotations

from tools.pages.seed_texts.values import FIELDS, OPTIONS, Figure, Text, TextCommand

__all__ = ["FIGURES", "TEXT"]

_FOLDER = "examples/pipelining"
_KEEP = (
    r"^Graph compilation: 100%",
    r"^Epoch ",
    r"\| Accuracy:.* 100%",
    r"^100%",
    r"^Accuracy on test set",
    r"^profile: ",
)
_SHORT = (
    "Two steps of an epoch and of the test: 8,000 of the 60,000 pictures, which takes less of your "
    "time; without `--steps` all of them."
)
_PROGRAM = ("python", "mnist_pipeline.py", "--data-dir", "{data}/pipelining", "--steps", "2")
_SERVER = "A server waits for a browser, and nobody opens one here. A test runs the notebook."

_POPART = "_PopartOptions(instrumentWithHardwareCycleCounter=False, rearrangeAnchorsOnHost=False)"
_STATE = "_warnings={}, _warnings_disabled=set(), _is_frozen=False)"
_AUTOCAST = (
    "autocast_enabled=True, autocast_policy=<poptorch.autocasting.Policy object at 0x7f5b69496780>,"
    " autocast_policy_dict={'fp16': ['addbmm', 'addmm', 'addmv', 'addr', 'baddbmm', 'bmm', 'at', "
    "'conv1d', 'conv2d', 'conv3d', 'conv_tbc', 'conv_transpose1d', 'conv_transpose2d', "
    "'conv_transpose3d', 'convolution', 'matmul', 'mm', 'mv'], 'fp32': [], 'promote': ['addcdiv', "
    "'addcmul', 'atan2', 'bilinear', 'cat', 'cross', 'dot', 'equal', 'index_put', 'stack', 'at'], "
    "'demote': []}"
)


def _training_shown(gradient_accumulation: int) -> str:
    return (
        f"_TrainingOptions(gradient_accumulation={gradient_accumulation}, "
        "accumulation_and_replication_reduction_type=<ReductionType.Mean: 1>, "
        "meanAccumulationAndReplicationReductionStrategy=<MeanReductionStrategy.Post: 1>, "
        f"_popart_options={_POPART}, {_STATE}"
    )


def _options_shown(device_iterations: int, output_mode: int, location: str, training: str) -> str:
    """Return the line that the text shows for whole options."""
    return (
        "replication_factor=1Options(, broadcast_buffers=TrueOptions(, device_iterations="
        f"{device_iterations}Options(, log_dir='.'Options(, auto_round_num_ipus=FalseOptions(, "
        f"anchored_tensors={{}}Options(, output_mode={output_mode}Options(, "
        "output_return_period=1Options(, connection_type=0Options(, sync_pattern=0Options(, "
        "available_memory_proportion={}Distributed=_DistributedOptions(num_distributed_processes=1,"
        f" distributed_process_id=0, ipuof_configs={{}}, _gcd_mappings={{}}, {_STATE}, , "
        f"Jit=_JitOptions(trace_model=False, {_STATE}, , Precision=_PrecisionOptions({_AUTOCAST}, "
        "half_float_casting=<HalfFloatCastingBehavior.Default: 2>, "
        f"_popart_options={_POPART}, {_STATE}, , TensorLocations=_TensorLocationOptions("
        f"{location}, {_STATE}, , Training={training}, , _Popart={_POPART})"
    )


# The cells of the notebook that end with a setter, up to each of them.
_CELLS = (
    "train_opts.setExecutionStrategy(poptorch.PipelinedExecution(*(poptorch.Stage(f'B{i + 1}')"
    ".ipu(i) for i in range(4))))",
    "train_opts.deviceIterations(10).Training.gradientAccumulation(10)",
    "train_opts.TensorLocations.setOptimizerLocation(poptorch.TensorLocationSettings()"
    ".useOnChipStorage(False))",
    "train_opts.outputMode(poptorch.OutputMode.All)",
)


def _cell(text: str, number: int, shows: str) -> TextCommand:
    """Return a cell whose last line shows options."""
    program = [
        "from popdist_py import poptorch", "train_opts = poptorch.Options()", *_CELLS[:number],
        f"print({_CELLS[number]})",
    ]  # fmt: skip
    return TextCommand(
        text, (shows,), ("python", "-c", "; ".join(program)), ".",
        "The fields are grouped, one a line, and changed values are marked. There is no autocast "
        "here, so its fields are False and empty.",
        by_names=FIELDS, at_most_partly=True, numbers_vary=False,
    )  # fmt: skip


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
        _cell(
            "train_opts.setExecutionStrategy(pipelined_strategy)",
            0,
            _options_shown(1, 4, "", _training_shown(1)),
        ),
        _cell(
            "train_opts.Training.gradientAccumulation(gradient_accumulation)",
            1,
            _training_shown(10),
        ),
        _cell(
            "train_opts.TensorLocations.setOptimizerLocation("
            "poptorch.TensorLocationSettings().useOnChipStorage(False))",
            2,
            f"_TensorLocationOptions(location_optimizer={{'onChip': 0}}, {_STATE}",
        ),
        _cell(
            "train_opts.outputMode(poptorch.OutputMode.All)",
            3,
            _options_shown(10, 2, "location_optimizer={'onChip': 0}", _training_shown(10)),
        ),
        TextCommand(
            text="train(training_model, training_data); test(inference_model, test_data)",
            shows=(
                "Epoch 1/3",
                "Graph compilation: 100%|██████████| 100/100 [01:31<00:00]",
                "Loss:0.1422 | Accuracy:95.78%: 100%|██████████| 15/15 [01:37<00:00,  6.49s/it]",
                "Epoch 2/3",
                "Loss:0.0909 | Accuracy:97.10%: 100%|██████████| 15/15 [00:00<00:00, 15.04it/s]",
                "Epoch 3/3",
                "Loss:0.0707 | Accuracy:97.80%: 100%|██████████| 15/15 [00:01<00:00, 14.89it/s]",
                "Graph compilation: 100%|██████████| 100/100 [00:35<00:00]",
                "100%|██████████| 12/12 [00:40<00:00,  3.37s/it]Accuracy on test set: 98.41%",
            ),
            here=("python", "walkthrough.py", "--data-dir", "{data}/pipelining"),
            folder=_FOLDER,
            why="The notebook's cells as a script, in full. The text's first step has more than a "
            "minute of compilation, and its other steps an IPU; here two cores compute all.",
            keep=_KEEP,
            compared="Losses, accuracies and speeds were not compared: the data are scikit-learn's "
            "digits in place of MNIST.",
            at_most_partly=True,
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
            shows=(
                "-h Show usage information.",
                "--batch-size Sets the mini-batch size for training. Default: 40.",
                "--device-iterations Number of device iterations for training. Default: 10.",
                "--test-batch-size Sets the batch size for inference. Default: 8.",
                "--epochs Number of epochs to train for. Default: 3.",
                "--learning-rate Learning rate of the optimiser. Default (tuned for AdamW): 0.001.",
                "--profile Enable profiling.",
                "--profile-dir Select a directory to save the profile (default: ./profile).",
                "--strategy Sets the execution strategy (pipelined, sharded). Default: pipelined.",
                "--debug Prints out the debug logging while running.",
                "--offload-optimiser Set this option to offload the optimiser state.",
            ),
            by_names=OPTIONS,
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
