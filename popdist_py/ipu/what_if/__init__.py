"""The reason why a model does not fit into memory, and changes of the run that save memory.

advice               the explanation, and the changes with the bytes that each of them saves
identical_modules    identical submodules of a model, which could share their weights

No module of this package changes a run, or writes messages.
May call: ipu, searches, errors.
"""

from popdist_py.ipu.what_if.advice import Advice, Kind, OutOfMemory, explain

__all__ = ["Advice", "Kind", "OutOfMemory", "explain"]
