"""A training in NumPy that tells where it is: what faults are done to (`make soak`).

python program.py CHECKPOINTS

It goes on from the newest checkpoint, and prints the digest of its last state. A worker process
makes its batches. Each phase that begins is a line in ``SOAK_NOTES``/instance-N. ``FAIL_AT`` is
``instance:step:how`` of fault_program.py.
"""

import contextlib
import hashlib
import multiprocessing
import os
import sys
import time
from pathlib import Path

STEPS, SAVE_EVERY, VALIDATE_EVERY, CALLS = 20, 4, 8, 3
STEP_SECONDS, COMPILING_SECONDS = 0.02, 0.3
VALUES, NOISE_BYTES = 512, 1 << 20
EXACT = 1 << 30
FAULT = "fault"
PHASES = ("start", "compile", "training", "checkpoint", "validation", "end")


def note(phase, step=0):
    """Say in a file what begins now; the driver polls it."""
    path = Path(os.environ["SOAK_NOTES"], f"instance-{os.environ['RANK']}")
    with path.open("a") as file:
        file.write(f"{phase} {step}\n")


def make_batches(connection, other_end, rank):
    """Send the batch of every step that is asked for, until nobody is there to ask."""
    import numpy

    other_end.close()
    with contextlib.suppress(EOFError, OSError):
        while True:
            step = connection.recv()
            connection.send(numpy.random.default_rng((step, rank)).standard_normal(VALUES))


class Batches:
    """The batches of a worker process."""

    def __init__(self, rank):
        context = multiprocessing.get_context("fork")
        self._here, there = context.Pipe()
        self._worker = context.Process(
            target=make_batches, args=(there, self._here, rank), daemon=True
        )
        self._worker.start()
        there.close()

    def of_step(self, step):
        try:
            self._here.send(step)
            return self._here.recv()
        except (EOFError, OSError):
            raise RuntimeError("the data-loader worker has ended") from None

    def close(self):
        self._worker.kill()


def state_bytes(weights, velocity):
    """Return the state as a checkpoint has it, with noise that makes saving take its time."""
    import numpy

    noise = numpy.random.default_rng(int(abs(weights[0]) * 1e12)).bytes(NOISE_BYTES)
    return weights.tobytes() + velocity.tobytes() + noise


def train(batches, checkpoints, faults):
    import numpy

    import popdist_py
    from popdist_py import heartbeat

    saved = checkpoints.latest()
    step, values = 0, numpy.zeros(2 * VALUES)
    if saved is not None:
        step = saved.step
        values = numpy.frombuffer(saved.data, count=2 * VALUES).copy()
        heartbeat.resume(step)
    print("resumed at", step, flush=True)
    weights, velocity = values[:VALUES], values[VALUES:]
    while step < STEPS:
        note("training", step)
        if step in faults:
            note(FAULT, step)
            faults[step]()
        # Sums of these are exact: the same bits whether TCP or MPI carries them between hosts.
        gradient = numpy.rint(numpy.tanh(weights - batches.of_step(step)) * EXACT) / EXACT
        velocity[:] = 0.9 * velocity - 0.05 * popdist_py.all_reduce(gradient, "mean")
        weights += velocity
        time.sleep(STEP_SECONDS)
        step += 1
        heartbeat.step()
        if step % SAVE_EVERY == 0:
            note("checkpoint", step)
            if popdist_py.getInstanceIndex() == 0:
                checkpoints.save(step, state_bytes(weights, velocity))
        if step % VALIDATE_EVERY == 0:
            validate(weights, step)
    return hashlib.sha256(values.tobytes()).hexdigest()


def validate(weights, step):
    import popdist_py
    from popdist_py import heartbeat

    note("validation", step)
    for _ in range(CALLS):
        heartbeat.enter(heartbeat.environment.INFERENCE)
        popdist_py.all_reduce(float(weights.sum()))
        time.sleep(STEP_SECONDS)
        heartbeat.call()


def main(folder):
    note("start")
    rank = int(os.environ["RANK"])
    batches = Batches(rank)
    import popdist_py
    from popdist_py import heartbeat
    from popdist_py.checkpoint import Checkpoints

    popdist_py.init()
    note("compile")
    heartbeat.enter(heartbeat.environment.COMPILING)
    time.sleep(COMPILING_SECONDS)
    heartbeat.enter(heartbeat.environment.BETWEEN_CALLS)
    checkpoints = Checkpoints(folder, keep=int(os.environ.get("SOAK_KEEP", "3")))
    digest = train(batches, checkpoints, planned_faults(rank))
    note("end")
    batches.close()
    print("digest", digest, flush=True)


def planned_faults(rank):
    """Return what this instance does by itself, by step."""
    entries = filter(None, os.environ.get("FAIL_AT", "").split(","))
    planned = [entry.split(":") for entry in entries]
    if not planned:
        return {}
    from fault_program import FAULTS  # of this script's own folder

    return {int(step): FAULTS[how] for instance, step, how in planned if int(instance) == rank}


if __name__ == "__main__":
    main(sys.argv[1])
