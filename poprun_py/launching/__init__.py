"""What is kept of a run: its report and page, the timeline, the steps, and where its numbers go.

Here lives what is opened once for a run and closed at its end, for all its attempts.
Nothing here plans or runs a job, or draws.
May call: console, pages, views, runs, planning, supervision, metrics, observation, timeline,
output, instance, its own_host, config, versions, atomic_file, command_name, errors, json_text.
"""
