"""Commands of the README of CNN training on IPUs."""

from __future__ import annotations

from tutorial_texts.values import Text, TextCommand

__all__ = ["TEXT"]

_FOLDER = "examples/cnns"
_LOG = ("--log-dir", "{out}")
# The line with the run's folder is left out, because its name ends at random.
_LINES = (r"\bsteps of\b", r"\bstep \d+ \|")
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


def _planned(text: str, name: str) -> TextCommand:
    """Return a command for hosts that do not exist. The launcher only plans it."""
    return TextCommand(
        text,
        here=(
            "env", "POPRUN_DRY_RUN=yes", "bash", f"tests/sdk_programs/commands/{name}.repaired.sh",
        ),
        keep=(r"^  -H ", r"^  --mca .*_tcp_if_include"), numbers_vary=False, quick=True,
    )  # fmt: skip


def _trained(text: str, words: str) -> TextCommand:
    """Return a command of a program, with the words that run in its place."""
    return TextCommand(text, (), (*words.split(), *_LOG), _FOLDER, _LINES)


TEXT = Text(
    "CNN training on IPUs",
    "cnns.md",
    (
        # A long test in tests/examples/test_example_folders.py installs this file.
        TextCommand("pip install -r requirements.txt"),
        _trained(
            "python3 train.py --dataset imagenet --data-dir path-to/imagenet",
            "python train.py --dataset imagenet --generated-data --generated-samples 64 "
            "--model-size 18 --image-size 32 --epochs 1 --logs-per-epoch 1",
        ),
        TextCommand(
            "python restore.py --restore-path logs/RN20_bs32_BN_16.16_v0.9.115_3S9/", (),
            (
                "bash", "-c",
                "python train.py --config mk2_resnet8_test --epochs 1 --log-dir {out} >/dev/null "
                "2>&1 && python restore.py --restore-path {out}/RN8_* --epochs 2",
            ),
            _FOLDER,
            keep=_LINES,
        ),
        TextCommand(
            "python3 -m pytest", (),
            (
                "python", "-m", "pytest", "-q", "-p", "no:cacheprovider", "-k",
                "test_cnns_schedules",
            ),
            _FOLDER,
            keep=(r"\bpassed\b",),
        ),
        _trained(
            "python3 train.py --config my_config",
            "python train.py --config mk2_resnet8_test",
        ),
        _trained(
            "python3 train.py --config my_config --epochs 50",
            "python train.py --config mk2_resnet8_test --epochs 3",
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
            numbers_vary=False, quick=True,
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
        ),
        _planned(_several_pods(_HOSTS_OF_TWO, 64, 128), "pod128"),
        _planned(_several_pods(_HOSTS_OF_FOUR, 128, 256), "pod256"),
        TextCommand(
            "python train.py --config mk2_resnet8_test --wandb", (),
            (
                "env", "WANDB_MODE=offline", "python", "train.py", "--config", "mk2_resnet8_test",
                "--wandb", *_LOG,
            ),
            _FOLDER,
            keep=(*_LINES, r"You can sync"),
        ),
        _trained(
            "--pipeline --shards 1 --pipeline-schedule Sequential --enable-recompute",
            "python train.py --config mk2_resnet8_test --epochs 1 --pipeline --shards 1 "
            "--pipeline-schedule Sequential --enable-recompute --pipeline-splits layer2.0 layer3.0",
        ),
        TextCommand(
            "gc-info -l", (), ("gc-info", "-l"),
            keep=(r"^Graphcore", r"^Partition", r"\[Fabric\]"), numbers_vary=False, quick=True,
        ),
    ),
)  # fmt: skip
