"""What a run has left behind: its folder found, its files read, its numbers as values.

Here live the readers of a run's files, and what follows from their numbers.
Nothing here runs a job, writes a file or makes text for people.
May call: observation, planning, errors, json_text.
"""
