"""The guide to porting: its remedies end its errors."""

from __future__ import annotations

import re
import subprocess
import sys

import pytest
from support.repository import ROOT

from tools.running.transcript import File, parse

PAGE = (ROOT / "docs" / "port-poptorch.md").read_text(encoding="utf-8")
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
