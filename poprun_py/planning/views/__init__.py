"""Plans, machines and results as text for people, and as JSON for programs.

Here live tables, trees, pictures and the report; all are values in, text out.
Nothing here prints or decides. May call: runs, planning, supervision, hosts, output, hardware,
instance, config, environment, errors, command_name, rich_lines.
"""
