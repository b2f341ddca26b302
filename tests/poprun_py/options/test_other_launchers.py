"""Options of other launchers: the table, and the messages that are made from it."""

from __future__ import annotations

import re

import pytest
from support.repository import ROOT

from poprun_py.command.cli import COMMANDS
from poprun_py.errors import UsageError
from poprun_py.options.command_line import _ALIASES, _NAMES, _SHORT, complete, parse
from poprun_py.options.config_files import parse_config
from poprun_py.options.help_pages import help_text
from poprun_py.options.other_launchers import (
    ACCELERATE,
    FOREIGN_OPTIONS,
    GUESSED,
    MPICH,
    OPEN_MPI,
    SLURM,
    TORCHRUN,
)
from poprun_py.options.python_keywords import from_keywords

_CODE = re.compile(r"`([^`]*)`")
_WORD = re.compile(r"(?<![\w-])--?[a-z][\w-]*")


def refusal(*words: str) -> str:
    with pytest.raises(UsageError) as caught:
        parse([*words, "train.py"])
    return str(caught.value)


def spellings():
    for option in FOREIGN_OPTIONS:
        for launcher, names in option.spellings.items():
            for name in names.split():
                yield launcher, name, option.advice


@pytest.mark.parametrize(
    ("word", "launchers", "advice"),
    [
        ("--nnodes=2", "torchrun", "name the hosts with --host"),
        ("--rdzv_endpoint", "torchrun", "remove this option"),
        ("--wdir", "mpirun and mpiexec of MPICH", "run cd DIR first"),
        ("-hostfile", "mpirun, horovodrun and deepspeed", "with --host-file FILE"),
        ("-npernode", "mpirun", "--nproc-per-node N"),
        ("-ppn", "mpiexec of MPICH", "--nproc-per-node N"),
        ("--num_processes", "accelerate launch", "--num-instances N"),
        ("--time", "srun and sbatch", "--timeout TIME"),
        ("--export", "srun and sbatch", "--env NAME"),
        ("--fusion-threshold-mb", "horovodrun", "remove this option"),
        ("--include", "deepspeed", "--host node0:2,node1:2"),
    ],
)
def test_the_message_names_the_launcher_and_what_to_do(word, launchers, advice):
    text = refusal(word, "2")
    spelled = word.partition("=")[0]
    assert text.startswith(f"unknown option {spelled}, an option of {launchers}: ")
    assert advice in text.partition(": ")[2]
    assert "`" not in text


def test_an_option_of_two_launchers_is_told_for_both():
    for word in ("-N", "-N2"):
        text = refusal(word)
        assert text.startswith(f"unknown option {word}; if you mean the option of mpirun, give ")
        assert "; if you mean the option of srun and sbatch, name the hosts" in text


@pytest.mark.parametrize("word", ["--name", "--run-id", "--job_name"])
def test_a_name_for_the_run(word):
    assert refusal(word, "first").endswith("name the run with --run-name NAME")


def test_a_name_that_no_launcher_has_is_told_what_to_do():
    assert refusal("--cwd=x").startswith("unknown option --cwd: run cd DIR first, ")


def test_the_help_of_an_option_of_another_launcher():
    with pytest.raises(UsageError, match=r"^--help '--nnodes', an option of torchrun: name the"):
        help_text("--nnodes", 80)


def test_keywords_of_python_and_keys_of_files():
    with pytest.raises(UsageError, match=r"^unknown option 'num_processes', an option of accel"):
        from_keywords({"num_processes": 2}, ["train.py"])
    with pytest.raises(UsageError, match=r"^c\.toml, line 1: unknown option 'nnodes', an option"):
        parse_config("nnodes = 2", "c.toml")


def test_the_value_is_not_repeated():
    assert "secret" not in refusal("--rdzv-id=secret")


def test_options_of_ours_are_not_in_the_table():
    """A name in the table is refused, even if it is a unique prefix of an option of ours."""
    for _, name, _ in spellings():
        assert name not in {*_NAMES, *_ALIASES, *_SHORT}, name
        if name.startswith("--"):
            with pytest.raises(UsageError, match=r"^unknown option"):
                complete(name, name)


def test_every_option_that_the_advice_names_exists():
    for option in FOREIGN_OPTIONS:
        for code in _CODE.findall(option.advice):
            own = re.sub(r"'[^']*'", "", code) if code.startswith("--") else ""
            for word in _WORD.findall(own):
                assert word in _NAMES, f"{word} in {option.advice}"
            if found := re.fullmatch(r"poprun-py (\w+).*", code):
                assert found[1] in COMMANDS, option.advice
        bare = _CODE.sub("", option.advice)
        assert not re.search(r"(?<!\w)--?\w", bare), f"without backquotes: {option.advice}"


def test_each_spelling_is_listed_once_for_each_launcher():
    seen = [(launcher, name) for launcher, name, _ in spellings()]
    assert len(seen) == len(set(seen))
    known = {name for launcher, name in seen if launcher != GUESSED}
    assert not known & {name for launcher, name in seen if launcher == GUESSED}
    assert all(re.fullmatch(r"-[a-zA-Z]|--[a-z0-9][a-z0-9-]+", name) for _, name in seen)


def rows_of_the_guide():
    """Yield each option in the guide's table, the launchers of its column, and our replacement."""
    page = (ROOT / "docs" / "ddp-and-mpi.md").read_text(encoding="utf-8")
    _, _, rest = page.partition("| torchrun | mpirun, mpiexec | accelerate launch | srun |")
    table, _, _ = rest.partition("\n\n")
    columns = ((TORCHRUN,), (OPEN_MPI, MPICH), (ACCELERATE,), (SLURM,))
    for line in table.splitlines()[2:]:
        *theirs, ours = (cell.strip() for cell in line.strip("|").split("|"))
        for cell, launchers in zip(theirs, columns, strict=True):
            for name in _CODE.findall(cell):
                yield name, launchers, ours


def test_the_table_of_the_guide_gives_the_advice_of_the_messages():
    rows = list(rows_of_the_guide())
    assert len(rows) > 40
    for name, launchers, ours in rows:
        text = refusal(name, "2")
        assert any(launcher in text for launcher in launchers), (name, text)
        option = re.match(r"`(--[a-z-]+)", ours)
        assert (option[1] if option else ours.replace("`", "")) in text, (name, text)
