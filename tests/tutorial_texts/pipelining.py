"""Commands of PopTorch's tutorial on pipelining."""

from __future__ import annotations

from tutorial_texts.values import FIELDS, OPTIONS, Text, TextCommand

__all__ = ["TEXT"]

_FOLDER = "examples/pipelining"
_KEEP = (
    r"^Graph compilation: 100%",
    r"^Epoch ",
    r"\| Accuracy:.* 100%",
    r"^100%",
    r"^Accuracy on test set",
    r"^profile: ",
)
_PROGRAM = ("python", "mnist_pipeline.py", "--data-dir", "{data}/pipelining", "--steps", "2")
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
        text, (shows,), ("python", "-c", "; ".join(program)), by_names=FIELDS,
        at_most_partly=True,  # the fields are grouped, one on each line
        numbers_vary=False, quick=True,
    )  # fmt: skip


TEXT = Text(
    title="Parallel execution using pipelining",
    page="pipelining.md",
    commands=(
        TextCommand("python3 -m pip install -r requirements.txt"),
        TextCommand("python3 -m pip install jupyter"),
        TextCommand("jupyter-notebook --no-browser --port <port number>"),
        TextCommand(
            "ssh -NL <port number>:localhost:<port number> <your username>@<remote machine>"
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
            keep=_KEEP,
            at_most_partly=True,
            seconds=600,
        ),
        TextCommand(
            text="python3 mnist_pipeline.py",
            here=_PROGRAM,
            folder=_FOLDER,
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
            keep=(r"^  -", r"^usage"),
            numbers_vary=False,
        ),
        TextCommand(
            text="python3 mnist_pipeline.py --learning-rate 0.002 --debug --epochs 5",
            here=(*_PROGRAM, "--learning-rate", "0.002", "--debug", "--epochs", "5"),
            folder=_FOLDER,
            keep=(*_KEEP, r"\[debug\]"),
            seconds=240,
        ),
        TextCommand(
            text="python3 mnist_pipeline.py --profile --profile-dir pipeline_profile",
            here=(
                *_PROGRAM,
                "--epochs",
                "1",
                "--profile",
                "--profile-dir",
                "{out}/pipeline_profile",
            ),
            folder=_FOLDER,
            keep=_KEEP,
        ),
        TextCommand(
            text="python3 mnist_pipeline.py --strategy sharded --profile --profile-dir "
            "sharding_profile",
            here=(
                *(*_PROGRAM, "--epochs", "1", "--strategy", "sharded"),
                *("--profile", "--profile-dir", "{out}/sharding_profile"),
            ),
            folder=_FOLDER,
            keep=_KEEP,
        ),
        TextCommand(
            text="python3 mnist_pipeline.py --offload-optimiser",
            here=(*_PROGRAM, "--epochs", "1", "--offload-optimiser"),
            folder=_FOLDER,
            keep=_KEEP,
        ),
    ),
)
