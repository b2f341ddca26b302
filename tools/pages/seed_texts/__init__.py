"""The hands-on texts that docs/seeds.md goes through: one module of values for each.

Beside them, ``index`` lists the texts, and ``running`` runs a command.
"""
