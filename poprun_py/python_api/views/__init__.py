"""How values look to people who work in Python: as text, and as HTML in a notebook.

Here live what ``str`` and ``_repr_html_`` of configurations, plans, results and views of a job say;
the values find it through ``on_use``, where it is first asked for.
Nothing here prints, or is imported by a launch. May call: views, planning, supervision,
observation, config, command_name, errors.
"""
