"""Generators of pages, tables and figures in docs: ``python -m tools.pages.NAME`` in the root."""
