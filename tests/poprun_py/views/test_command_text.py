"""A folded command: the same words to every shell, an option a line to people."""

from __future__ import annotations

import shlex
import subprocess

from hypothesis import given
from hypothesis import strategies as st

from poprun_py.views.command_text import folded

COMMAND = shlex.split(
    "/mpi/bin/mpirun --bind-to none --allow-run-as-root --prtemca plm_slurm_args --overlap "
    "-np 1 -x RANK=0 -x PATH python -I -S main.py -- python3 train.py -n 1 "
    ": -np 1 -x RANK=1 python -I -S main.py -- python3 train.py -n 1"
)


def test_each_option_has_a_line_and_each_part_a_block():
    command = [*COMMAND[:-1], "a b"]
    assert folded(command).split(" \\\n") == [
        "/mpi/bin/mpirun",
        "  --bind-to none",
        "  --allow-run-as-root",
        "  --prtemca plm_slurm_args --overlap",
        "  -np 1",
        "    -x RANK=0",
        "    -x PATH",
        "    python -I -S main.py --",
        "    python3 train.py -n 1",
        "  : -np 1",
        "    -x RANK=1",
        "    python -I -S main.py --",
        "    python3 train.py -n 'a b'",
    ]


def test_mpich_is_folded_alike():
    words = "mpiexec -bind-to none -n 2 -env NAME -1 -envlist A,B python -I -S main.py -- x"
    assert folded(words.split()).split(" \\\n")[2:] == [
        "  -n 2", "    -env NAME -1", "    -envlist A,B", "    python -I -S main.py --", "    x",
    ]  # fmt: skip


WORDS = st.one_of(
    st.text(st.characters(blacklist_characters="\0", blacklist_categories=["Cs"]), max_size=12),
    st.sampled_from(["-x", "-np", "--mca", "--", "-I", "-S", "\\", "\\\n", "$HOME", "'", "a=b c"]),
)


@given(st.lists(WORDS, min_size=1, max_size=20), st.booleans())
def test_words_come_back_from_the_text(words, in_a_command):
    # A line's end after a backslash is no word to a shell, and one to shlex.
    words = [word for word in words if word not in ("\n", ":")] or ["x"]
    words = [*COMMAND, *words] if in_a_command else words
    back = shlex.split(folded(words))
    assert [word for word in back if word != "\n"] == words


def test_bash_reads_the_same_words():
    odd = [
        "",
        "two words",
        "line\nend",
        "back\\\nslash",
        "$HOME",
        "`x`",
        "it's",
        '"q"',
        "*",
        "~",
        "#",
    ]
    words = ["printf", "%s\\0", *COMMAND[1:], *odd, ":", "-np", *odd]
    done = subprocess.run(["bash", "-c", folded(words)], capture_output=True, text=True, check=True)
    assert done.stdout.split("\0")[:-1] == words[2:]
