"""What setup.cfg cannot say: a .pth file goes beside the packages, in every kind of install."""

from pathlib import Path

from setuptools import setup
from setuptools.command.build_py import build_py

_HOOK = "popdist_torchvision_hook"


class BuildWithPth(build_py):
    """Writes the .pth file of the hook into the wheel; into that of an editable install too."""

    def run(self):
        """Build, then add the file."""
        super().run()
        editable = getattr(self, "editable_mode", False)
        install = self.get_finalized_command("install")
        target = Path(install.install_purelib if editable else self.build_lib)
        target.mkdir(parents=True, exist_ok=True)
        (target / f"{_HOOK}.pth").write_text(f"import {_HOOK}\n")


setup(cmdclass={"build_py": BuildWithPth})
