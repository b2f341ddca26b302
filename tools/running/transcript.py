"""Runs the console blocks of a page in order, in one terminal, and compares what is shown.

What a page holds, beside text:

- a console block: each ``$ command`` with the lines that it shows. ``# exit code N`` after a
  command expects N instead of 0. ``...`` in a line stands for anything, a line of ``...`` for any
  lines. Lines of one instance keep their order; which instance comes first is not compared.
  A message of the launcher is one line, also where the terminal shows it in several rows.
- ``<!-- file: NAME -->`` before a block: the block is that file, written where it stands.
- ``<!-- keyboard: PROMPT | PROMPT -->`` before a console block: in a line that begins with one of
  these prompts the rest is typed when the prompt is shown. A line ``^C`` or ``^D`` is that key,
  pressed when the line before it is shown.
- ``<!-- until: TEXT -->`` before a console block: its last command is a job in the background,
  and the next command is typed when the job shows this text.
- ``<!-- numbers vary -->`` before a console block: numbers are not compared.
- ``<!-- this machine -->`` before a console block: what is shown depends on the machine; only the
  exit codes are compared.
"""

from __future__ import annotations

import re
import signal
from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass, replace
from pathlib import Path

import pexpect

from poprun_py.display.terminal_rows import wrapped

__all__ = ["Command", "File", "Terminal", "differences", "parse", "shown"]

_BLOCK = re.compile(
    r"(?:^<!-- (?P<kind>file|keyboard|until|numbers vary|this machine)"
    r"(?:: (?P<words>[^\n]+))? -->\n)?"
    r"^```(?P<language>\w*)\n(?P<text>.*?)^```$",
    re.MULTILINE | re.DOTALL,
)
_EXIT_CODE = re.compile(r"  # exit code (\d+)$")
_TAG = re.compile(r"\[1,\d+\]<\w+>:|\[\d+\][ +-]")
_ESCAPE = re.compile(r"\x1b(?:\[[0-9;?]*[A-Za-z]|\][^\x07]*\x07|[()][A-Z0-9]|[=>])")
# What goes to another place of the window, as --live does, begins a line there.
_PLACED = re.compile(r"\x1b(?:\[\d*E|8)")
_MARK = "\x1e"
_PROMPT = f"{_MARK}(\\d+){_MARK}"
_VARIES = {"numbers vary": "numbers", "this machine": "all"}
# With the blanks that align it, and its sign.
_NUMBER = re.compile(r"(?: +-(?=\d)| *)\d+(?:[.,]\d+)*(?:e[+-]\d+)?")
# What the launcher remarks while other tests have the CPUs; no page expects it without saying so.
_REMARK = re.compile(r"poprun-py: instance \d+ on \S+ is slow: ")
# What a comparison remarks then: a line below its table, and marks behind its figures.
_DOUBT, _DOUBT_MARK = re.compile(r"\* \w"), re.compile(r"(?<=\d[x%])\*")
_MESSAGE = re.compile(r"poprun-py(?:-pod)?: ")
_NUM_COLUMNS = 120
_KEYS = {"^C": "\x03", "^D": "\x04"}


@dataclass(frozen=True)
class File:
    """A file that the reader saves."""

    name: str
    text: str


@dataclass(frozen=True)
class Command:
    """A command with what it shows.

    ``prompts`` begin the lines in which something is typed; ``varies`` is what is not compared:
    nothing, "numbers", or "all". ``until`` is what a job in the background shows before the next
    command is typed.
    """

    text: str
    code: int
    lines: tuple[str, ...]
    prompts: tuple[str, ...] = ()
    varies: str = ""
    until: str = ""

    def typed(self) -> list[tuple[str, str]]:
        """Return each prompt with what is typed there, in order."""
        found = []
        for before, line in zip(("", *self.lines), self.lines, strict=False):
            if line in _KEYS:
                found.append((f"{before}\r\n" if before else "", line))
            found += [(p, line.removeprefix(p)) for p in self.prompts if line.startswith(p)]
        return found


def parse(page: str) -> list[Command | File]:
    """Return the files and commands of a page, in order."""
    found: list[Command | File] = []
    for block in _BLOCK.finditer(page):
        if block["kind"] == "file":
            found.append(File(block["words"], block["text"]))
        elif block["language"] == "console":
            prompts = block["words"].split(" | ") if block["kind"] == "keyboard" else ()
            varies = _VARIES.get(block["kind"], "")
            found += _commands(block["text"], tuple(f"{p} " for p in prompts), varies)
            if block["kind"] == "until":
                found[-1] = replace(found[-1], until=block["words"])
    return found


def _commands(text: str, prompts: tuple[str, ...], varies: str) -> list[Command]:
    first, *parts = re.split(r"^\$ ", text, flags=re.MULTILINE)
    assert not first, f"a console block begins with a command, not with {first!r}"
    commands = []
    for part in parts:
        command, *lines = part.rstrip("\n").split("\n")
        note = _EXIT_CODE.search(command)
        code = int(note[1]) if note else 0
        commands.append(Command(command, code, tuple(lines), prompts, varies))
    return commands


def shown(output: str) -> list[str]:
    """Return the lines that a terminal shows in the end.

    They are without colours and what was redrawn; tabs are blanks.
    """
    text = _ESCAPE.sub("", _PLACED.sub("\n", output)).replace("\r\n", "\n")
    lines = [
        line.rstrip("\r").rpartition("\r")[2].expandtabs().rstrip() for line in text.split("\n")
    ]
    return lines[:-1] if lines[-1] == "" else lines


def differences(command: Command, found: list[str]) -> list[str]:
    """Return what of the lines ``found`` is not as expected, in words; none is well."""
    if command.varies == "all":
        return []
    expected, found = command.lines, _without_remarks(command.lines, _whole_messages(found))
    if command.varies == "numbers":
        expected, found = (
            tuple(_NUMBER.sub(" #", x) for x in lines) for lines in (expected, found)
        )
    wanted, seen = _by_source(expected), _by_source(found)
    lenient = "..." in expected
    problems = []
    for source in sorted({*wanted, *seen}):
        patterns = [line for line in wanted[source] if line != "..."]
        rest = iter(seen[source])
        for pattern in patterns:
            for line in rest:
                if _matches(pattern, line):
                    break
                if not lenient:
                    problems.append(f"unexpected: {line}")
            else:
                problems.append(f"missing: {pattern}")
        if not lenient:
            problems += [f"unexpected: {line}" for line in rest]
    return problems


def _without_remarks(expected: Iterable[str], found: list[str]) -> list[str]:
    """Remove what only a busy machine causes, unless the page expects it."""
    if not any(" is slow: " in line for line in expected):
        found = [line for line in found if not _REMARK.match(line)]
    if not any(_DOUBT.match(line) for line in expected):
        found = [_DOUBT_MARK.sub("", line) for line in found if not _DOUBT.match(line)]
    return found


def _whole_messages(lines: list[str]) -> list[str]:
    """Join the rows of each message that the launcher has wrapped for the terminal's width."""
    whole, start = [], 0
    while start < len(lines):
        end = start + 1
        if _MESSAGE.match(lines[start]):
            while end < len(lines) and lines[end].startswith("  "):
                end += 1
            # The report of a failure has indented lines of its own, which stay lines.
            while end > start + 1 and not _is_wrapped(lines[start:end]):
                end -= 1
        whole.append(_one_line(lines[start:end]))
        start = end
    return whole


def _is_wrapped(rows: list[str]) -> bool:
    return wrapped(_one_line(rows), _NUM_COLUMNS).split("\n") == rows


def _one_line(rows: list[str]) -> str:
    return " ".join([rows[0], *(row.removeprefix("  ") for row in rows[1:])])


def _by_source(lines: Iterable[str]) -> defaultdict[str, list[str]]:
    """Sort lines by the tag of the instance that wrote them."""
    sources: defaultdict[str, list[str]] = defaultdict(list)
    for line in lines:
        tag = _TAG.match(line)
        sources[tag[0] if tag else ""].append(line)
    return sources


def _matches(pattern: str, line: str) -> bool:
    return re.fullmatch(".*".join(map(re.escape, pattern.split("..."))), line) is not None


class Terminal:
    """An interactive bash in a pseudo-terminal.

    Args:
        folder: where it starts.
        environ: its environment.
        seconds: how long a command may take.
    """

    def __init__(self, folder: Path, environ: dict[str, str], seconds: float = 120) -> None:
        self._bash = pexpect.spawn(
            "bash",
            ["--norc", "--noprofile", "--noediting", "-i"],
            cwd=str(folder), timeout=seconds, encoding="utf-8", codec_errors="replace",
            dimensions=(40, _NUM_COLUMNS),
            # A runner in the background of a script ignores Ctrl-C, and bash would pass that on.
            preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
            env={**environ, "PS1": f"{_MARK}$?{_MARK}", "PS2": "", "TERM": "xterm", "NO_COLOR": "1",
                 "VIRTUAL_ENV_DISABLE_PROMPT": "1", "BASH_SILENCE_DEPRECATION_WARNING": "1"},
        )  # fmt: skip
        self._bash.delaybeforesend = None
        self._expect_prompt()

    def _expect_prompt(self) -> tuple[str, int]:
        self._bash.expect(_PROMPT)
        return self._bash.before, int(self._bash.match[1])

    def run(self, command: Command) -> tuple[list[str], int]:
        """Type a command and what it asks for; returns the lines that it showed, and its code."""
        self._bash.sendline(command.text)
        self._bash.expect_exact("\n")  # the command itself
        output = ""
        try:
            for prompt, keys in command.typed():
                if self._bash.expect([re.escape(prompt), _PROMPT]) == 1:  # it has ended already
                    return shown(output + self._bash.before), int(self._bash.match[1])
                output += self._bash.before + self._bash.after
                self._bash.send(_KEYS.get(keys, f"{keys}\n"))
            rest, code = self._expect_prompt()
            if command.until:
                self._bash.expect(f"{re.escape(command.until)}[^\n]*\n")
                rest += self._bash.before + self._bash.after
        except pexpect.TIMEOUT:
            seen = output + self._bash.before
            raise AssertionError(f"$ {command.text}\ndid not end; it showed\n{seen}") from None
        return shown(output + rest), code

    def folder(self) -> Path:
        """Return the folder that the shell is in."""
        return Path(f"/proc/{self._bash.pid}/cwd").resolve()

    def close(self) -> None:
        """End the shell, as closing its window does."""
        self._bash.close(force=True)
