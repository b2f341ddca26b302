"""Extensions of Sphinx for the site that ``make docs`` builds from docs/.

No module here contains texts for readers. The pages, docstrings and declarations contain them.
"""
