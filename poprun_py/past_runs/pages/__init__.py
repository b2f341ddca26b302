"""HTML pages of one run or several runs, with their charts, which need no network.

Contains the frame of a page, charts as values, and the pages. No module here reads a run or opens a
file of the user's.
"""
