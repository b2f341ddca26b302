"""Build steps that setup.cfg cannot describe: version, .pth file, manual pages, equal archives."""

import gzip
import os
import re
import subprocess
import sys
import tarfile
from distutils.command.install_data import install_data  # setuptools provides this module
from pathlib import Path

from setuptools import setup
from setuptools.command.build_py import build_py
from setuptools.command.sdist import sdist
from setuptools_scm import ScmVersion

_HOOK = "popdist_torchvision_hook"
_MANUAL = "share/man/man1"
_VERSIONED = ("poprun_py/__init__.py", "popdist_py/__init__.py")
_VERSION_LINE = re.compile(r'^__version__ = "(.*)"$', re.MULTILINE)
# What the tree says of itself, whichever commit it is of: the next release, in development.
_TREE = _VERSION_LINE.search(
    Path(__file__).with_name("poprun_py").joinpath("__init__.py").read_text()
)[1]


def version(found: ScmVersion) -> str:
    """Return the version of a tag; between tags, that of the next release with the distance."""
    if found.exact:
        return found.format_with("{tag}")
    return f"{_TREE.removesuffix('.dev0')}.dev{found.distance or 0}"


class BuildPackages(build_py):
    """Writes the version into the wheel's packages, and the .pth file of the hook beside them."""

    def run(self):
        """Build, then add; an editable install gets the .pth file and the manual pages."""
        super().run()
        editable = getattr(self, "editable_mode", False)
        install = self.get_finalized_command("install")
        target = Path(install.install_purelib if editable else self.build_lib)
        target.mkdir(parents=True, exist_ok=True)
        (target / f"{_HOOK}.pth").write_text(f"import {_HOOK}\n")
        if editable:
            self.run_command("install_data")  # setuptools leaves the manual pages out
        else:
            for name in _VERSIONED:
                self._write_version(target / name)

    def _write_version(self, path):
        line = f'__version__ = "{self.distribution.get_version()}"'
        text, count = _VERSION_LINE.subn(line, path.read_text(encoding="utf-8"))
        if count != 1:
            raise SystemExit(f"{path} has {count} lines __version__ = ...; one is needed")
        path.unlink()  # a link to the tree's file, on some file systems
        path.write_text(text, encoding="utf-8")


class ManualPages(install_data):
    """Makes the manual pages from the declarations of options and commands, and installs them."""

    def run(self):
        """Write the pages into a folder of the build, and install these files."""
        folder = Path(self.get_finalized_command("build").build_temp, "man").absolute()
        folder.mkdir(parents=True, exist_ok=True)
        command = [sys.executable, "-m", "tools.pages.manual.man_pages", str(folder)]
        subprocess.run(command, cwd=Path(__file__).parent, check=True)
        self.data_files = [(_MANUAL, sorted(map(str, folder.iterdir())))]
        super().run()


class SourceArchive(sdist):
    """Packs equal trees into equal bytes where SOURCE_DATE_EPOCH is set, as wheels are."""

    def make_archive(self, base_name, format, root_dir=None, base_dir=None, owner=None, group=None):
        """Make the archive; time, owner and modes of its members come from no machine."""
        epoch = os.environ.get("SOURCE_DATE_EPOCH")
        if epoch is None or format != "gztar":
            return super().make_archive(base_name, format, root_dir, base_dir, owner, group)

        def plain(member):
            member.mtime, member.uid, member.gid = int(epoch), 0, 0
            member.uname = member.gname = ""
            member.mode = 0o755 if member.isdir() or member.mode & 0o100 else 0o644
            return member

        name = f"{base_name}.tar.gz"
        with (
            Path(name).open("wb") as raw,
            gzip.GzipFile("", "wb", fileobj=raw, mtime=int(epoch)) as packed,
            tarfile.open(fileobj=packed, mode="w", format=tarfile.PAX_FORMAT) as archive,
        ):
            archive.add(base_dir, filter=plain)  # in the order of names
        return name


setup(
    cmdclass={
        "build_py": BuildPackages,
        "install_data": ManualPages,
        "sdist": SourceArchive,
    },
    # ManualPages names the files. Without an entry here, setuptools would not run the command.
    data_files=[(_MANUAL, [])],
    use_scm_version={"version_scheme": version, "fallback_version": _TREE},
)
