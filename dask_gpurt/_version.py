"""The version of the package, which ``pyproject.toml`` states too."""

__version__ = "0.1.0"
