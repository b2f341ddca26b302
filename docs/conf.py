"""The configuration of Sphinx, which makes a site of these pages: ``make docs``.

MyST reads the Markdown that GitHub shows. Autodoc reads docstrings and types. The theme is furo.
Sphinx checks links and references. All of these packages are maintained.
"""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

from poprun_py import __version__
from tools.pages.website import meaning_tables, navigation, public_names, reference, source_pages

project = "poprun-py"
version = release = __version__
copyright = "the authors of poprun-py, MIT licence"

extensions = ["myst_parser", "sphinx.ext.autodoc", "sphinx.ext.napoleon", "sphinx_copybutton"]
exclude_patterns = ["static"]

# Headings have the same anchors as on GitHub.
myst_heading_anchors = 4
# Two hyphens begin an option, so Sphinx must not join them to a dash.
smartquotes = False
myst_url_schemes = ["http", "https", "mailto", "project"]

# A block without a language is not highlighted.
highlight_language = "text"

autodoc_typehints = "signature"
autodoc_typehints_format = "short"
autodoc_preserve_defaults = True
autodoc_class_signature = "mixed"
autodoc_member_order = "bysource"
napoleon_numpy_docstring = False
napoleon_use_rtype = False
python_use_unqualified_type_names = True
maximum_signature_line_length = 88
toc_object_entries_show_parents = "hide"

# The copy button copies commands without the prompt and without their output.
copybutton_prompt_text = "$ "

html_theme = "furo"
html_title = f"poprun-py {release}"
html_static_path = ["static"]
html_css_files = ["style.css"]
html_copy_source = False
# The summary of a search result would need other pages, which browsers do not let local files read.
html_show_search_summary = False
html_show_sphinx = False
html_theme_options = {
    "navigation_with_keys": True,
    "light_css_variables": {"color-brand-primary": "#9a3b1c", "color-brand-content": "#9a3b1c"},
    "dark_css_variables": {"color-brand-primary": "#f0a184", "color-brand-content": "#f0a184"},
}


def setup(app):
    """Join the parts of the site that Sphinx does not know."""
    app.add_directive("public-names", public_names.PublicNames)
    for name, directive in reference.DIRECTIVES.items():
        app.add_directive(name, directive)
    app.connect("autodoc-process-docstring", public_names.hide_colon, priority=499)
    app.connect("autodoc-process-docstring", public_names.show_colon, priority=501)
    app.connect("source-read", source_pages.mark_links)
    app.connect("source-read", navigation.add_contents)
    app.connect("doctree-resolved", source_pages.resolve_links)
    app.connect("doctree-resolved", meaning_tables.mark_tables)
    app.connect("html-collect-pages", source_pages.pages)
