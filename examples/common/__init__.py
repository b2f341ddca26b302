"""What several examples need beside their subject: data to train on, one-line errors, figures.

A program of ``examples/NAME/`` finds these modules after
``sys.path.insert(0, str(Path(__file__).resolve().parents[1]))``. From then on an optional package
that is missing is named in one line, so programs import such packages after these modules.
"""

from .optional_packages import name_missing_packages

name_missing_packages()
