"""A job that steps with a barrier, and fails as FAIL_AT says: ``instance:step:how``, ... by commas.

PLAIN=1: it never joins the other instances. Step 0 is before ``init()``.
"""

import ctypes
import os
import resource
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

STEPS = int(os.environ.get("STEPS", "1000"))


def out_of_memory():
    resource.setrlimit(resource.RLIMIT_AS, (1 << 30, 1 << 30))
    bytearray(1 << 31)


def fill_memory():
    kept = []
    while True:
        kept.append(bytearray(b"x" * (1 << 24)))


def loader_worker():
    import torch

    class Broken(torch.utils.data.Dataset):
        def __len__(self):
            return 4

        def __getitem__(self, index):
            raise RuntimeError("cannot read sample 3")

    list(torch.utils.data.DataLoader(Broken(), num_workers=1))


def segmentation_fault():
    ctypes.string_at(0)


def raise_error():
    raise ValueError("the loss is not a number")


def hold_the_lock():
    """Hang in C with the interpreter's lock held, also after a signal has ended a sleep."""
    sleep = ctypes.PyDLL(None).sleep
    while True:
        sleep(1000)


FAULTS = {
    "exit": lambda: sys.exit(3),
    "os_exit": lambda: os._exit(9),
    "exception": raise_error,
    "segv": segmentation_fault,
    "kill": lambda: os.kill(os.getpid(), signal.SIGKILL),
    "abort": os.abort,
    "term": lambda: os.kill(os.getpid(), signal.SIGTERM),
    "memory_error": out_of_memory,
    "fill_memory": fill_memory,
    "loader_worker": loader_worker,
    "hang": lambda: time.sleep(1000),
    "hang_with_lock": hold_the_lock,
    "freeze": lambda: os.kill(os.getpid(), signal.SIGSTOP),
    "kill_wrapper": lambda: os.kill(os.getppid(), signal.SIGKILL),
    "kill_mpirun": lambda: os.kill(mpirun(), signal.SIGKILL),
    "term_mpirun": lambda: os.kill(mpirun(), signal.SIGTERM),
    "stop_mpirun": lambda: os.kill(mpirun(), signal.SIGSTOP),
    "kill_launcher": lambda: os.kill(parent_of(parent_of(os.getppid())), signal.SIGKILL),
}


def parent_of(pid):
    return int(Path(f"/proc/{pid}/stat").read_bytes().rpartition(b")")[2].split()[1])


def mpirun():
    """Return the process of mpirun; MPICH has one of each host between it and the wrappers."""
    pid = parent_of(os.getppid())
    while Path(f"/proc/{pid}/comm").read_text().startswith("hydra_pmi"):
        pid = parent_of(pid)
    return pid


def planned_faults():
    me = int(os.environ["RANK"])
    for entry in filter(None, os.environ.get("FAIL_AT", "").split(",")):
        instance, step, how = entry.split(":")
        if int(instance) == me:
            yield int(step), how


def prepare():
    """Be as hard to end as the test wants."""
    if os.environ.get("DEAF"):
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
    if os.environ.get("CHILDREN"):
        for _ in range(2):
            subprocess.Popen([sys.executable, "-S", "-c", "import time; time.sleep(1000)"])
        threading.Thread(target=time.sleep, args=(1000,), daemon=True).start()


def main():
    first_run = os.environ.get("POPDIST_RESTART_COUNT", "0") == "0"
    faults = dict(planned_faults()) if first_run or "EVERY_RUN" in os.environ else {}
    prepare()
    if 0 in faults:
        FAULTS[faults[0]]()
    plain = bool(os.environ.get("PLAIN"))
    from popdist_py import heartbeat

    if not plain:
        import popdist_py

        popdist_py.init()
    for step in range(1, STEPS + 1):
        if step == 2:
            print("ready", flush=True)
        if step in faults:
            FAULTS[faults[step]]()
        time.sleep(0.01)
        heartbeat.step()
        if not plain:
            popdist_py.barrier()
            if os.environ.get("POLITE") and popdist_py.stopRequested():
                print("stopped at", step, flush=True)
                sys.exit(popdist_py.RESUME_EXIT_CODE)


if __name__ == "__main__":
    main()
