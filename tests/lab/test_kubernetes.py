"""The MPIJob of the examples: pods as the operator makes them, with the image's ssh, run for real.

A pod is a host of the lab with its own /etc and homes. The operator's part is done here: names, the
host file, the job's key, and the variables of the launcher. Everything else comes from the files of
examples/deploy.
"""

from __future__ import annotations

import os
import shlex
import subprocess
import sys
import time
from pathlib import Path

import pytest
import yaml
from lab.lab import SUBNET
from support.repository import ROOT

from tools.running.own_commands import make_commands

pytestmark = [pytest.mark.hosts, pytest.mark.timeout(300)]
DOCKER = ROOT / "examples/deploy/docker"
JOB = yaml.safe_load((ROOT / "examples/deploy/kubernetes/mpijob.yaml").read_text())
# As the operator sets them for mpiImplementation OpenMPI.
OPERATOR = {
    "OMPI_MCA_orte_default_hostfile": "/etc/mpi/hostfile",
    "OMPI_MCA_orte_keep_fqdn_hostnames": "true",
    "OMPI_MCA_plm_rsh_args": "-o ConnectionAttempts=10",
    "OMPI_MCA_orte_set_default_slots": "1",
}
_BECOME_POD = """\
set -e
cp -a /etc {folder}/etc
# The image's user; the machine may have another one of this number.
sed -i '/:1000:/d' {folder}/etc/passwd
echo 'poprun:x:1000:1000::/home/poprun:/bin/bash' >> {folder}/etc/passwd
mkdir -p {folder}/etc/mpi {folder}/etc/poprun-py {folder}/etc/ssh/ssh_config.d
cp {docker}/sshd_config {folder}/etc/poprun-py/
cp {docker}/ssh_config {folder}/etc/ssh/ssh_config.d/poprun-py.conf
cp {shared}/hostfile {folder}/etc/mpi/
cp {shared}/pods {folder}/etc/hosts
umount /etc/hosts
mount --bind {folder}/etc /etc
mount -t tmpfs tmpfs /home
mkdir -p /home/poprun/.ssh
cp {shared}/secret/{files} /home/poprun/.ssh/
ln -s {examples} /home/poprun/examples
chown 1000:1000 /home/poprun
# Where this machine's Python lies in root's home, the image's lies in /usr.
mkdir {folder}/tmp/root {folder}/tmp/root/top {folder}/tmp/root/work
mount -t overlay overlay \\
  -o lowerdir=/root,upperdir={folder}/tmp/root/top,workdir={folder}/tmp/root/work /root
chmod 711 /root
hostname {name}
"""


def containers(role):
    """Return the command and the arguments of the only container of a role."""
    (container,) = JOB["spec"]["mpiReplicaSpecs"][role]["template"]["spec"]["containers"]
    return [*container["command"], *container["args"]]


def as_user(*words):
    """Return the command that runs ``words`` as the pods' user, without any privilege."""
    return ["setpriv", "--reuid=1000", "--regid=1000", "--clear-groups", "--no-new-privs",
            "--bounding-set=-all", "env", "HOME=/home/poprun",
            "--chdir=/home/poprun", *words]  # fmt: skip


@pytest.fixture(scope="module")
def pods(lab_permitted, tmp_path_factory):
    """Return a launcher and two workers whose ssh servers run, as the manifest says."""
    from lab.lab import Lab

    job = JOB["metadata"]["name"]
    names = [f"{job}-worker-{index}.{job}.default.svc" for index in range(2)]
    with Lab(tmp_path_factory.mktemp("lab"), 3) as lab:
        lab.folder.parent.chmod(0o711)
        lab.folder.chmod(0o711)
        _write_operators_files(lab.folder, job, names)
        for host, name in zip(
            lab.hosts, [f"{job}-launcher", f"{job}-worker-0", f"{job}-worker-1"], strict=True
        ):
            script = _BECOME_POD.format(
                folder=host.folder, docker=DOCKER, shared=lab.folder, files="*",
                examples=ROOT / "examples", name=name,
            )  # fmt: skip
            done = host.run("bash", "-c", script)
            assert done.returncode == 0, done.stderr
        servers = [_start_server(host) for host in lab.hosts[1:]]
        try:
            lab.commands = make_commands(ROOT, lab.folder / "bin")
            _wait_until_ready(lab)
            yield lab
        finally:
            for server in servers:
                server.kill()
                server.wait()


def _write_operators_files(folder, job, names):
    """Write the operator's config map and secret, and what the cluster's DNS knows."""
    (folder / "hostfile").write_text("".join(f"{name} slots=1\n" for name in names))
    addresses = ["127.0.0.1 localhost", f"{SUBNET}.1 {job}-launcher"]
    for index, name in enumerate(names):
        addresses.append(f"{SUBNET}.{index + 2} {name} {job}-worker-{index}")
    (folder / "pods").write_text("\n".join(addresses) + "\n")
    secret = folder / "secret"
    secret.mkdir()
    subprocess.run(["ssh-keygen", "-q", "-t", "ecdsa", "-b", "521", "-N", "", "-C", "",
                    "-f", secret / "id_rsa"], check=True)  # fmt: skip
    (secret / "authorized_keys").write_bytes((secret / "id_rsa.pub").read_bytes())
    # As files of a Secret: they belong to root, and their group may read them.
    for path in secret.iterdir():
        path.chmod(0o644)


def _start_server(host):
    with (host.folder / "pod.log").open("wb") as log:
        return subprocess.Popen(
            host.enter(*as_user(*containers("Worker"))), stdin=subprocess.DEVNULL, stdout=log,
            stderr=log, env={"PATH": "/usr/sbin:/usr/bin:/sbin:/bin"},
        )  # fmt: skip


def _wait_until_ready(lab):
    """Wait for what the readiness probes look at."""
    deadline = time.monotonic() + 20
    for host in lab.hosts[1:]:
        probe = f"exec 3<>/dev/tcp/{host.address}/2222"
        while lab[0].run("bash", "-c", probe).returncode:
            log = (host.folder / "pod.log").read_text()
            assert time.monotonic() < deadline, f"no ssh server on {host.name}: {log}"
            time.sleep(0.05)


def launch(lab, *words, host=0):
    """Run the launcher's command as the operator has it run."""
    path = f"{lab.commands}:{Path(sys.executable).parent}:{os.environ['PATH']}"
    return lab[host].run(*as_user(*words), env={**OPERATOR, "PATH": path, "OMP_NUM_THREADS": "1"})


def test_the_job_of_the_manifest_trains_on_the_workers(pods):
    command = containers("Launcher")
    assert command[0] == "poprun-py"
    done = launch(pods, *command, "--epochs", "1")
    assert done.returncode == 0, done.stdout + done.stderr
    assert "test accuracy" in done.stdout
    shown = launch(pods, *command[:-1], "sh", "-c", "echo $(hostname) $(id -un)")
    assert shown.returncode == 0, shown.stdout + shown.stderr
    for index in range(2):
        assert f"[1,{index}]<stdout>:train-worker-{index} poprun\n" in shown.stdout


def test_only_the_jobs_own_key_is_trusted(pods):
    worker = shlex.quote((pods.folder / "hostfile").read_text().split()[0])
    fine = launch(pods, "ssh", "-oBatchMode=yes", worker, "true")
    assert fine.returncode == 0, fine.stderr
    # The lab's own server on the same host has another key.
    other = launch(pods, "ssh", "-oBatchMode=yes", "-p22", worker, "true")
    assert other.returncode == 255
    assert "Host key verification failed" in other.stderr


def test_a_worker_that_is_gone_is_named(pods):
    missing = launch(pods, "poprun-py", "-n", "1", "--host", "train-worker-9.train", "true")
    assert missing.returncode == 3
    assert "host train-worker-9.train: " in missing.stderr
