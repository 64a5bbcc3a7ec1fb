"""Docstrings become Markdown: examples are code, and the words that begin a paragraph of a contract stand out."""

import re

import griffe


class Markdown(griffe.Extension):
    """What the docstrings of dpmf are written in, for mkdocstrings."""

    def on_object(self, *, obj, **_):
        """Called with every object, once it is loaded with its members."""
        if obj.docstring is None:
            return
        text = re.sub(r"((?:^>>> .*\n?(?:^(?!\s*$|>>> ).+\n?)*)+)", r"```pycon\n\1\n```\n", obj.docstring.value, flags=re.M)
        obj.docstring.value = re.sub(r"^(Guarantee|Cost|Errors|Raises)\b:?", r"**\1**", text, flags=re.M)
