"""Everything is in pyproject.toml."""

from setuptools import setup

setup()
