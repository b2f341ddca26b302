"""The hands-on texts that docs/seeds.md goes through: one module for each, of values only."""
