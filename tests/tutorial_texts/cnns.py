"""CNN training on IPUs: the application that trains ResNet with PopRun."""

from __future__ import annotations

from tools.pages.seed_texts.values import Figure, Text, TextCommand

__all__ = ["FIGURES", "TEXT"]

_FOLDER = "examples/cnns"
_LOG = ("--log-dir", "{out}")
_LINES = (r"\bsteps of\b", r"\bstep \d+ \|")  # not the folder: its name ends at random
_SMALL = (
    *("--generated-data", "--generated-samples", "192", "--image-size", "32"),
    *("--model-size", "18", "--batch-size", "2", "--global-batch-size", "192"),
)
_OPTIONS = '"target.hostSyncTimeout": "3000", "target.deterministicWorkers":"portable", '
_TUNED = f'POPLAR_ENGINE_OPTIONS=\'{{{_OPTIONS}"opt.enableMultiAccessCopies":"false"}}\''
_HOSTS_OF_TWO = (
    "xxx.xxx.1.1,xxx.xxx.1.2,xxx.xxx.1.3,xxx.xxx.1.4, xxx.xxx.2.1,xxx.xxx.2.2,xxx.xxx.2.3,"
    "xxx.xxx.2.4"
)
_HOSTS_OF_FOUR = (
    f"{_HOSTS_OF_TWO} xxx.xxx.3.1,xxx.xxx.3.2,xxx.xxx.3.3,xxx.xxx.3.4, "
    "xxx.xxx.4.1,xxx.xxx.4.2,xxx.xxx.4.3,xxx.xxx.4.4"
)


def _several_pods(hosts: str, instances: int, replicas: int) -> str:
    """Return the text's command for two or four IPU-POD64."""
    return (
        f"{_TUNED} poprun -v --host {hosts} --numa-aware=yes "
        "--vipu-server-host=xxx.xxx.xxx.xxx --vipu-server-timeout=300 "
        "--vipu-partition=pod128_partition_name --vipu-cluster=pod128_cluster_name "
        '--reset-partition=no --update-partition=yes --mpi-global-args="--tag-output '
        "--allow-run-as-root --mca oob_tcp_if_include xxx.xxx.0.0/16 "
        '--mca btl_tcp_if_include xxx.xxx.0.0/16" --mpi-local-args="-x LD_LIBRARY_PATH '
        "-x TF_CPP_VMODULE=poplar_compiler=1 -x PATH -x PYTHONPATH "
        '-x IPUOF_VIPU_API_TIMEOUT=600 -x POPLAR_ENGINE_OPTIONS -x TF_POPLAR_FLAGS" '
        f"--ipus-per-replica 1 --num-replicas={replicas} --num-instances={instances} "
        f"python3 --config mk2_resnet50_mlperf_pod{replicas}_lars --data-dir your_dataset_path"
    )


def _planned(text: str, name: str, repaired: str) -> TextCommand:
    """Return a command for hosts that are not there: the launcher plans it and starts nothing."""
    return TextCommand(
        text, (),
        ("env", "POPRUN_DRY_RUN=yes", "bash", f"tests/sdk_programs/commands/{name}.repaired.sh"),
        ".",
        "These hosts do not exist here, so the launcher plans the command and starts nothing. As "
        "printed, the command is refused, also with --dry-run, with one error that names "
        f"{repaired}. The repaired command is in tests/sdk_programs/commands/{name}.repaired.sh.",
        keep=(r"^  -H ", r"^  --mca .*_tcp_if_include"), numbers_vary=False,
    )  # fmt: skip


def _trained(text: str, words: str, why: str, seconds: int = 120) -> TextCommand:
    """Return a command of a program, with the words that are run in its place."""
    return TextCommand(text, (), (*words.split(), *_LOG), _FOLDER, why, _LINES, seconds=seconds)


TEXT = Text(
    "CNN training on IPUs",
    "cnns.md",
    (
        TextCommand(
            "pip install -r requirements.txt", (), (), _FOLDER,
            "Installing PyTorch takes minutes. It succeeds in a new virtual environment, with "
            "poprun-py from this copy of the repository and wandb, and the text's --wandb command "
            "runs there: a long test in tests/examples/test_example_folders.py does both.",
        ),
        _trained(
            "python3 train.py --dataset imagenet --data-dir path-to/imagenet",
            "python train.py --dataset imagenet --generated-data --generated-samples 64 "
            "--model-size 18 --image-size 32 --epochs 1 --logs-per-epoch 1",
            "ImageNet has 150 GB: random images of 32 by 32 and ResNet-18 stand for it. The page "
            "reads ImageNet's files, of digits.",
        ),
        TextCommand(
            "python restore.py --restore-path logs/RN20_bs32_BN_16.16_v0.9.115_3S9/", (),
            (
                "bash", "-c",
                "python train.py --config mk2_resnet8_test --epochs 1 --log-dir {out} >/dev/null "
                "2>&1 && python restore.py --restore-path {out}/RN8_* --epochs 2",
            ),
            _FOLDER,
            "A training of one epoch goes on for a second one.",
            keep=_LINES,
        ),
        TextCommand(
            "python3 -m pytest", (),
            (
                "python", "-m", "pytest", "-q", "-p", "no:cacheprovider", "-k",
                "test_cnns_schedules",
            ),
            _FOLDER,
            "The folder test/ starts the tests in tests/examples/test_cnns_*.py. One of these "
            "files is run here in place of all.",
            keep=(r"\bpassed\b",),
        ),
        _trained(
            "python3 train.py --config my_config",
            "python train.py --config mk2_resnet8_test",
            "The text leaves the configuration to its reader; this is one of configs.yml.",
        ),
        _trained(
            "python3 train.py --config my_config --epochs 50",
            "python train.py --config mk2_resnet8_test --epochs 3",
            "Three epochs show the same as fifty.",
        ),
        TextCommand(
            "poprun --print-topology=yes, with 8 replicas and 2 instances",
            (
                " ===========================================",
                "|              poprun topology              |",
                "|===========================================|",
                "| hosts     |           localhost           |",
                "|-----------|-------------------------------|",
                "| ILDs      |               0               |",
                "|-----------|-------------------------------|",
                "| instances |       0       |       1       |",
                "|-----------|-------------------------------|",
                "| replicas  | 0 | 1 | 2 | 3 | 4 | 5 | 6 | 7 |",
                " -------------------------------------------",
            ),
            (
                "poprun", "--print-topology=yes", "--num-replicas", "8", "--num-instances", "2",
                "python", "-c", "pass",
            ),
            ".",
            "The text names only the option, so a program that does nothing is started.",
            numbers_vary=False,
        ),
        TextCommand(
            "POPLAR_ENGINE_OPTIONS='{\"opt.enableMultiAccessCopies\":\"false\"}' poprun -vv "
            "--mpi-global-args='--tag-output --allow-run-as-root' "
            "--mpi-local-args='-x POPLAR_ENGINE_OPTIONS' --ipus-per-replica 1 --numa-aware 1 "
            "--num-instances 8 --num-replicas 16 python train.py "
            "--config mk2_resnet50_mlperf_pod16_bs20 --data-dir your_dataset_path",
            (),
            (
                "env", 'POPLAR_ENGINE_OPTIONS={"opt.enableMultiAccessCopies":"false"}',
                "poprun", "--oversubscribe",
                "--mpi-global-args=--tag-output --allow-run-as-root",
                "--mpi-local-args=-x POPLAR_ENGINE_OPTIONS", "--ipus-per-replica", "1",
                "--numa-aware", "1", "--num-instances", "8", "--num-replicas", "16",
                "python", "train.py", "--config", "mk2_resnet50_mlperf_pod16_bs20",
                *_SMALL, "--epochs", "1", "--no-validation", *_LOG,
            ),
            _FOLDER,
            "Two cores need months for ResNet-50 on ImageNet: ResNet-18, random images of 32 by 32 "
            "and micro-batches of 2 stand for it, with the options of the configuration. "
            "--oversubscribe lets eight instances share two cores; without -vv, which logs more.",
            keep=_LINES, seconds=300,
        ),
        _planned(
            f"{_TUNED} poprun -v --host xxx.xxx.xxx.1,xxx.xxx.xxx.2,xxx.xxx.xxx.3,xxx.xxx.xxx.4 "
            "--numa-aware=yes --vipu-server-host=xxx.xxx.xxx.xxx \\ "
            "--vipu-partition=pod64_partition_name --reset-partition=no --update-partition=yes "
            '--mpi-global-args="--tag-output --mca btl_tcp_if_include xxx.xxx.xxx.0/16 '
            '--mca oob_tcp_if_include xxx,xxx,xxx.0/16" --mpi-local-args="-x LD_LIBRARY_PATH '
            "-x PATH -x PYTHONPATH -x TF_CPP_VMODULE=poplar_compiler=1 "
            "-x IPUOF_VIPU_API_TIMEOUT=300 "
            "-x TF_POPLAR_FLAGS=--executable_cache_path=$WORKSPACE/exec_cache "
            '-x POPLAR_ENGINE_OPTIONS" \\ --num-replicas=64 --num-instances=32 '
            "--ipus-per-replica 1 python3 "
            "$WORKSPACE/examples/applications/tensorflow/cnns/training/train.py "
            "--config mk2_resnet50_mlperf_pod64_lars --data-dir your_dataset_path",
            "pod64",
            "three faults: a backslash and a blank precede --vipu-partition and --num-replicas, so "
            "that a shell takes the blank as their first character, and the network "
            "xxx,xxx,xxx.0/16 of oob_tcp_if_include has commas in place of points",
        ),
        _planned(
            _several_pods(_HOSTS_OF_TWO, 64, 128), "pod128",
            "two faults: a blank after xxx.xxx.1.4 ends the list of hosts, so that the next hosts "
            "are taken for the program, and python3 --config lacks the script train.py",
        ),
        _planned(
            _several_pods(_HOSTS_OF_FOUR, 128, 256), "pod256",
            "two faults: three blanks are in the list of hosts, one of them without a comma "
            "between xxx.xxx.2.4 and xxx.xxx.3.1, and python3 --config lacks the script train.py",
        ),
        TextCommand(
            "python train.py --config mk2_resnet8_test --wandb", (),
            (
                "env", "WANDB_MODE=offline", "python", "train.py", "--config", "mk2_resnet8_test",
                "--wandb", *_LOG,
            ),
            _FOLDER,
            "There is no network here: Weights & Biases keeps the run in a folder.",
            keep=(*_LINES, r"You can sync"),
        ),
        _trained(
            "--pipeline --shards 1 --pipeline-schedule Sequential --enable-recompute",
            "python train.py --config mk2_resnet8_test --epochs 1 --pipeline --shards 1 "
            "--pipeline-schedule Sequential --enable-recompute --pipeline-splits layer2.0 layer3.0",
            "The text gives options without a model, so a small network is trained. Without "
            "--pipeline-splits, the program would only list the accepted splits.",
        ),
        TextCommand(
            "gc-info -l", (), ("gc-info", "-l"), ".",
            "The devices are those of an emulated machine. After the IPUs, the command lists "
            "groups of IPUs, which are left out above.",
            keep=(r"^Graphcore", r"^Partition", r"\[Fabric\]"), numbers_vary=False,
        ),
    ),
)  # fmt: skip

FIGURES = (
    Figure(
        "cnns-learning-curve.svg",
        (
            *("python", "-m", "poprun_py", "--num-instances", "2", "--num-replicas", "8"),
            *("examples/cnns/curve.py", "--figure", "{file}"),
        ),
        ("training-loss", "training-accuracy", "validation-accuracy", "learning-rate", "RN8"),
        same_each_time=False,
        seconds=240,
    ),
)
