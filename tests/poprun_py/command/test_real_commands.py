"""Real poprun commands, as published, plan to the published shapes; the malformed ones do not."""

from __future__ import annotations

import json
import re
import shlex
from pathlib import Path
from string import Template

import pytest

from poprun_py.command.cli import run

HERE = Path(__file__).parent


class Shell(dict):
    """Gives every shell variable of the published commands a value."""

    known = {  # noqa: RUF012
        "NUM_INSTANCES": "4", "NUM_REPLICAS": "8", "IPUS_PER_REPLICA": "2", "I": "4", "R": "8",
        "P": "2", "MPI_GLOBAL_ARGS": "--tag-output", "MPI_LOCAL_ARGS": "-x PATH",
    }  # fmt: skip

    def __missing__(self, name):
        if name.startswith("HOSTS"):
            return "host[0-3]"
        return self.known.get(name, f"value-of-{name.lower()}")


def commands(file: str) -> dict[str, tuple[str, str]]:
    lines = (HERE / file).read_text().splitlines()
    return {
        re.match(r"# (\w+)", note)[1]: (note, command)
        for note, command in zip(lines[::2], lines[1::2], strict=True)
    }


REAL = commands("real_commands.txt")
MALFORMED = commands("malformed_commands.txt")


def words_of(command: str) -> list[str]:
    filled = Template(command.replace("$*", "train.py")).safe_substitute(Shell())
    return shlex.split(filled)[1:]


@pytest.mark.parametrize("name", REAL)
def test_published_command_plans_to_its_shape(name, capsys):
    note, command = REAL[name]
    assert run(["--dry-run", "--export-plan", "-", *words_of(command)]) == 0
    out = capsys.readouterr().out
    plan = json.loads(out[out.index("{\n") : out.rindex("\n}") + 2])
    shape = dict(re.findall(r"\b([RIPLNDH]) (\S+?)(?:,|$)", note.partition("->")[2]))
    found = {
        "R": plan["num_replicas"],
        "I": plan["num_instances"],
        "P": plan["ipus_per_replica"],
        "L": plan["num_local_replicas"],
        "N": sum(len(i["ipus"]) for i in plan["instances"]),
        "D": plan["num_ilds"],
        "H": len(plan["hosts"]),
    }
    for letter, text in shape.items():
        if text == "–" and letter == "D":
            # IPU-Link domains have 64 IPUs.
            assert found[letter] == -(-found["N"] // 64)
        elif text == "–" and letter == "H":
            assert found[letter] == 1
        elif text == "$" and letter == "H":
            assert found[letter] == min(4, plan["num_instances"])
        elif text not in "–$":
            assert found[letter] == int(text), letter
    # A script without arguments is the program, which a saved plan names absolutely.
    assert [w.removeprefix(f"{Path.cwd()}/") for w in plan["program"][-1:]] == words_of(command)[
        -1:
    ]
    assert len(plan["instances"]) == plan["num_instances"]


# Of the README of ResNet50 (graphcore/examples applications/tensorflow/cnns/training), without the
# blanks inside its list of hosts.
PODS = {
    "POD16": (1, "--num-instances 8 --num-replicas 16"),
    "POD64": (1, "--host x.1.[1-4] --num-replicas=64 --num-instances=32"),
    "POD128": (2, "--host x.1.[1-4],x.2.[1-4] --num-replicas=128 --num-instances=64"),
    "POD256": (4, "--host x.1.[1-4],x.2.[1-4],x.3.[1-4],x.4.[1-4] --num-replicas=256 "
               "--num-instances=128"),
}  # fmt: skip


@pytest.mark.parametrize("pod", PODS)
def test_every_view_shows_the_link_domains_of_a_pod(pod, capsys):
    number, options = PODS[pod]

    def shown(form: str) -> str:
        words = ["--dry-run", "--print-topology", form, *options.split(), "train.py"]
        assert run(words) == 0
        return capsys.readouterr().out

    (row,) = re.findall(r"^\| ILDs      \|(.*)\|$", shown("yes"), re.MULTILINE)
    domains = [str(domain) for domain in range(number)]
    assert row.replace("|", " ").split() == domains
    assert len({len(cell) for cell in row.split("|")}) == 1
    found = re.findall(r", ILDs? ([\d-]+)$", shown("tree"), re.MULTILINE)
    assert list(dict.fromkeys(found)) == domains
    told = shown("json")
    plan = json.loads(told[told.index("{\n") : told.rindex("\n}") + 2])
    assert plan["num_ilds"] == number
    assert list(dict.fromkeys(i["ild"] for i in plan["instances"])) == list(range(number))
    picture, page = shown("svg"), shown("html")
    for text in (picture, page):
        titles = re.findall(r">IPU-Link domain (\d+)(?: on [^<]*)?<", text)
        assert list(dict.fromkeys(titles)) == domains
    assert (f" in {number} IPU-Link domains" in picture) == (number > 1)


def test_all_published_commands_are_here():
    assert len(REAL) == 36
    assert len(MALFORMED) == 6


EXPECTED = {
    "B01": "--num-instances 'X': expected a whole number",
    "B02": "ambiguous option --num:",
    "B09": "--vipu-server-host is given twice",
    "B05": "program ' python3' begins with a blank: expected python3",
    "B11": "program python3 --config has no script",
    "B14": "--ipus-per-replica needs a value, but '--mpi-local-args=--tag-output' follows",
}


@pytest.mark.parametrize("name", EXPECTED)
def test_malformed_command_is_one_line(name, capsys):
    assert run(words_of(MALFORMED[name][1])) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    (line,) = (line for line in captured.err.splitlines() if " POPRUN [I] " not in line)
    assert EXPECTED[name] in line
