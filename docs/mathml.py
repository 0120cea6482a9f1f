"""Formulas of the site as MathML, which browsers show without a script: a hook of mkdocs."""

import html
import re
from typing import Any

from latex2mathml.converter import convert

FORMULA = re.compile(r'<(span|div) class="arithmatex">\\[(\[](.*?)\\[)\]]</\1>', re.DOTALL)


def on_page_content(content: str, **_: Any) -> str:
    """A page's HTML with its formulas converted."""
    return FORMULA.sub(_converted, content)


def _converted(found: re.Match[str]) -> str:
    kind, formula = found.groups()
    if kind == "span":
        return convert(html.unescape(formula))
    return f'<div class="formula">{convert(html.unescape(formula), display="block")}</div>'
