"""A slow link between hosts: the tools show the texts that docs/why-slow.md quotes."""

from __future__ import annotations

import pytest
from support.slow_guide import missing_texts, slow_jobs

pytestmark = [pytest.mark.hosts, pytest.mark.timeout(300)]


def test_the_guide_quotes_what_a_job_on_a_slow_link_shows(make_lab, tmp_path):
    lab = make_lab(2)
    for host in lab.hosts:
        host.shape("100mbit")
    done = lab[0].poprun(
        *("--host", lab.names(), "-n", "2", "--live", "--output-dir", tmp_path / "runs"),
        *("--timeline", *slow_jobs().words_of_program("link", 20)),
    )
    assert done.returncode == 0, done.stderr[-3000:]
    assert missing_texts("link", done.stderr, tmp_path / "runs" / "latest") == [], done.stderr
