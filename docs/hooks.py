"""Formulas become MathML when the site is built, which browsers show without a script and a network."""

import html
import re
from typing import Any

from latex2mathml.converter import convert

FORMULA = re.compile(r'(<(span|div) class="arithmatex[^>]*>)\\[(\[](.*?)\\[)\]]</\2>', re.DOTALL)


def on_page_content(content: str, **kwargs: Any) -> str:
    """Convert the formulas of a page to MathML. mkdocs calls this with the HTML, where arithmatex has marked them.

    Raises:
        ValueError: a formula has a command that is not known.
    """

    def to_mathml(match: re.Match) -> str:
        start, tag, latex = match.groups()
        mathml = convert(html.unescape(latex).strip(), display="block" if tag == "div" else "inline")
        if "\\" in mathml:  # latex2mathml passes on what it does not know
            raise ValueError(f"a command is not known in the formula {latex}")
        return f"{start}{mathml}</{tag}>"

    return FORMULA.sub(to_mathml, content)
