"""An untouched script for torchrun under --torch-backend: which back end it gets."""

from __future__ import annotations

import pytest

pytestmark = pytest.mark.mpi

_PROGRAM = """
import sys
import torch, torch.distributed as dist

dist.init_process_group("gloo")
total = torch.ones(2)
dist.all_reduce(total)
print(dist.get_rank(), dist.get_backend(), dist.get_backend(dist.new_group()), total.tolist())
print("mpi4py" in sys.modules)
dist.barrier()
dist.destroy_process_group()
"""


@pytest.mark.parametrize(
    ("count", "words", "backend"),
    [
        # Each instance imports torch, so one is all that a default test has.
        (1, ("--torch-backend", "popdist"), "popdist"),
        pytest.param(2, ("--torch-backend", "popdist"), "popdist", marks=pytest.mark.sweep),
        pytest.param(2, ("--torch-backend=gloo",), "gloo", marks=pytest.mark.long),
        pytest.param(
            2, ("--torch-backend=popdist", "--sdk-names=no"), "popdist", marks=pytest.mark.long
        ),
    ],
)
def test_a_script_that_says_gloo_gets_what_the_option_says(poprun, script, count, words, backend):
    done = poprun("-n", count, *words, "--output", "plain", script(_PROGRAM))
    assert done.returncode == 0, done.stderr
    total = [float(count)] * 2
    assert sorted(done.stdout.splitlines()) == [
        *(f"{rank} {backend} {backend} {total}" for rank in range(count)),
        *["False"] * count,
    ]
    assert done.stderr == ""


def test_another_back_end_is_refused(look):
    done = look("-n", "2", "--torch-backend", "nccl", "true")
    assert done.returncode == 2
    assert "--torch-backend 'nccl': expected one of auto, gloo, popdist" in done.stderr
