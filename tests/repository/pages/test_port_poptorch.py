"""The guide to porting: its figures are those measured, and its remedies end its errors."""

from __future__ import annotations

import json
import re
import subprocess
import sys

import pytest
from support.repository import ROOT

from tools.running.transcript import File, parse

PAGE = (ROOT / "docs" / "port-poptorch.md").read_text(encoding="utf-8")
RESULTS = json.loads((ROOT / "benchmarks" / "results.json").read_text(encoding="utf-8"))
# Mistakes of errors.py, each with the code that a row of the page's table gives in its place.
REPLACED = {
    'if self.case == "value" and x.sum() > 0:\n            x = 2 * x': (
        "x = torch.where(x.sum() > 0, 2 * x, x)"
    ),
    "return -x.mean() if": 'return poptorch.identity_loss(-x.mean(), reduction="none") if',
    "    loss.backward()": "    pass",
    "training(x[:3], labels[:3])": "pass",
}
ADDED = (
    'poptorch.registerCustomOp("Cube", "my.domain", lambda x: x**3)',
    "options.broadcastBuffers(False)",
    "options.Training.gradientAccumulation(3)",
)


def spread(rows, figure):
    """Return the smallest and the largest value of a figure."""
    values = [figure(row) for row in rows]
    return min(values), max(values)


def test_figures_are_those_measured():
    models, steps = RESULTS["models"], RESULTS["train_step"]
    block = PAGE.partition("<!-- figures -->")[2].partition("<!-- end -->")[0]
    rows = [line.strip("| ").split(" | ") for line in block.strip().splitlines()[2:]]
    shown = [(float(low), float(high)) for _, low, high in rows]
    halves = [row for row in models if row.get("half/float")]
    measured = [
        (spread(models, lambda row: row["ours/plain"]), 2),
        (spread(models, lambda row: row["compile_s"]), 1),
        (spread(models, lambda row: row["second_s"]), 1),
        (spread(models, lambda row: row["memory"]), 2),
        (spread(halves, lambda row: row["half/float"]), 2),
        (spread(steps, lambda row: row["ours/ddp"]), 2),
        (spread(steps, lambda row: row["deterministic_ms"] / row["ours_ms"]), 2),
    ]
    assert shown == [tuple(round(value, digits) for value in pair) for pair, digits in measured]


@pytest.mark.examples
@pytest.mark.timeout(120)
def test_the_remedies_of_the_page_end_its_errors(tmp_path):
    files = {part.name: part.text for part in parse(PAGE) if isinstance(part, File)}
    program = files["errors.py"]
    table = PAGE.partition("| case | what to do |")[2]
    for mistake, remedy in REPLACED.items():
        assert mistake in program
        program = program.replace(mistake, remedy)
    shown = [remedy for remedy in (*REPLACED.values(), *ADDED) if "pass" not in remedy]
    assert [
        one for one in shown if one.removeprefix("return ").removesuffix(" if") not in table
    ] == []
    custom_op, buffers, accumulation = ADDED
    program = program.replace("class Model", f"{custom_op}\n\n\nclass Model", 1)
    program = program.replace(
        "    model = Model(case)\n",
        f"    model = Model(case)\n    {buffers}\n"
        f'    count = 3 if case == "stages" else 1\n    if count == 3:\n        {accumulation}\n',
        1,
    )
    # A batch with accumulation of 3 has three micro-batches.
    program = program.replace(
        "training(x, labels)", "training(x.repeat(count, 1), labels.repeat(count))"
    )
    program = program.replace(
        "        run(case)\n", '        run(case)\n        print(case, "ok")\n'
    )
    (tmp_path / "errors.py").write_text(program, encoding="utf-8")
    done = subprocess.run(
        [sys.executable, "-m", "popdist_py", "errors.py"],
        cwd=tmp_path, capture_output=True, text=True, timeout=100, check=True,
    )  # fmt: skip
    cases = re.search(r"for case in \((.*)\):", program)[1]
    assert done.stdout == "".join(f"{case} ok\n" for case in re.findall(r'"(\w+)"', cases))
