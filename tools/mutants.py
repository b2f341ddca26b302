"""Mutation run: change one place of the packages at a time, and see whether a test fails.

``sample`` draws mutants, the same ones for the same seed and sources. ``run`` tries each on a copy
of the repository with the tests that reach the changed line, cheapest first, as coverage tells::

    python tools/mutants.py sample --seed 1 --count 200 mutants.json
    python tools/mutants.py run mutants.json results.jsonl --coverage .coverage --durations t.xml

It needs ``cosmic-ray``, which makes the mutants, in the Python that runs it. The coverage data has
contexts: ``dynamic_context = test_function`` for the process of the tests and
``context = ${PYTEST_CURRENT_TEST-none}`` for the processes that they start.
"""

from __future__ import annotations

import argparse
import ast
import collections
import json
import os
import random
import re
import signal
import subprocess
import sys
import tempfile
import time
import xml.etree.ElementTree as ElementTree
from pathlib import Path

PACKAGES = ("poprun_py", "popdist_py")
# Unions in annotations: no test can tell, since annotations are not evaluated.
LEFT_OUT = re.compile(r"ReplaceBinaryOperator_BitOr|AddNot_annotation")
MOST_TESTS = 30
MOST_SECONDS = 45.0  # of the tests of one mutant, by their durations
NOT_DEFAULT = "soak or sweep or long or examples or trainers"
LIMIT = 600  # seconds for the tests of one mutant: they hang, or there are too many of them


def sample(root: Path, seed: int, count: int) -> list[dict]:
    """Return ``count`` mutants: a random place each, and one of the changes possible there."""
    import cosmic_ray.plugins
    from cosmic_ray.ast import ast_nodes, get_ast_from_path

    operators = [
        (name, cosmic_ray.plugins.get_operator(name)())
        for name in sorted(cosmic_ray.plugins.operator_names())
        if not LEFT_OUT.search(name) and not cosmic_ray.plugins.get_operator(name).arguments()
    ]
    files = sorted(path for package in PACKAGES for path in (root / package).rglob("*.py"))
    sizes = [path.stat().st_size for path in files]
    generator = random.Random(seed)
    sites: dict[Path, list] = {}
    drawn: list[dict] = []
    while len(drawn) < count:
        (path,) = generator.choices(files, sizes)
        if path not in sites:
            nodes = list(ast_nodes(get_ast_from_path(path)))
            found = collections.defaultdict(list)
            for name, operator in operators:
                places = (place for node in nodes for place in operator.mutation_positions(node))
                for occurrence, (start, _) in enumerate(places):
                    found[start].append((name, occurrence))
            sites[path] = sorted(found.items())
        if not sites[path]:
            continue
        place, changes = generator.choice(sites[path])
        name, occurrence = generator.choice(changes)
        file = str(path.relative_to(root))
        mutant = {"file": file, "line": place[0], "operator": name, "occurrence": occurrence}
        if mutant not in drawn:
            drawn.append(mutant)
    return drawn


class Reach:
    """Which tests reach a line, by coverage contexts, and how long each test function takes."""

    def __init__(self, root: Path, coverage: list[str], durations: list[str]) -> None:
        import coverage as library

        self._root = root
        self._data = []
        for file in coverage:
            data = library.CoverageData(file)
            data.read()
            self._data.append(data)
        self._seconds: dict[str, float] = collections.defaultdict(float)
        for file in durations:
            for case in ElementTree.parse(file).iter("testcase"):
                name = f"{case.get('classname')}.{(case.get('name') or '').partition('[')[0]}"
                self._seconds[name] += float(case.get("time") or 0)

    def tests(self, file: str, line: int) -> list[str]:
        """Return the test functions that reach a line as words for pytest, cheapest first.

        Where none does, as for a line that runs when the module is imported, these are the test
        functions that reach any line of the module.
        """
        lines: dict[int, set[str]] = collections.defaultdict(set)
        for data in self._data:
            for number, contexts in data.contexts_by_lineno(file).items():
                parts = (part for context in contexts for part in context.split("|"))
                lines[number] |= {name for part in parts if (name := _dotted(part))}
        reaching = lines[_first_line(self._root / file, line)] or set().union(*lines.values())
        ranked = sorted((self._seconds.get(name, 5.0), name) for name in reaching)
        chosen, spent = [], 0.0
        for seconds, name in ranked:
            if len(chosen) == MOST_TESTS or (chosen and spent + seconds > MOST_SECONDS):
                break
            word = self._word(name)
            if word:
                chosen.append(word)
                spent += seconds
        return chosen

    def _word(self, name: str) -> str | None:
        """Return ``tests/a/test_b.py::test_c`` for ``tests.a.test_b.test_c``, if it is there."""
        parts = name.split(".")
        for length in range(len(parts) - 1, 0, -1):
            path = Path(*parts[:length]).with_suffix(".py")
            if (self._root / path).exists():
                return "::".join((str(path), *parts[length:]))
        return None


def _first_line(path: Path, line: int) -> int:
    """Return the first line of the innermost statement around ``line``.

    Coverage reports a statement of several lines under its first line.
    """
    first, length = line, sys.maxsize
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.stmt) and node.lineno <= line <= (node.end_lineno or line):
            lines = (node.end_lineno or line) - node.lineno
            if lines < length:
                first, length = node.lineno, lines
    return first


def _dotted(context: str) -> str:
    """Return a context as ``tests.a.test_b.test_c``; "" if it is that of no test."""
    if "::" in context:
        name = re.sub(r"\[.*|\s\(\w+\)$", "", context)
        return name.replace(".py::", ".").replace("::", ".").replace("/", ".")
    if ".test_" in context:
        return context if context.startswith("tests.") else f"tests.{context}"
    return ""


def nearby(root: Path, file: str) -> list[str]:
    """Return the test folder of a module whose changed line no test function reaches itself."""
    parts = Path(file).with_suffix("").parts
    for length in range(len(parts), 0, -1):
        names = parts[1:] if parts[1:2] == ("poptorch",) else parts
        folder = Path("tests", *names[:length])
        if (root / folder).is_dir() and length > 1:
            return [str(folder)]
    return [f"tests/{parts[0]}"]


def try_mutant(root: Path, mutant: dict, tests: list[str]) -> str:
    """Try a mutant in the repository ``root``.

    Return ``killed``, ``survived``, ``untested``, or ``timed out`` after ``LIMIT`` seconds.

    Of a whole folder only the default tests run.
    """
    import cosmic_ray.plugins
    from cosmic_ray.mutating import use_mutation

    if not tests:
        return "untested"
    operator = cosmic_ray.plugins.get_operator(mutant["operator"])()
    python = root / ".venv/bin/python"
    with (
        use_mutation(root / mutant["file"], operator, mutant["occurrence"]) as (_, changed),
        tempfile.TemporaryDirectory(prefix="mutant-", ignore_cleanup_errors=True) as folder,
    ):
        if changed is None:
            return "untested"
        process = subprocess.Popen(
            [python, "-m", "pytest", "-q", "-x", "-n", "0", "-p", "no:cacheprovider",
             "-m", f"not ({'soak or long' if '::' in tests[0] else NOT_DEFAULT})", *tests],
            cwd=root, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, start_new_session=True,
            # Kept bytecode of a mutant could pass for that of the next one.
            env={**os.environ, "TMPDIR": folder, "PYTHONDONTWRITEBYTECODE": "1"},
        )  # fmt: skip
        try:
            code = process.wait(LIMIT)
        except subprocess.TimeoutExpired:
            return "timed out"
        finally:
            _end(process)
    return "survived" if code == 0 else "untested" if code == 5 else "killed"


def _end(process: subprocess.Popen) -> None:
    try:
        os.killpg(process.pid, signal.SIGTERM)
        time.sleep(0.2)
        os.killpg(process.pid, signal.SIGKILL)
    except ProcessLookupError:
        pass
    process.wait()


def run(arguments: argparse.Namespace) -> None:
    """Try the mutants that the results do not hold yet, and write one line for each."""
    mutants = json.loads(Path(arguments.mutants).read_text())
    results = Path(arguments.results)
    done = len(results.read_text().splitlines()) if results.exists() else 0
    reach = Reach(arguments.root, arguments.coverage, arguments.durations)
    for mutant in mutants[done:]:
        tests = reach.tests(mutant["file"], mutant["line"])
        tests = tests or nearby(arguments.root, mutant["file"])
        began = time.monotonic()
        result = try_mutant(arguments.root, mutant, tests)
        seconds = round(time.monotonic() - began, 1)
        with results.open("a") as file:
            print(
                json.dumps(mutant | {"result": result, "seconds": seconds, "tests": len(tests)}),
                file=file,
            )
    counts = collections.Counter(json.loads(line)["result"] for line in results.open())
    sys.stdout.write(f"{results}: {dict(counts)}\n")


def main() -> None:
    """Read the words of the command line and do what they say."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--root", type=Path, default=Path.cwd(), help="a copy of the repository")
    commands = parser.add_subparsers(required=True, dest="command")
    sampling = commands.add_parser("sample", help="draw mutants")
    sampling.add_argument("mutants")
    sampling.add_argument("--seed", type=int, default=1)
    sampling.add_argument("--count", type=int, default=200)
    running = commands.add_parser("run", help="try mutants")
    running.add_argument("mutants")
    running.add_argument("results")
    running.add_argument(
        "--coverage", action="append", default=[], help="coverage data with contexts"
    )
    running.add_argument("--durations", action="append", default=[], help="JUnit file of the tests")
    arguments = parser.parse_args()
    arguments.root = arguments.root.resolve()
    if arguments.command == "sample":
        mutants = sample(arguments.root, arguments.seed, arguments.count)
        Path(arguments.mutants).write_text(json.dumps(mutants, indent=1))
    else:
        run(arguments)


if __name__ == "__main__":
    sys.exit(main())
