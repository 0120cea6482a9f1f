"""Hooks of mkdocs: formulas become MathML, which browsers show without a script; links that leave docs/ become text.

The log and the records of studies are not searched: their many figures would hide the pages that explain them.
"""

import html
import re
from pathlib import Path
from typing import Any

from latex2mathml.converter import convert

FORMULA = re.compile(r'<(span|div) class="arithmatex">\\[(\[](.*?)\\[)\]]</\1>', re.DOTALL)

LINK = re.compile(r"\[([^\]]+)\]\(((?:\.\./)+[^)#\s]+)[^)]*\)")


def on_page_markdown(markdown: str, page: Any, config: Any, **_: Any) -> str:
    """A page's text; what lies in the repository but not in the site, such as CHANGELOG.md, keeps its name alone."""
    if page.file.src_path.startswith(("log.md", "records/")):
        page.meta["search"] = {"exclude": True}
    docs, here = Path(config.docs_dir), Path(page.file.abs_src_path).parent

    def plain(found: re.Match[str]) -> str:
        return found[0] if (here / found[2]).resolve().is_relative_to(docs) else found[1]

    return LINK.sub(plain, markdown)


def on_page_content(content: str, **_: Any) -> str:
    """A page's HTML with its formulas converted."""
    return FORMULA.sub(_converted, content)


def _converted(found: re.Match[str]) -> str:
    kind, formula = found.groups()
    mathml = convert(html.unescape(formula), display="inline" if kind == "span" else "block")
    mathml = mathml.replace("\\_", "_")  # an underscore within text, whose backslash the converter leaves
    return mathml if kind == "span" else f'<div class="formula">{mathml}</div>'
