"""Looks for bytes that a reader trips over, guided by what of its code they reach: ``make fuzz``.

``python tests/fuzz/coverage_guided.py --seconds 30 [TARGET...]`` tries every target of targets.py
for so long. What it finds is left in build/fuzz; ``... --again FILE TARGET`` runs it once more.
Without atheris (the extra ``fuzz``; it has no wheel for every Python) it says so, and ends with 0.
"""

from __future__ import annotations

import argparse
import importlib.util
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
FOUND = ROOT / "build" / "fuzz"
# Of one run of a target on some bytes.
MOST_SECONDS, MOST_MEGABYTES = 10, 2048


def fuzz(name: str, options: list[str]) -> None:
    """Try one target in this process; atheris ends it."""
    import atheris

    with atheris.instrument_imports(include=["popdist_py", "poprun_py", "fuzz"]):
        from fuzz.targets import TARGETS

    atheris.Setup([sys.argv[0], *options], TARGETS[name].run)
    atheris.Fuzz()


def search(names: list[str], seconds: int) -> int:
    """Try targets one after another; return 1 if one of them was found at fault."""
    from fuzz.targets import TARGETS

    FOUND.mkdir(parents=True, exist_ok=True)
    faults = []
    for name in names or list(TARGETS):
        with tempfile.TemporaryDirectory() as corpus:
            seeds = TARGETS[name].seeds()
            for number, seed in enumerate(seeds):
                Path(corpus, f"seed-{number}").write_bytes(seed)
            most = max(4096, 2 * max(map(len, seeds)))
            done = subprocess.run(
                [
                    *(sys.executable, __file__, "--one", name, f"-max_total_time={seconds}"),
                    *(f"-timeout={MOST_SECONDS}", f"-rss_limit_mb={MOST_MEGABYTES}"),
                    f"-max_len={most}",
                    *(f"-artifact_prefix={FOUND}/{name}-", "-print_final_stats=1", corpus),
                ],
                capture_output=True,
                text=True,
                errors="replace",
            )
        said = done.stderr + done.stdout
        runs = [line.split()[-1] for line in said.splitlines() if "executed_units" in line]
        reached = [line for line in said.splitlines() if " cov: " in line][-1:]
        print(
            f"{name}: {''.join(runs) or '?'} inputs in {seconds} s;{''.join(reached)}", flush=True
        )
        if done.returncode:
            faults.append(name)
            print("\n".join(said.splitlines()[-60:]), flush=True)
    print(f"at fault: {', '.join(faults) or 'none'}")
    return 1 if faults else 0


def main() -> int:
    sys.path[:0] = [str(ROOT), str(ROOT / "tests")]
    if importlib.util.find_spec("atheris") is None:
        print(
            "atheris is not installed, or has no wheel for this Python: the extra fuzz names it; "
            "make test tries what hypothesis makes"
        )
        return 0
    if sys.argv[1:2] == ["--one"]:
        fuzz(sys.argv[2], sys.argv[3:])
        return 0
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("targets", nargs="*", help="of targets.py; without any, all")
    parser.add_argument("--seconds", type=int, default=30, help="for each target")
    parser.add_argument("--again", type=Path, metavar="FILE", help="run what was found")
    given = parser.parse_args()
    if given.again is not None:
        from fuzz.targets import TARGETS

        TARGETS[given.targets[0]].run(given.again.read_bytes())
        return 0
    return search(given.targets, given.seconds)


if __name__ == "__main__":
    sys.exit(main())
