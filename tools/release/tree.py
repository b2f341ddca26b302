"""The tree: nothing uncommitted, the version that its tag and changelog speak of."""

from __future__ import annotations

import re
import sys
from pathlib import Path

from tools.release.checking import LeftOut, Red, Release, run

_TREE_VERSION = re.compile(r'^__version__ = "(\d+\.\d+\.\d+)\.dev0"$', re.MULTILINE)
_SECTIONS = ("Added", "Changed", "Deprecated", "Removed", "Fixed", "Security")
_HEADING = re.compile(r"\[(\d+\.\d+\.\d+)\] - (\d{4}-\d{2}-\d{2})")


def clean_tree(release: Release) -> str:
    """Nothing is uncommitted: what is built is a commit."""
    if not (release.root / ".git").exists():
        raise LeftOut("not a git repository")
    changed = run("git", "status", "--porcelain", cwd=release.root).splitlines()
    if changed:
        raise Red(
            f"{len(changed)} changes are not committed, such as {changed[0][3:]}; commit them"
        )
    return "commit " + run("git", "rev-parse", "--short", "HEAD", cwd=release.root).strip()


def next_version(root: Path) -> str:
    """Return the release that the tree is on the way to: both packages name it."""
    found = set()
    for package in ("poprun_py", "popdist_py"):
        text = (root / package / "__init__.py").read_text(encoding="utf-8")
        match = _TREE_VERSION.search(text)
        if match is None:
            raise Red(f'{package}/__init__.py: no line __version__ = "X.Y.Z.dev0"')
        found.add(match[1])
    if len(found) != 1:
        raise Red(f"poprun_py and popdist_py name different versions: {', '.join(sorted(found))}")
    return found.pop()


def version_of_tags(release: Release) -> str:
    """A tag gives the version; without one the next release's, with the distance; also no git."""
    version = next_version(release.root)
    clone = fresh_clone(release, "tags")
    asked = (sys.executable, "setup.py", "--version")
    for tag in run("git", "tag", cwd=clone).split():
        run("git", "tag", "-d", tag, cwd=clone)
    between = run(*asked, cwd=clone).strip()
    run("git", "tag", f"v{version}", cwd=clone)
    tagged = run(*asked, cwd=clone).strip()
    (clone / ".git").rename(clone / "no-git")
    without = run(*asked, cwd=clone).strip()
    if tagged != version or without != f"{version}.dev0":
        raise Red(f"tag v{version} gives {tagged}, no git {without}; see setup.py")
    if not re.fullmatch(re.escape(version) + r"\.dev\d+\+g[0-9a-f]+", between):
        raise Red(f"without a tag the version is {between}; see setup.py")
    return f"{tagged} of a tag, {between} without, {without} without git"


def changelog_problems(text: str, version: str, *, tagged: bool) -> list[str]:
    """Return what is not Keep a Changelog's form, or does not fit the version.

    Args:
        text: the changelog.
        version: the tree's release, ``X.Y.Z``.
        tagged: whether the commit has its tag: then the release has a section with a date.
    """
    problems = []
    headings = re.findall(r"^## (.*)$", text, re.MULTILINE)
    if headings[:1] != ["[Unreleased]"]:
        problems.append("the first section is not ## [Unreleased]")
    released = [_HEADING.fullmatch(heading) for heading in headings[1:]]
    for heading, match in zip(headings[1:], released, strict=True):
        if match is None:
            problems.append(f"## {heading} is not ## [X.Y.Z] - YYYY-MM-DD")
    numbers = [tuple(map(int, match[1].split("."))) for match in released if match]
    dates = [match[2] for match in released if match]
    if numbers != sorted(set(numbers), reverse=True) or dates != sorted(dates, reverse=True):
        problems.append("the newest release does not come first")
    for section in re.split(r"^## ", text, flags=re.MULTILINE)[1:]:
        problems += _section_problems(section)
    own = tuple(map(int, version.split(".")))
    if tagged and own not in numbers:
        problems.append(f"tag v{version}, but no section ## [{version}] with its date")
    if not tagged and numbers and numbers[0] >= own:
        problems.append(
            f"{version} is still to come, but there is a section of it, or of a later one"
        )
    return problems


def _section_problems(section: str) -> list[str]:
    heading = section.splitlines()[0]
    groups = re.findall(r"^### (.*)$", section, re.MULTILINE)
    problems = [f"## {heading}: ### {g} is none of {', '.join(_SECTIONS)}" for g in groups
                if g not in _SECTIONS]  # fmt: skip
    if len(set(groups)) != len(groups):
        problems.append(f"## {heading}: a group stands there twice")
    for group in re.split(r"^### ", section, flags=re.MULTILINE)[1:]:
        if not re.search(r"^- ", group, re.MULTILINE):
            problems.append(f"## {heading}: ### {group.splitlines()[0]} has no entry")
    return problems


def changelog(release: Release) -> str:
    """The changelog has Keep a Changelog's form, and an entry for what is released."""
    version = next_version(release.root)
    text = (release.root / "CHANGELOG.md").read_text(encoding="utf-8")
    tags = []
    if (release.root / ".git").exists():
        tags = run("git", "tag", "--points-at", "HEAD", cwd=release.root).split()
    tagged = f"v{version}" in tags
    if problems := changelog_problems(text, version, tagged=tagged):
        raise Red("CHANGELOG.md: " + "; ".join(problems))
    return f"{version} released" if tagged else f"{version} in development"


def fresh_clone(release: Release, name: str) -> Path:
    """Clone the commit, with its tags, to a new folder of this name; copy where git has none."""
    import shutil

    target = release.out / name
    shutil.rmtree(target, ignore_errors=True)
    if not (release.root / ".git").exists():
        raise LeftOut("not a git repository")
    run("git", "clone", "--quiet", release.root, target, cwd=release.out)
    return target
