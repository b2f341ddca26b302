"""Jobs that are slow in each way of docs/why-slow.md: the tools show the texts that it quotes."""

from __future__ import annotations

import contextlib

import pytest
from support.slow_guide import SECTIONS, missing_texts, slow_jobs

pytestmark = [pytest.mark.mpi, pytest.mark.examples, pytest.mark.timeout(200)]

# Steps that last long enough for some looks of the launcher.
_STEPS = {"batches": 300, "compile": 30, "cores": 1500}


@pytest.mark.parametrize("cause", [cause for cause in SECTIONS if cause != "link"])
def test_the_guide_quotes_what_a_slow_job_shows(poprun, tmp_path, cause):
    module = slow_jobs()
    words = module.words_of_program(cause, _STEPS.get(cause, 60))
    with module.taken_cpu() if cause == "cores" else contextlib.nullcontext():
        done = poprun("-n", 2, "--live", "--output-dir", "runs", "--timeline", *words)
    assert done.returncode == 0, done.stderr[-3000:]
    assert missing_texts(cause, done.stderr, tmp_path / "runs" / "latest") == [], done.stderr
