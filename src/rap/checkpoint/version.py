"""The version of the package, stated once; pyproject.toml reads it from here."""

__version__ = "0.2.0"
