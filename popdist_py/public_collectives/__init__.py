"""The public collectives, and the conversion of their values into arrays.

Programs import the collectives from ``popdist_py``. No module of this package communicates
directly; the functions of ``popdist_py.collectives`` do.
May call: activities, collectives, context, errors, value_tree.
"""

from popdist_py.errors import require_package

require_package("numpy", "a collective of popdist_py")
