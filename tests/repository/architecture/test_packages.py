"""The packages as a whole: no circles, none too full, each introduced."""

from __future__ import annotations

import ast
import configparser
import re
from collections import Counter

import pytest
from support import imports
from support.imports import circles, module_imports, modules, package_imports

MOST_MODULES = 20
# Packages without such rules: what programs import from, and the folders of hooks.
FACES = (
    *("popdist_py.poptorch", "popdist_py.collectives"),
    *("poprun_py.instance.diagnostics_hook", "popdist_py.start_hook"),
)
PAGE = (imports.ROOT / "docs" / "architecture.md").read_text(encoding="utf-8")
RULES = PAGE.partition("## Rules of direction")[2].partition("\n## ")[0]
# The modules of this folder import packages of several layers, each in a process of its own.
WITHOUT_LAYER = {"start_hook"}
PACKAGES = [name for name, file in modules().items() if file.name == "__init__.py"]


def test_no_circle_of_modules():
    assert circles(module_imports()) == []


def test_no_circle_of_packages():
    assert circles(package_imports()) == []


def test_no_package_has_too_many_modules():
    sizes = Counter(file.parent for file in modules().values() if file.name != "__init__.py")
    assert {str(folder): n for folder, n in sizes.items() if n > MOST_MODULES} == {}


def test_every_package_says_what_it_contains():
    problems = [problem for package in PACKAGES for problem in undescribed(package)]
    assert problems == []


def undescribed(package):
    """Yield what is missing in the docstring of a package."""
    text = ast.get_docstring(ast.parse(modules()[package].read_text(encoding="utf-8")))
    if not text:
        yield f"{package} has no docstring"
        return
    if not text.splitlines()[0].endswith("."):
        yield f"{package}: the first line is not one sentence"
    # A package inside a package also says what may not live there, and which others it may call.
    # Of the launcher, setup.cfg lists who may call whom.
    if not package.count(".") or package in FACES or package.startswith("poprun_py."):
        return
    if not re.search(r"Nothing here|No module", text):
        yield f"{package} does not say what may not be in it"
    allowed = text.partition("May call: ")[2]
    # The packages themselves are asked for their version only.
    others = {package.rpartition(".")[2] for package in package_imports().get(package, ())}
    others -= set(imports.PACKAGES)
    missing = {name for name in others if not re.search(rf"\b{name}\b", allowed)}
    if not allowed:
        yield f"{package} does not say which packages it may call"
    elif "every other package" not in allowed and missing:
        yield f"{package} also calls {missing}"


def test_the_page_names_what_the_packages_import():
    """The rules of direction in docs/architecture.md list what the code imports."""
    rule = re.search(r"these parts of the library `popdist_py`: (.*?)\.", RULES, re.DOTALL)
    of_library = {
        module.split(".")[1]
        for importer, found in module_imports().items()
        if importer.startswith("poprun_py")
        for module in found
        if module.startswith("popdist_py.")
    }
    assert set(re.findall(r"`(\w+)`", rule[1])) == of_library

    rule = re.search(r"`poprun_py.instance` imports only (.*?) of the launcher,", RULES, re.DOTALL)
    of_wrapper = {
        module.split(".")[1]
        for importer, found in module_imports().items()
        if importer.startswith("poprun_py.instance")
        for module in found
    }
    assert set(re.findall(r"`(\w+)`", rule[1])) == of_wrapper - {"instance"}

    rule = re.search(r"- Only (`popdist_py.*?) import\s+torch\.", RULES, re.DOTALL)
    with_torch = {
        ".".join(module.split(".")[:2])
        for module, file in modules().items()
        if re.search(r"^\s*(import|from) torch\b", file.read_text(encoding="utf-8"), re.MULTILINE)
    }
    assert set(re.findall(r"`([\w.]+)`", rule[1])) == with_torch


def layers_of_setup(contract, package):
    """Return the layers of a contract in setup.cfg as the page writes them."""
    setup = configparser.ConfigParser()
    setup.read(imports.ROOT / "setup.cfg")
    text = setup[f"importlinter:contract:{contract}"]["layers"].strip()
    return re.sub(rf"{package}\.([\w.]+)", lambda name: name[1].replace(".", "/"), text)


@pytest.mark.parametrize(
    ("contract", "package"),
    [("launcher-packages", "poprun_py"), ("library-packages", "popdist_py")],
)
def test_the_page_has_the_layers_of_setup(contract, package):
    block = re.search(rf"<!-- layers: {contract} -->\n```text\n(.*?)\n```", RULES, re.DOTALL)
    assert block[1] == layers_of_setup(contract, package)
    # Every folder is in a layer, and every folder has a row in the table of packages.
    folders = {file.parent.name for file in (imports.ROOT / package).glob("*/__init__.py")}
    layers = {name.partition("/")[0] for name in re.findall(r"[\w/]+", block[1])}
    assert folders - layers <= WITHOUT_LAYER
    table = PAGE.partition(f", `{package}/` | contents |")[2].partition("\n\n")[0]
    rows = set(re.findall(r"^\| `(\w+)` \|", table, re.MULTILINE))
    assert rows - {"sdk_names"} == folders


def test_circles_are_found_wherever_they_hide(tmp_path):
    sources = {
        "poprun_py/a/one.py": "def f():\n    from poprun_py.b import two\n",
        "poprun_py/b/two.py": "if TYPE_CHECKING:\n    from poprun_py.a.one import f\n",
        "poprun_py/c/three.py": "import poprun_py.a.one\n",
    }
    for name, text in sources.items():
        file = tmp_path / name
        file.parent.mkdir(parents=True, exist_ok=True)
        (file.parent / "__init__.py").touch()
        file.write_text(text)
    (tmp_path / "poprun_py" / "__init__.py").touch()
    assert circles(module_imports(tmp_path)) == [("poprun_py.a.one", "poprun_py.b.two")]
    assert circles(package_imports(tmp_path)) == [("poprun_py.a", "poprun_py.b")]
    assert package_imports(tmp_path)["poprun_py.c"] == {"poprun_py.a"}
