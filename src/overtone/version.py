"""The package's version, in a file that building can read without importing torch."""

__version__ = "0.2.0.dev0"
