"""Work that the launcher does while mpirun starts and while mpirun ends."""

from __future__ import annotations

import os
import sys

import pytest
from support.launcher.jobs import a_job
from support.wrapper import START

from poprun_py.running.supervise.supervisor import supervise


@pytest.mark.timeout(60)
def test_each_preparation_is_called_once_and_in_order():
    calls = []
    result = supervise(
        a_job((sys.executable, "-I", "-S", str(START), "--", "true"), environ=dict(os.environ)),
        log=lambda _: None,
        while_starting=lambda: calls.append("while starting"),
        on_started=lambda _: calls.append("started"),
        while_ending=lambda: calls.append("while ending"),
    )
    assert result.exit_code == 0
    assert calls == ["while starting", "started", "while ending"]
