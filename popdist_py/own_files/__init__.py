"""Files that are unpickled, which runs the code that they name: this user's own, and undamaged.

Here live the check of whose a file is, and the seal that tells whether it is as it was written.
Nothing here pickles, or knows what a file holds. Standard library only.
May call: nothing.
"""
