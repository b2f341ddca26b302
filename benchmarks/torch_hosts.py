"""torch.distributed over the back end popdist, beside gloo, on two hosts with a link between them.

The hosts are those of tests/lab (root, network namespaces, sshd). One job on them runs
benchmarks/torch_backend.py and one benchmarks/torch_ddp.py, which measure both back ends in the
same processes, in turns.

Usage: python benchmarks/torch_hosts.py [--json] [--rate 10gbit] [--per-host 1 2]
    [--sizes BYTES ...] [--models mlp ...]
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT / "tests"), str(ROOT / "benchmarks")]

from lab.lab import Lab, missing  # noqa: E402
from show_rows import show_rows  # noqa: E402

HOSTS = 2
COLLECTIVES = ("all_reduce", "broadcast", "all_gather_into_tensor", "reduce_scatter_tensor")
SIZES = (4 << 10, 1 << 20, 25 << 20)
LIMIT_SECONDS = 600


def found_by(lab: Lab, instances: int, *program: object) -> list[dict[str, Any]]:
    """Run one job on all hosts and return the rows that instance 0 prints."""
    done = lab[0].poprun(
        *("--host", lab.names(), "--num-instances", instances, "--num-replicas", instances),
        *("--oversubscribe", "--output", "plain", *program),
        timeout=LIMIT_SECONDS,
    )
    if done.returncode:
        sys.exit(f"poprun-py ended with {done.returncode}: {done.stderr}")
    return [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]


def rows(options: argparse.Namespace) -> Iterator[dict[str, Any]]:
    """Yield what each job finds, with where it ran."""
    with (
        tempfile.TemporaryDirectory(prefix="lab-") as folder,
        Lab(Path(folder) / "hosts", HOSTS) as lab,
    ):
        for host in lab.hosts:
            host.shape(options.rate)
        for per_host in options.per_host:
            where = {"rate": options.rate, "hosts": HOSTS, "per_host": per_host}
            calls = (ROOT / "benchmarks" / "torch_backend.py", "--worker", "--modes", "sync")
            calls += ("--turns", 5, "--collectives", *COLLECTIVES, "--sizes", *options.sizes)
            steps = (ROOT / "benchmarks" / "torch_ddp.py", "--worker", "--seconds", 2)
            steps += ("--turns", 5, "--models", *options.models)
            for program in (calls, steps):
                for row in found_by(lab, HOSTS * per_host, *program):
                    yield {**where, **row}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rate", default="10gbit", help="of the link, as tc spells it")
    parser.add_argument("--per-host", nargs="+", type=int, default=[1, 2], help="instances")
    parser.add_argument("--sizes", nargs="+", type=int, default=SIZES, help="bytes")
    parser.add_argument("--models", nargs="+", default=["mlp"])
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    if reason := missing():
        sys.exit(f"no hosts to measure on: {reason}")
    show_rows(rows(options), as_json=options.json)


if __name__ == "__main__":
    main()
