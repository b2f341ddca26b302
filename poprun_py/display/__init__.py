"""Output without its content: texts of figures, tables, HTML pages, and values in a notebook.

``formatting.py`` writes numbers, bytes, times and lists of CPUs. ``tables.py`` draws tables for a
terminal. ``page.py`` defines the parts of a page, and renders them with the Jinja2 templates in
this folder. ``charts.py`` makes charts. ``public_values.py`` connects public values with their
views. No module here knows plans, jobs or runs.
"""
