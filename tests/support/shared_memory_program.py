"""Shares memory with the other instances, by MPI and by the library, and waits to be killed.

Arguments: a folder for notes, and the phase to wait in: before (MPI), training, or end.
"""

import os
import sys
import time
from pathlib import Path

import popdist_py


def main(folder, phase):
    note = Path(folder, f"instance-{os.environ['RANK']}")
    if phase == "before":
        wait(note)
    popdist_py.init()
    from mpi4py import MPI

    window = MPI.Win.Allocate_shared(1 << 20)
    popdist_py.barrier()
    if phase == "training":
        note.touch()
        while MPI.COMM_WORLD.allreduce(1) == popdist_py.getNumInstances():
            popdist_py.barrier()
            time.sleep(0.01)
            os.utime(note)
    window.Free()
    if phase == "end":
        wait(note)


def wait(note):
    note.touch()
    time.sleep(1000)


if __name__ == "__main__":
    main(*sys.argv[1:])
