"""TeX becomes MathML when the site is built: pages need no script and no network to show formulas."""

import html
import re

from latex2mathml.converter import convert

# What pymdownx.arithmatex leaves of $…$ and $$…$$.
_TEX = re.compile(r'<(span|div) class="arithmatex">\\[(\[](.*?)\\[)\]]</\1>', re.DOTALL)


def on_page_content(content, **_):
    """Called by MkDocs with the HTML of every page."""

    def mathml(found):
        tex = html.unescape(found[2]).strip()
        # A formula that is wider than the screen scrolls by itself.
        return f'<div class="formula">{convert(tex, display="block")}</div>' if found[1] == "div" else convert(tex)

    return _TEX.sub(mathml, content)
