"""Many random faults, each with its exit code, first cause, time, leftovers and resumed training.

python -m tools.soak [--cases 100] [--seed 1] [--jobs 3] [--json RECORD]
       [--rows PATTERN] [--only NUMBER...] [--list]

A case is a row of ``rows`` done to a training, at a moment that the seed draws; then the
training is resumed and has to end with the bits of one that nobody disturbed. ``--json`` keeps a
line for every case, and goes on with a record that was cut off. A case that is wrong is done once
more, alone, before it counts; times are judged by how many processes wanted a core meanwhile. Rows
of four hosts need what `make test-hosts` needs, and are left out without.

The code is 1 if a case was wrong twice.
"""

from __future__ import annotations

import argparse
import os
import shutil
import sys
import tempfile
from collections import Counter
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor, as_completed
from pathlib import Path
from typing import Any

from tqdm import tqdm

# The hosts of the lab are those of the tests.
sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "tests"))

from tools.processes import surrounding_variables
from tools.soak.record import Record, last_attempts
from tools.soak.rows import Row
from tools.soak.soaks import Soak, draw, possible_rows


def soak(args: argparse.Namespace, rows: Sequence[Row], record: Record) -> None:
    """Do all cases that the record does not have, side by side; then the wrong ones, alone."""
    drawn = draw(rows, args.cases, args.seed)
    folder = Path(tempfile.mkdtemp(prefix="soak-", dir="/tmp"))
    cases = Soak(folder, args.seed)
    done = {line["number"] for line in record.lines}
    wanted = args.only or range(len(drawn))
    todo = [number for number in wanted if number not in done]
    counts: Counter[str] = Counter(right=0, wrong=0)
    try:
        with (
            tqdm(
                total=len(done) + len(todo),
                initial=len(done),
                unit="case",
                smoothing=0,
                mininterval=1,
            ) as bar,
            ThreadPoolExecutor(args.jobs) as pool,
        ):

            def note(line: dict[str, Any]) -> None:
                record.add(line)
                counts["wrong" if line["wrong"] else "right"] += 1
                bar.set_postfix(counts, refresh=False)
                if line["wrong"]:
                    text = f"{line['number']} {line['row']}: {'; '.join(line['wrong'])}"
                    tqdm.write(text[: args.width], file=sys.stderr)

            try:
                futures: list[Future[dict[str, Any]]] = [
                    pool.submit(cases.do, number, 1, drawn[number]) for number in todo
                ]
                for future in as_completed(futures):
                    note(future.result())
                    bar.update()
                bar.set_description("again")
                for number in wrong_once(record):
                    note(pool.submit(cases.do, number, 2, drawn[number]).result())
            except BaseException:
                pool.shutdown(cancel_futures=True)
                raise
    finally:
        cases.close()
        shutil.rmtree(folder, ignore_errors=True)


def wrong_once(record: Record) -> list[int]:
    """Return the cases that were wrong and have not been done once more."""
    judged = last_attempts(record.lines)
    return sorted(line["number"] for line in judged if line["wrong"] and line["attempt"] == 1)


def report(record: Record, left_out: dict[str, str]) -> int:
    """Print what was wrong twice, and what was left out; returns the code to end with."""
    judged = last_attempts(record.lines)
    wrong = [line for line in judged if line["wrong"]]
    again = sum(line["attempt"] == 2 for line in judged)
    print(f"{len(judged)} cases, {again} of them done once more, {len(wrong)} wrong then")
    for line in sorted(wrong, key=lambda line: line["number"]):
        print(f"  {line['number']} {line['row']} ({line.get('phase')}): {'; '.join(line['wrong'])}")
    for title, reason in left_out.items():
        print(f"left out: {title}: {reason}")
    return int(bool(wrong))


def main() -> int:
    parser = argparse.ArgumentParser(
        prog="python -m tools.soak", description=__doc__.splitlines()[0]
    )
    parser.add_argument("--cases", type=int, default=100)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--jobs", type=int, default=3, help="cases side by side")
    parser.add_argument("--json", type=Path, metavar="RECORD", help="a line for every case")
    parser.add_argument("--rows", default="", metavar="PATTERN", help="only rows that match")
    parser.add_argument("--only", type=int, nargs="+", metavar="NUMBER", help="of all cases, these")
    parser.add_argument("--list", action="store_true", help="only say which rows there are")
    parser.add_argument("--width", type=int, default=400, help=argparse.SUPPRESS)
    args = parser.parse_args()
    rows, left_out = possible_rows(args.rows)
    if args.list:
        for row in rows:
            print(f"{row.weight} {row.title}")
        for title, reason in left_out.items():
            print(f"left out: {title}: {reason}")
        return 0
    if not rows:
        parser.error(f"--rows {args.rows}: no row can be done here")
    titles = [f"{row.weight} {row.title}" for row in rows]
    for name in surrounding_variables():
        del os.environ[name]
    with tempfile.TemporaryDirectory() as folder:
        path = args.json or Path(folder, "record.jsonl")
        try:
            record = Record(path, {"seed": args.seed, "rows": titles, "left_out": left_out})
        except ValueError as error:
            parser.error(f"--json: {error}")
        soak(args, rows, record)
        return report(record, left_out)


if __name__ == "__main__":
    sys.exit(main())
