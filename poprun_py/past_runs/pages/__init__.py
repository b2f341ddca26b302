"""Pages for a browser that need no network: a run, several runs, and the charts in them.

Here live the frame of a page and its look, charts as values, and the pages themselves.
Nothing here reads a run, runs a job or opens a file of the user's.
May call: views, runs, planning, observation, hardware, config, supervision, errors.
"""
