"""Jobs that count no steps: each kind of hang is found, its culprit named, work left alone."""

from __future__ import annotations

import json
import re
import subprocess
from dataclasses import dataclass

import pytest

pytestmark = [pytest.mark.mpi, pytest.mark.timeout(150)]
LIMIT = 2.0

MPI = """
import os, signal, sys, time
import numpy as np
from mpi4py import MPI
comm = MPI.COMM_WORLD
rank = comm.Get_rank()
for _ in range(3):
    comm.Barrier()
"""
LIBRARY = """
import os, signal, time
import numpy as np
import popdist_py
popdist_py.init()
rank = popdist_py.getInstanceIndex()
array = np.ones(10)
for _ in range(4):
    popdist_py.all_reduce(array)
popdist_py.barrier()
"""
HOROVOD = """
import time
import torch
import popdist_py.horovod.torch as hvd
hvd.init()
rank = hvd.rank()
for _ in range(4):
    hvd.allreduce(torch.ones(10))
"""
DDP = """
import os, signal, time
import torch
import torch.distributed as dist
torch.set_num_threads(1)
dist.init_process_group("gloo")
rank = dist.get_rank()
model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(8, 8))
for step in range(8):
    model(torch.ones(4, 8)).sum().backward()
    if step == 5 and rank == 1:
        {}
"""
PLAIN = "import os, sys, time\nrank = int(os.environ['RANK'])\n"
SLEEP = "time.sleep(1000)"
STOP = "os.kill(os.getpid(), signal.SIGSTOP)"


@dataclass(frozen=True, kw_only=True)
class Hang:
    """A program, and what has to be said of the instances that are named, the first of them."""

    program: str
    named: tuple[int, ...] = (1,)
    says: str
    options: tuple[str, ...] = ()


HANGS = {
    "mpi4py: one misses a barrier": Hang(
        program=f"{MPI}if rank == 1:\n    {SLEEP}\ncomm.Barrier()",
        says="no CPU time.*, at program.py:10: time.sleep",
    ),
    "mpi4py: a message that nobody sends": Hang(
        program=f"{MPI}if rank == 1:\n    comm.recv(source=0)\ncomm.Barrier()",
        says=r"CPU time only for waiting\), waiting in recv \(program.py:10\)",
    ),
    "mpi4py: both send first": Hang(
        program=f"{MPI}comm.Send(np.zeros(10_000_000), 1 - rank)",
        named=(0, 1), says=r"waiting in Send \(program.py:9\)",
    ),
    "mpi4py: in two collectives": Hang(
        program=f"{MPI}if rank == 1:\n    comm.bcast(1, root=0)\nelse:\n    comm.Barrier()",
        named=(0, 1), says=r"waiting in (bcast|Barrier) \(program.py:1[0-2]\)",
    ),
    "mpi4py: one is stopped": Hang(
        program=f"{MPI}if rank == 1:\n    {STOP}\ncomm.Barrier()", says="its process is stopped",
    ),
    "mpi4py: one does not start MPI": Hang(
        program=f"{PLAIN}if rank == 1:\n    {SLEEP}\nfrom mpi4py import MPI",
        says="no CPU time.*, at program.py:4: time.sleep",
    ),
    "library: one misses an all_reduce": Hang(
        program=f"{LIBRARY}if rank == 1:\n    {SLEEP}\npopdist_py.all_reduce(array)",
        says=r"after its 5th collective \(barrier\), at program.py:12: time.sleep",
    ),
    "library: one waits beside the program for another": Hang(
        program=f"{LIBRARY}work = popdist_py.all_reduce(array, async_op=True)\n"
                f"if rank == 1:\n    {SLEEP}\nwork.wait()\npopdist_py.barrier()",
        named=(1,), says=r"after its 6th collective \(all_reduce\), at program.py:13",
    ),
    "horovod": Hang(
        program=f"{HOROVOD}if rank == 1:\n    {SLEEP}\nhvd.broadcast(torch.ones(3), 0)",
        says=r"after its 4th collective \(all_reduce\), at program.py:10",
    ),
    "DDP over gloo": Hang(
        program=DDP.format(SLEEP), says="no CPU time.*, at program.py:12: time.sleep",
    ),
    "DDP over the library": Hang(
        program=DDP.format(SLEEP), options=("--torch-backend", "popdist"),
        says=r"after its \d+th collective \(all_reduce\), at program.py:12",
    ),
    "a child of the program waits": Hang(
        program=f"{PLAIN}import subprocess\nsubprocess.run(['sleep', '1000'])",
        named=(0, 1), says="at program.py:4: subprocess.run",
    ),
}  # fmt: skip


# One of each kind; the others differ in what the instances wait in, and the longest import torch.
KINDS = {
    "mpi4py: one misses a barrier",
    "mpi4py: a message that nobody sends",
    "mpi4py: one is stopped",
    "library: one misses an all_reduce",
    "a child of the program waits",
}


@pytest.mark.parametrize(
    "hang",
    [
        pytest.param(
            hang, id=title, marks=pytest.mark.sweep if title in KINDS else pytest.mark.long
        )
        for title, hang in HANGS.items()
    ],
)
def test_hang_is_found_and_the_culprit_named_first(poprun, script, hang):
    done = poprun(
        "--num-instances", "2", "--num-replicas", "2",
        "--hang-timeout", str(LIMIT), "--grace", "1", "--output-dir", "out", *hang.options,
        script(hang.program),
    )  # fmt: skip
    assert done.returncode == 124, done.stderr
    named = re.findall(r"^poprun-py: instance (\d+) .* hangs: (.*)", done.stderr, re.M)
    assert tuple(int(index) for index, _ in named) == hang.named, done.stderr
    silence = re.match(r"silent for ([\d.]+) s \(no output, ", named[0][1])
    assert silence, named
    assert float(silence[1]) >= LIMIT
    assert re.search(hang.says, named[0][1]), named
    (report,) = script("").parent.glob("out/latest/report.json")
    attempt = json.loads(report.read_text())["attempts"][0]
    assert (attempt["cause"], tuple(attempt["hung"])) == ("hang", hang.named)
    assert attempt["stacks"]


WORK = {
    "one prints, the others compute": f"{PLAIN}for _ in range(12):\n"
    "    print(rank, flush=True) if rank else sum(range(10**6))\n    time.sleep(0.4)",
    "one computes in C, the others wait": f"{MPI}import hashlib\nif rank:\n"
    "    hashlib.pbkdf2_hmac('sha256', b'a', b'b', 8_000_000)\ncomm.Barrier()",
    "one computes in Python, the others wait": f"{MPI}end = time.monotonic() + 5\n"
    "while rank and time.monotonic() < end:\n    pass\ncomm.Barrier()",
    "a child of one computes, the others wait": f"{MPI}import subprocess\n"
    "code = 'import time; e = time.monotonic() + 5\\nwhile time.monotonic() < e: pass'\n"
    "if rank:\n    subprocess.run([sys.executable, '-c', code])\ncomm.Barrier()",
    "nothing but short calls of MPI": f"{MPI}go = np.ones(1)\nend = time.monotonic() + 5\n"
    "while go[0]:\n    go[0] = time.monotonic() < end\n    comm.Bcast(go)",
    "nothing but long calls of MPI": f"{MPI}go, array = np.ones(1), np.zeros(20_000_000)\n"
    "end = time.monotonic() + 6\n"
    "while go[0]:\n    comm.Allreduce(MPI.IN_PLACE, array)\n"
    "    go[0] = time.monotonic() < end\n    comm.Bcast(go)",
    "nothing but collectives of the library": f"{LIBRARY}end = time.monotonic() + 5\n"
    "while popdist_py.broadcast(time.monotonic() < end):\n    pass",
    "one writes a file now and then, the others wait": f"{PLAIN}end = time.monotonic() + 5\n"
    "with open('data', 'wb', buffering=0) as file:\n    while time.monotonic() < end:\n"
    "        rank or file.write(bytes(400_000))\n        time.sleep(0.5)",
    "one downloads, the others wait": "import os, socket, threading, time\n"
    "if os.environ['RANK'] == '0':\n"
    "    ours, theirs = socket.create_server(('127.0.0.1', 0)), socket.socket()\n"
    "    theirs.connect(ours.getsockname())\n    giving = ours.accept()[0]\n"
    "    end = time.monotonic() + 5\n"
    "    def give():\n        while time.monotonic() < end:\n"
    "            giving.sendall(bytes(5000))\n            time.sleep(0.1)\n"
    "        giving.close()\n"
    "    threading.Thread(target=give).start()\n"
    "    file = theirs.makefile('rb')\n    while file.read(1000):\n        pass\n"
    "else:\n    time.sleep(4.5)",
    "each is silent for less than the limit": f"{PLAIN}for _ in range(3):\n"
    "    time.sleep(1.4)\n    print(rank, flush=True)",
}


# A few that show different signs of work; the others compute for seconds.
QUICK = {
    "one prints, the others compute",
    "one writes a file now and then, the others wait",
    "each is silent for less than the limit",
}


@pytest.mark.parametrize(
    "program",
    [
        pytest.param(
            text, id=title, marks=pytest.mark.sweep if title in QUICK else pytest.mark.long
        )
        for title, text in WORK.items()
    ],
)
def test_work_without_steps_is_no_hang(poprun, script, program):
    done = poprun("--num-instances", "2", "--num-replicas", "2", "--hang-timeout", str(LIMIT),
                  script(program))  # fmt: skip
    assert done.returncode == 0, done.stderr


@pytest.mark.sweep
@pytest.mark.parametrize("reads", ["input()", "os.read(0, 100)"])
def test_waiting_for_the_user_is_no_hang(poprun, script, reads):
    program = script(f"{PLAIN}print('ready', flush=True)\nprint({reads})")
    job = poprun("--hang-timeout", "1", "--output", "plain", program, start=True,
                 stdin=subprocess.PIPE)  # fmt: skip
    assert job.stdout.readline() == "ready\n"
    with pytest.raises(subprocess.TimeoutExpired):
        job.wait(4)
    stdout, stderr = job.communicate("typed\n", timeout=60)
    assert (job.returncode, stderr) == (0, "")
    assert "typed" in stdout


SLEEPS_IN_C = """
import ctypes, time
end = time.monotonic() + 1
while time.monotonic() < end:
    pass
print(ctypes.CDLL(None).sleep(2))
"""


@pytest.mark.sweep
def test_looking_for_hangs_wakes_nobody(poprun, script):
    """A signal would end a sleep of C early, which returns what is left of it."""
    done = poprun("--hang-timeout", "3", "--output", "plain", script(SLEEPS_IN_C))
    assert (done.returncode, done.stdout) == (0, "0\n"), done.stderr


def test_a_job_that_sleeps_hangs(poprun, script):
    done = poprun("--hang-timeout", "0.3", "--grace", "1", script("import time\ntime.sleep(1000)"))
    assert done.returncode == 124, done.stderr
    assert "(no output, no CPU time), at program.py:2: time.sleep(1000)\n" in done.stderr
    assert "the Python stacks of the instances:" in done.stderr
