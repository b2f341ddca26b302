"""A real Slurm on the hosts of a lab: munge everywhere, the controller on the first host.

The daemons live in the hosts' process namespaces and end with them.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import time
from pathlib import Path

from lab.lab import Lab, LabHost
from support.processes import wait_until

PROGRAMS = ("munged", "slurmctld", "slurmd", "salloc", "sbatch", "srun")
_PATH = f"{os.environ.get('PATH', '')}:/usr/sbin:/sbin"
_GOING = {"PENDING", "CONFIGURING", "RUNNING", "COMPLETING"}
_CONFIGURATION = """\
ClusterName=lab
SlurmctldHost=node0
SlurmUser=root
SlurmdUser=root
AuthType=auth/munge
AuthInfo=socket={folder}/munge/%s
CredType=cred/munge
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
SelectType=select/cons_tres
SelectTypeParameters=CR_CPU
JobAcctGatherType=jobacct_gather/none
AccountingStorageType=accounting_storage/none
SchedulerType=sched/backfill
MpiDefault=none
ReturnToService=2
SlurmctldTimeout=10
SlurmdTimeout=10
InactiveLimit=0
KillWait=3
MessageTimeout=20
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool-%n
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/slurmd-%n.pid
SlurmctldLogFile={folder}/slurmctld.log
SlurmdLogFile={folder}/slurmd-%n.log
NodeName=node[0-{last}] CPUs={cpus} State=UNKNOWN
PartitionName=all Nodes=ALL Default=YES MaxTime=INFINITE State=UP OverSubscribe=NO
"""


def missing() -> str:
    """Say what keeps this machine from running Slurm; empty if nothing does."""
    absent = [p for p in PROGRAMS if shutil.which(p, path=_PATH) is None]
    return f"{', '.join(absent)} not installed (apt-get install slurm-wlm munge)" if absent else ""


class Slurm:
    """Slurm over every host of ``lab``."""

    def __init__(self, lab: Lab, cpus: int = 2) -> None:
        self.lab = lab
        self.folder = lab.folder / "slurm"
        self.environ = {"SLURM_CONF": str(self.folder / "slurm.conf")}
        (self.folder / "state").mkdir(parents=True)
        key = self.folder / "munge.key"
        key.write_bytes(os.urandom(128))
        key.chmod(0o400)
        # Every host's munge listens at the same path, as on any cluster: /run is made its own.
        text = _CONFIGURATION.format(folder=self.folder, last=lab.num_hosts - 1, cpus=cpus)
        text = text.replace(f"{self.folder}/munge/%s", "/run/munge/munge.socket.2")
        (self.folder / "slurm.conf").write_text(text)
        for host in lab.hosts:
            self._start_on(host, key)
        self._wait()

    def _start_on(self, host: LabHost, key: Path) -> None:
        self._must(host, "mount", "-t", "tmpfs", "-o", "mode=755", "tmpfs", "/run")
        self._must(host, "mkdir", "-p", "/run/munge", "/run/sshd")
        self._must(host, "munged", "--force", f"--key-file={key}", "--num-threads=1",
                   f"--log-file={self.folder}/munged-{host.name}.log",
                   f"--seed-file={self.folder}/seed-{host.name}",
                   f"--pid-file={self.folder}/munged-{host.name}.pid")  # fmt: skip
        if host is self.lab[0]:
            self._must(host, "slurmctld")
        self._must(host, "slurmd", "-N", host.name)

    def _must(self, host: LabHost, *words: str) -> None:
        # A daemon keeps the descriptors that it inherits: pipes would never end.
        with (self.folder / f"start-{host.name}.log").open("ab") as log:
            done = subprocess.run(
                host.enter(*words),
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                env={**os.environ, **self.environ, "PATH": _PATH},
                timeout=60,
                check=False,
            )
        if done.returncode:
            raise RuntimeError(f"{words} on {host.name}: {(Path(log.name)).read_text()}")

    def run(self, *words: object, timeout: float = 150, env=None) -> subprocess.CompletedProcess:
        """Run a command on the controller's host, with Slurm's configuration."""
        return self.lab[0].run(*words, timeout=timeout, env={**self.environ, **(env or {})})

    def submit(self, *words: object) -> str:
        """Submit a batch script and return the number of its job."""
        done = self.run("sbatch", "--parsable", *words)
        assert done.returncode == 0, done.stderr
        return done.stdout.strip()

    def states(self, job: str) -> set[str]:
        """Return the states of a job, one for each job of an array."""
        shown = self.run("scontrol", "--oneliner", "show", "job", job).stdout
        return set(re.findall(r" JobState=(\w+)", shown))

    def wait_for(self, job: str, limit: float = 150) -> set[str]:
        """Return the states of a job that has ended, which ``sbatch --wait`` would notice late."""
        wait_until(lambda: not self.states(job) & _GOING, limit, f"job {job} does not end")
        return self.states(job)

    def _wait(self) -> None:
        deadline = time.monotonic() + 90
        while True:
            states = self.run("sinfo", "--noheader", "--Node", "--format=%t").stdout.split()
            if states == ["idle"] * self.lab.num_hosts:
                return
            if time.monotonic() > deadline:
                logs = "\n".join(p.read_text()[-2000:] for p in sorted(self.folder.glob("*.log")))
                raise RuntimeError(f"Slurm's nodes are {states}: {logs}")
            time.sleep(0.1)
