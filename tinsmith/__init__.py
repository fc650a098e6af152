"""Tinsmith: a self-hosted post-training service that speaks the Tinker API."""

from importlib import metadata

try:
    __version__ = metadata.version("tinsmith")
except metadata.PackageNotFoundError:  # the files lie in PYTHONPATH, and nothing has been installed
    __version__ = "0+unknown"
