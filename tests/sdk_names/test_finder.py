"""Whose package a Python imports: ours, an installed one, or the user's own. None imports torch."""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
from pathlib import Path

import pytest
from sdk_names.places import NAMES, PACKAGES
from support.repository import ROOT
from support.surroundings import new_environment

from poprun_py import LaunchConfig, plan
from poprun_py.instance import program_environment

# Prints of each package whether its file is ours, another's, or missing; nothing is imported.
WHOSE = """
import importlib.util, sys
for name in sys.argv[1:] or %r:
    spec = importlib.util.find_spec(name)
    ours = spec is not None and %r in str(spec.origin)
    print(name, "none" if spec is None else "ours" if ours else "theirs")
""" % (PACKAGES, str(NAMES))  # noqa: UP031 (the braces are the program's)
NONE, OURS = (dict.fromkeys(PACKAGES, whose) for whose in ("none", "ours"))


def found(done):
    assert done.returncode == 0, done.stderr
    return dict(line.split() for line in done.stdout.splitlines())


def package(folder, name="poptorch", text=""):
    """Make a package that is not ours."""
    (folder / name).mkdir(parents=True)
    (folder / name / "__init__.py").write_text(text)
    return folder


@pytest.fixture(scope="module")
def environment(tmp_path_factory):
    """Make a Python in whose site-packages a poptorch is installed; return it and the folder."""
    python = new_environment(tmp_path_factory.mktemp("environment") / "with_sdk")
    (site,) = python.parent.parent.glob("lib/python*/site-packages")
    package(site)
    return python, site


def test_what_is_not_installed_is_ours(python):
    # Python does not ask a finder of another kind, and neither does ours.
    code = f"import sys\nsys.meta_path.append(object())\n{WHOSE}"
    assert found(python("-c", code)) == OURS
    assert found(python("-c", WHOSE, program="")) == NONE


def test_an_installed_package_goes_before_ours_unless_always_is_asked(python, environment):
    for mode, whose in (("auto", "theirs"), ("yes", "ours")):
        done = python("--sdk-names", mode, "-c", WHOSE, executable=environment[0])
        assert found(done) == {**OURS, "poptorch": whose}, mode


def test_a_package_that_only_another_finder_finds_is_installed(python, tmp_path):
    # As editable installs do: a finder behind Python's own, from a .pth file.
    executable = new_environment(tmp_path / "environment")
    (site,) = (tmp_path / "environment").glob("lib/python*/site-packages")
    package(tmp_path / "sources", "horovod")
    # Python itself would stop at this folder.
    (tmp_path / "horovod").mkdir()
    (site / "editable.pth").write_text("import editable_finder\n")
    (site / "editable_finder.py").write_text(
        "import sys\n"
        "from importlib.machinery import PathFinder\n"
        "class Finder:\n"
        "    @classmethod\n"
        "    def find_spec(cls, name, path=None, target=None):\n"
        "        if name == 'horovod':\n"
        f"            return PathFinder.find_spec(name, [{str(tmp_path / 'sources')!r}])\n"
        "sys.meta_path.append(Finder)\n"
    )
    for mode, whose in (("auto", "theirs"), ("yes", "ours")):
        done = python("--sdk-names", mode, "-c", WHOSE, executable=executable)
        assert found(done) == {**OURS, "horovod": whose}, mode


def test_an_sdk_on_pythonpath_goes_before_ours(python, tmp_path):
    # So its enable.sh does it.
    path = f"{package(tmp_path / 'sdk', 'popart')}:{ROOT}"
    assert found(python("-c", WHOSE, PYTHONPATH=path)) == {**OURS, "popart": "theirs"}
    always = python("--sdk-names=yes", "-c", WHOSE, PYTHONPATH=path)
    assert found(always) == OURS


@pytest.mark.parametrize(
    ("mode", "form"),
    [("auto", "module"), ("yes", "package"),
     *(pytest.param(*both, marks=pytest.mark.sweep)
       for both in (("auto", "package"), ("yes", "module")))],
)  # fmt: skip
def test_the_users_own_module_beside_the_program_goes_before_all(
    python, environment, tmp_path, mode, form
):
    if form == "package":
        package(tmp_path, "poptorch")
    else:
        (tmp_path / "poptorch.py").touch()
    program = tmp_path / "program.py"
    program.write_text(WHOSE + "print('file', importlib.util.find_spec('poptorch').origin)\n")
    told = found(python("--sdk-names", mode, program, executable=environment[0], cwd="/"))
    assert Path(told.pop("file")).is_relative_to(tmp_path)
    assert told == {**OURS, "poptorch": "theirs"}


def test_a_mere_folder_stands_behind_ours_and_its_modules_are_found(python, tmp_path):
    (tmp_path / "horovod").mkdir()
    (tmp_path / "horovod" / "helper.py").write_text("VALUE = 3\n")
    program = tmp_path / "program.py"
    program.write_text(
        "import horovod, horovod.helper\nprint(horovod.__version__, horovod.helper.VALUE)\n"
    )
    for mode in ("auto", "yes"):
        done = python("--sdk-names", mode, program)
        assert done.stdout == "0.28.1 3\n", (mode, done.stderr)


def test_a_folder_that_the_program_adds_is_the_users_own(python, tmp_path):
    folder = str(package(tmp_path / "lib", "popdist"))
    done = python("--sdk-names=yes", "-c", f"import sys; sys.path.insert(0, {folder!r})\n{WHOSE}")
    assert found(done) == {**OURS, "popdist": "theirs"}


def test_the_programs_folder_is_the_users_own_on_pythonpath_too(python, tmp_path):
    package(tmp_path, "popart")
    (tmp_path / "program.py").write_text(WHOSE)
    for path in (".", ":", tmp_path):
        done = python("--sdk-names=yes", "program.py", cwd=tmp_path, PYTHONPATH=f"{path}:{ROOT}")
        assert found(done) == {**OURS, "popart": "theirs"}, path


def test_pythons_that_a_program_starts_find_the_names(python):
    again = f"import subprocess, sys\nsubprocess.run([sys.executable, '-c', {WHOSE!r}])"
    assert found(python("-c", again)) == OURS
    shell = f"import os, sys; os.execlp('sh', 'sh', '-c', sys.executable + ' -c \"$0\"', {WHOSE!r})"
    assert found(python("-c", shell)) == OURS


def test_a_python_without_the_library_gets_it_with_the_names(python, tmp_path):
    executable = new_environment(tmp_path / "bare")
    # Only the hook is on its path, as the launcher gives it to whatever Python a program is run by.
    hook = str(ROOT / "popdist_py" / "start_hook")
    code = "import popdist, popdist_py; print(popdist.getNumInstances(), popdist_py.__file__)"
    done = python(
        "-c", code, program="", executable=executable, PYTHONPATH=hook, POPDIST_SDK_NAMES="auto"
    )
    assert done.stdout == f"1 {ROOT / 'popdist_py' / '__init__.py'}\n", done.stderr


def test_the_hook_leaves_the_users_sitecustomize_and_sys_path_alone(python, tmp_path):
    (tmp_path / "sitecustomize.py").write_text("print('mine')\n")
    code = "import sitecustomize, sys; print(sitecustomize.__file__, 'start_hook' in str(sys.path))"
    done = python("-c", code, PYTHONPATH=f"{tmp_path}:{ROOT}")
    assert done.stdout == f"mine\nmine\n{tmp_path}/sitecustomize.py False\n", done.stderr


def test_the_hook_does_nothing_where_the_names_are_not_asked_for(python):
    path = f"{ROOT / 'popdist_py' / 'start_hook'}:{ROOT}"
    code = WHOSE + "print('finders', sum('Sdk' in type(f).__name__ for f in sys.meta_path))\n"
    for mode in ("no", ""):
        done = python("-c", code, program="", PYTHONPATH=path, POPDIST_SDK_NAMES=mode)
        assert found(done) == {**NONE, "finders": "0"}


def test_finding_imports_neither_torch_nor_the_library(python):
    code = (
        "import sys; print(sorted({'torch', 'numpy', 'popdist_py', 'typing'} & set(sys.modules)))"
    )
    assert python("-c", code).stdout == "[]\n"
    code = "import popdist, horovod, sys; print('torch' in sys.modules, 'numpy' in sys.modules)"
    assert python("-c", code).stdout == "False False\n"


def test_the_library_of_the_environment_goes_before_that_of_the_hook(python, tmp_path):
    theirs = package(tmp_path / "lib", "popdist_py")
    path = f"{ROOT / 'popdist_py' / 'start_hook'}:{theirs}"
    code = "import popdist_py; print(popdist_py.__file__)"
    for mode in ("auto", "yes"):
        done = python("-c", code, program="", PYTHONPATH=path, POPDIST_SDK_NAMES=mode)
        assert done.stdout == f"{theirs}/popdist_py/__init__.py\n", (mode, done.stderr)


@pytest.mark.sweep
@pytest.mark.skipif(importlib.util.find_spec("torchvision") is None, reason="no torchvision")
def test_torchvision_is_imported_first_from_a_checkout_without_pth_files(python, tmp_path):
    executable = new_environment(tmp_path / "environment")
    code = "import torchvision, poptorch; print(torchvision.ops.nms is not None)"
    assert python("-c", code, executable=executable).stdout == "True\n"


@pytest.fixture
def job(poprun, tmp_path):
    """Run two instances, and return their lines in order."""

    def run(*words, **more):
        done = poprun("-n", 2, "--output", "plain", *words, cwd=tmp_path, **more)
        assert done.returncode == 0, done.stderr
        return sorted(done.stdout.splitlines())

    return run


def of_two(names):
    """Return the lines of two instances that find these names."""
    return sorted([f"{name} {whose}" for name, whose in names.items()] * 2)


@pytest.mark.mpi
def test_instances_find_the_names_through_a_shell_and_in_another_environment(
    job, script, environment
):
    words = ("sh", "-c", f"exec {environment[0]} {script(WHOSE)}")
    assert job(*words) == of_two({**OURS, "poptorch": "theirs"})
    assert job("--sdk-names", "no", script(WHOSE)) == of_two(NONE)


@pytest.mark.mpi
@pytest.mark.sweep
def test_instances_find_the_names_however_they_are_started(job, script, tmp_path, environment):
    program = script(WHOSE)
    assert job(program) == of_two(OURS)
    assert job(environment[0], program) == of_two({**OURS, "poptorch": "theirs"})
    path = f"{package(tmp_path / 'lib', 'popart')}:{ROOT}"
    assert job(program, env={"PYTHONPATH": path}) == of_two({**OURS, "popart": "theirs"})
    assert job("--sdk-names", "yes", environment[0], program) == of_two(OURS)


@pytest.mark.mpi
def test_a_pasted_command_finds_the_names(script, tmp_path):
    made = plan(LaunchConfig(program=(str(script(WHOSE)),)))
    assert "POPDIST_SDK_NAMES=auto" in made.command
    done = subprocess.run(
        made.command, env={**os.environ, "PYTHONPATH": str(ROOT)}, cwd=tmp_path, text=True,
        capture_output=True, check=False, timeout=60, stdin=subprocess.DEVNULL,
    )  # fmt: skip
    assert found(done) == OURS


def test_a_launcher_in_an_instance_puts_the_hook_on_the_path_once_and_first():
    asked = {"POPDIST_SDK_NAMES": "auto", "PYTHONPATH": "/lib"}
    made = program_environment.hook_variables(asked)
    assert made["PYTHONPATH"].endswith("start_hook:/lib")
    assert program_environment.hook_variables(asked | made) == made
    # Behind a folder with another sitecustomize it would not run.
    behind = made["PYTHONPATH"].removesuffix(":/lib")
    assert program_environment.hook_variables({**asked, "PYTHONPATH": f"/lib:{behind}"}) == made
    assert program_environment.hook_variables({**asked, "PYTHONPATH": ""}) == {"PYTHONPATH": behind}
    assert program_environment.hook_variables({**asked, "POPDIST_SDK_NAMES": "no"}) == {}
    # Another back end of torch.distributed needs the hook as well.
    other = {**asked, "POPDIST_SDK_NAMES": "no", "POPDIST_TORCH_BACKEND": "popdist"}
    assert program_environment.hook_variables(other) == made
    assert program_environment.hook_variables({**other, "POPDIST_TORCH_BACKEND": "auto"}) == {}
    # So has the folder of the job.
    folder = {**asked, "POPDIST_SDK_NAMES": "no", "POPDIST_JOB_FOLDER": "/dev/shm/poprun-1"}
    assert program_environment.hook_variables(folder) == made


def test_gloo_and_ucx_are_kept_to_the_interface_of_the_network(tmp_path, monkeypatch):
    monkeypatch.setattr(program_environment, "_FABRIC", str(tmp_path / "absent"))
    monkeypatch.setattr(program_environment, "_ROUTES", str(tmp_path / "routes"))
    to_bytes = "{:08X}".format
    near = to_bytes(int.from_bytes(bytes([10, 99, 3, 0]), sys.byteorder))
    far = to_bytes(int.from_bytes(bytes([10, 98, 0, 0]), sys.byteorder))
    gateway = to_bytes(int.from_bytes(bytes([10, 99, 3, 1]), sys.byteorder))
    (tmp_path / "routes").write_text(
        "Iface\tDestination\tGateway\tFlags\n"
        f"eth9\t00000000\t{gateway}\t0003\n"
        f"eth8\t{far}\t{gateway}\t0003\n"
        f"eth1\t{near}\t00000000\t0001\n"
    )

    def kept(network: str, **environ: str) -> dict[str, str]:
        made = program_environment.hook_variables({"POPDIST_NETWORK": network, **environ})
        return {name: value for name, value in made.items() if name != "PYTHONPATH"}

    assert kept("ib0") == {"GLOO_SOCKET_IFNAME": "ib0"}
    assert kept("10.99.3.0/24") == kept("10.99.0.0/16") == {"GLOO_SOCKET_IFNAME": "eth1"}
    assert kept("10.98.0.0/16") == kept("fd00::/64") == {}
    assert kept("10.99.3.0/24", GLOO_SOCKET_IFNAME="mine") == {}
    assert kept("eth1", PMI_RANK="0") == {"GLOO_SOCKET_IFNAME": "eth1", "UCX_NET_DEVICES": "eth1"}
    assert kept("eth1", PMI_RANK="0", UCX_NET_DEVICES="all") == {"GLOO_SOCKET_IFNAME": "eth1"}
    (tmp_path / "absent").mkdir()
    assert kept("eth1", PMI_RANK="0") == {"GLOO_SOCKET_IFNAME": "eth1"}
