"""HTML pages and notebook output, made from parts such as sentences, tables and charts.

``page.py`` defines the parts and renders them with the Jinja2 templates of this folder.
``charts.py`` makes charts. No module here knows plans, jobs or runs.
"""
