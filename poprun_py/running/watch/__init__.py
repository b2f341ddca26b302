"""A running job seen live: where each instance's time goes, which one is slow, and why.

Here live what one look at an instance tells, the stragglers, the views for people, and the log of
steps and looks that a run keeps.
Nothing here reads a file or talks to an instance: the supervisor does, and hands over what came.
May call: errors, on_use, rich_lines.
"""
