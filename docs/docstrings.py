"""What mkdocstrings needs to know of dpmf: how its docstrings are written."""

import re

import griffe


class Docstrings(griffe.Extension):
    """Docstrings become Markdown."""

    def on_package(self, *, pkg, **_):
        """Called with the package itself."""
        pkg.docstring.value = markdown(pkg.docstring.value)

    def on_object(self, *, obj, **_):
        """Called with every object, once it is loaded."""
        if obj.is_alias:
            return
        if obj.is_class and "__new__" in obj.members and "__init__" not in obj.members:
            made = obj.members.pop("__new__")
            made.name = "__init__"
            obj["__init__"] = made
        if obj.docstring is not None:
            obj.docstring.value = markdown(obj.docstring.value)


def markdown(text):
    """Examples are code, and the words that begin a paragraph of a contract stand out."""
    text = re.sub(r" +# doctest: .*", "", text)
    text = re.sub(r"((?:^>>> .*\n?(?:^(?!\s*$|>>> ).+\n?)*)+)", r"```pycon\n\1\n```\n", text, flags=re.MULTILINE)
    return re.sub(r"^(Guarantee|Cost|Errors|Raises)\b:?", r"**\1**", text, flags=re.MULTILINE)
