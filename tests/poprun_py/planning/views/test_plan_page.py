"""The HTML page of a plan, which must be complete and safe to open."""

from __future__ import annotations

import re
import xml.etree.ElementTree as ElementTree
from dataclasses import replace

import pytest
from support.launcher.sysfs_trees import SNAPSHOTS

from poprun_py import LaunchConfig, plan
from poprun_py.planning.installed_mpi import OPEN_MPI_5, Mpi
from poprun_py.planning.views.plan_pictures import plan_page

MPI = Mpi(path="/mpi/bin/mpirun", kind=OPEN_MPI_5)
EXAMPLE = str(SNAPSHOTS / "example.json")


def planned(**fields):
    return plan(LaunchConfig(hardware=EXAMPLE, **fields), environ={}, mpi=MPI)


def cells(page: str) -> list[list[str]]:
    rows = ElementTree.fromstring(page).iter("tr")
    return [["".join(cell.itertext()) for cell in row] for row in rows]


def test_page(golden):
    job = planned(num_instances=3, num_replicas=6, process_placement="spreadcores",
                  program=("sh", "-c", "echo '<&>'"))  # fmt: skip
    config = replace(job.config, hardware="machine.json")
    golden("plan_page.html", plan_page(replace(job, config=config)) + "\n")


def test_every_instance_is_a_row():
    job = planned(num_instances=4, num_replicas=8, host="a,b", ipus_per_replica=2)
    names, *rows = cells(plan_page(job))
    assert dict(zip(names, rows[1], strict=True)) == {
        "host": "a", "instance": "1", "NUMA nodes": "2-3", "CPUs": "16-31,48-63",
        "memory of nodes": "2-3", "threads": "16", "replicas": "2-3", "IPUs": "4-7",
        "IPU-Link domain": "0",
    }  # fmt: skip
    assert [row[0] for row in rows] == ["a", "a", "b", "b"]


def test_equal_hosts_are_a_row():
    job = planned(num_instances=128, num_replicas=128, host="n[0-63]", num_ilds=4)
    page = plan_page(job)
    rest = [row for (row,) in (row for row in cells(page) if len(row) == 1)]
    assert rest[0] == "n[1-15]: as n0, instances 2-31, replicas 2-31, IPU-Link domain 0"
    assert rest[3] == "n[49-63]: as n48, instances 98-127, replicas 98-127, IPU-Link domain 3"
    assert page.count("<svg") == len(rest) == 4
    many = planned(num_instances=128, num_replicas=128, host="n[0-63]", num_ilds=8)
    line = "n[1-63]: as n0, instances 2-127, replicas 2-127, IPU-Link domains 0-7"
    assert cells(plan_page(many))[3:] == [[line]]
    assert plan_page(many).count("<svg") == 1
    assert len(plan_page(many)) < 30_000


def test_page_refers_to_no_other_resource():
    page = plan_page(planned(num_instances=2, num_replicas=2))
    addresses = set(re.findall(r"\w+://[^\"' ]+", page))
    assert addresses == {"http://www.w3.org/2000/svg"}  # an XML name, not a link
    assert not re.search(r"<script|<link|@import|url\(|src=|href=", page)


@pytest.mark.parametrize("word", ["<script>alert(1)</script>", "\x1b[31m", "\udcff", "a\x00b"[:1]])
def test_words_of_the_user_are_escaped(word):
    job = planned(num_instances=2, num_replicas=2, program=("echo", word))
    page = plan_page(replace(job, refusal=word))
    assert page.isascii()
    assert "<script" not in page
    ElementTree.fromstring(page)


def test_values_of_env_are_not_shown():
    job = planned(num_instances=2, num_replicas=2, env=("TOKEN=hush", "USER=me"))
    page = plan_page(job)
    assert "hush" not in page
    assert "--env TOKEN" in page
    assert "does not contain the values of --env" in page
    assert "not shown" not in plan_page(planned(num_instances=2, num_replicas=2))


def test_warnings_are_above_the_pictures():
    page = plan_page(planned(num_instances=6, num_replicas=6))
    (alert,) = re.findall(
        r'<p class="pp-alert" role="note">([^<]*)</p>\n<div class="pp-drawings">', page
    )
    assert "wait for the slowest" in alert
    assert 'class="pp-alert"' not in plan_page(planned(num_instances=4, num_replicas=4))
