"""Checks of files before they are unpickled, because unpickling runs code that a file chooses.

owner           checks that only this user or root can have written the file
seal            checks that the content of the file is undamaged

No module of this package pickles or unpickles. The package uses the standard library only.
May call: none.
"""
