"""Puts this folder on the path, for the helpers beside the tests (watching.py)."""
