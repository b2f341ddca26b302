"""Checks of files before unpickling, because unpickling runs any code that a file names.

owner           checks that only this user or root can have written the file
seal            checks that the content of the file is undamaged

No module of this package pickles or unpickles. The package uses the standard library only.
May call: none.
"""
