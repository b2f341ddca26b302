"""All-reduce and a training step over separate hosts on emulated links: ours against gloo.

The hosts are those of tests/lab (root, network namespaces, sshd): each has its own network, and
links of the given rates. Ours and gloo, as torchrun's programs use it, take turns within one job
over the same links: what differs is the way, not the moment. "gradients" is ours on memory that the
instances of a host share, as gradients lie in.

Usage: python benchmarks/multi_host.py [--json] [--rates 1gbit 10gbit] [--per-host 1 2] [--turns 5]
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT / "tests"))

from lab.lab import Lab, missing  # noqa: E402

HOSTS = 2
SIZES = [4 << 10, 64 << 10, 1 << 20, 25 << 20]


def job(lab: Lab, per_host: int, program: str, *words: object) -> list[dict[str, Any]]:
    """Run a benchmark's worker over all hosts and return what instance 0 printed."""
    instances = str(HOSTS * per_host)
    done = lab[0].poprun(
        *("--host", lab.names(), "--num-instances", instances, "--num-replicas", instances),
        *("--only-output-from-instance", "0", "--output", "plain"),
        *(ROOT / "benchmarks" / program, "--worker", *words),
        timeout=900,
    )
    if done.returncode:
        sys.exit(f"{program} ended with {done.returncode}: {done.stderr}")
    return [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]


def rows(rates: list[str], per_host: list[int], turns: int) -> Iterator[dict[str, Any]]:
    """Yield one row for every rate, number of instances and size, and for every training step."""
    with (
        tempfile.TemporaryDirectory(prefix="lab-") as folder,
        Lab(Path(folder) / "hosts", HOSTS) as lab,
    ):
        for rate in rates:
            for host in lab.hosts:
                host.shape(rate)
            for count in per_host:
                where = {"rate": rate, "hosts": HOSTS, "per_host": count}
                words = ("--turns", turns, "--sizes", *SIZES)
                for row in job(lab, count, "allreduce.py", *words):
                    times = {w: row[f"{w}_us"] for w in ("window", "ours", "mpi", "gloo")}
                    yield {
                        **where,
                        "bytes": row["bytes"],
                        "gradients_ms": round(times["window"] / 1000, 3),
                        **{f"{w}_ms": round(times[w] / 1000, 3) for w in ("ours", "mpi", "gloo")},
                        "gradients/gloo": round(times["gloo"] / times["window"], 2),
                        "ours/gloo": round(times["gloo"] / times["ours"], 2),
                    }
                for taken in job(lab, count, "train_step.py", "--models", "mlp"):
                    ms = {way: statistics.median(times) for way, times in taken.items()}
                    yield {
                        **where,
                        "model": "mlp",
                        **{f"{way}_ms": round(ms[way], 1) for way in ("ours", "ddp")},
                        "ours/ddp": round(ms["ddp"] / ms["ours"], 2),
                    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rates", nargs="+", default=["1gbit", "10gbit"], help="as tc spells them")
    parser.add_argument("--per-host", nargs="+", type=int, default=[1, 2], help="instances")
    parser.add_argument("--turns", type=int, default=5)
    parser.add_argument("--json", action="store_true")
    arguments = parser.parse_args()
    if reason := missing():
        sys.exit(f"no hosts to measure on: {reason}")
    found = []
    for row in rows(arguments.rates, arguments.per_host, arguments.turns):
        found.append(row)
        if not arguments.json:
            print("  ".join(f"{key} {value}" for key, value in row.items()), flush=True)
    if arguments.json:
        print(json.dumps(found, indent=1))


if __name__ == "__main__":
    main()
