"""The text's commands for 16 and 64 IPUs, with images and sizes that two cores can train."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from support.repository import ROOT

from examples import cnn_programs as cnns

COMMANDS = ROOT / "tests" / "sdk_programs" / "commands"
SMALL = ("--generated-data --generated-samples {images} --image-size 32 --model-size 18 "
         "--batch-size 2 --global-batch-size {images} --iterations 2 --no-validation "
         "--no-tensorboard --log-dir {folder}")  # fmt: skip

pytestmark = [pytest.mark.mpi, pytest.mark.long, pytest.mark.timeout(280)]


def trained(command, folder):
    """Give a command to a shell, in the folder of the programs; return what it shows."""
    launcher = folder / "bin" / "poprun"
    launcher.parent.mkdir()
    launcher.write_text(f'#!/bin/sh\nexec {sys.executable} -m poprun_py "$@"\n')
    launcher.chmod(0o755)
    environ = {
        "PATH": f"{launcher.parent}:{Path(sys.executable).parent}:{os.environ['PATH']}",
        "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1",
        # Two cores are fewer than a POD's hosts have.
        "POPRUN_OVERSUBSCRIBE": "yes", "POPRUN_SHARE_CORES": "yes",
    }  # fmt: skip
    done = subprocess.run(
        ["bash", "-c", command], cwd=cnns.FOLDER, env={**os.environ, **environ},
        stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
        timeout=270, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout
    return done.stdout


def test_command_for_16_ipus_trains(tmp_path):
    """As printed, all but the sizes: 8 instances, 16 replicas, norms over pairs of them."""
    printed = (COMMANDS / "pod16.sh").read_text()
    small = SMALL.format(images=64, folder=tmp_path / "logs")
    shown = trained(printed.replace("--data-dir your_dataset_path", small), tmp_path)
    assert (
        "RN18 on random images (imagenet): 2 steps of 64 images, micro-batch 2 x accumulation 2"
        in shown
    )
    assert "x 16 replicas of 8 instances" in shown
    assert re.search(r"step 2 \| epoch 2\.00 \| loss \d", shown), shown


def test_training_of_64_replicas_runs_on_one_host(tmp_path):
    """The text's four hosts with 8 instances each are one host with 4 instances here."""
    small = SMALL.format(images=128, folder=tmp_path / "logs")
    shown = trained(
        "poprun -v --num-replicas=64 --num-instances=4 --ipus-per-replica 1 python3 train.py "
        f"--config mk2_resnet50_mlperf_pod64_lars {small}",
        tmp_path,
    )
    assert "2 steps of 128 images, micro-batch 2 x accumulation 1 x 64 replicas of 4" in shown
    assert re.search(r"step 2 \| epoch 2\.00 \| loss \d", shown), shown
