"""The reason why a model does not fit into memory, and changes of the run that save memory.

advice               the explanation, and advice with the bytes and the time of each change
changes              the changes of a run that may save memory
identical_modules    identical submodules of a model, which could share their weights

No module of this package changes a run, or writes messages.
May call: ipu, searches, errors.
"""

from popdist_py.ipu.what_if.advice import INCOMPLETE, Advice, OutOfMemory, explain
from popdist_py.ipu.what_if.changes import Kind

__all__ = ["INCOMPLETE", "Advice", "Kind", "OutOfMemory", "explain"]
