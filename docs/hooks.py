"""Prepare the pages of the site: mkdocs calls the functions below by their names."""

import html
import re
from pathlib import Path
from typing import Any

from latex2mathml.converter import convert

FORMULA = re.compile(r'(<(span|div) class="arithmatex[^>]*>)\\[(\[](.*?)\\[)\]]</\2>', re.DOTALL)
INLINE_CODE = re.compile(r"(?<!<pre>)(?<!</span>)<code>(.*?)</code>", re.DOTALL)
LINK_INTO_DOCS = re.compile(r"\]\(docs/")
LINK_TO_A_FILE = re.compile(r"\[([^\]]+)\]\((?!docs/|#|\w+:)[^)]+\)")


def on_page_markdown(markdown: str, page: Any, config: Any, **kwargs: Any) -> str:
    """Make the start page from the README, so that each of its sentences stands in one file."""
    if page.file.src_uri != "index.md":
        return markdown.replace("](../README.md", "](index.md")
    readme = (Path(config.docs_dir).parent / "README.md").read_text(encoding="utf-8")
    return LINK_INTO_DOCS.sub("](", LINK_TO_A_FILE.sub(r"\1", readme))  # the site has no files of the repository


def on_page_content(content: str, **kwargs: Any) -> str:
    """Convert the formulas of a page to MathML, which needs no script, and mark where names in code may break.

    Raises:
        ValueError: a formula has a command that is not known.
    """

    def to_mathml(match: re.Match) -> str:
        start, tag, latex = match.groups()
        mathml = convert(html.unescape(latex).strip(), display="block" if tag == "div" else "inline")
        if "\\" in mathml:  # latex2mathml passes on what it does not know
            raise ValueError(f"a command is not known in the formula {latex}")
        return f"{start}{mathml}</{tag}>"

    def breakable(match: re.Match) -> str:
        words = re.split(r" (?!\d)", match[1])  # a flag keeps its number, and does not break at its hyphens
        words = [re.sub(r"([/_]+)", r"\1<wbr>", word) if len(word) > 24 else word for word in words]
        return f"<code>{' <wbr>'.join(words)}</code>"

    return INLINE_CODE.sub(breakable, FORMULA.sub(to_mathml, content))
