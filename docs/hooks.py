"""Hooks of mkdocs: formulas become MathML, which browsers show without a script; links that leave docs/ become text.

The log and the records of studies are not searched: their many figures would hide the pages that explain them.
"""

import html
import re
from pathlib import Path
from typing import Any

from latex2mathml.converter import convert

FORMULA = re.compile(r'<(span|div) class="arithmatex">\\[(\[](.*?)\\[)\]]</\1>', re.DOTALL)

UNENDED = re.compile(r"(\w)=\1\+(\w)\+(\w)\.id\b")
"""What lunr, the search, adds to a node's text for an edge: its letter, and the number of the node that it leads to.

Nodes of equal text are merged, and edges with digits can have the text of others: then searches for figures fail.
"""

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


def on_post_build(config: Any, **_: Any) -> None:
    """End the numbers in the texts of lunr's nodes, so that no two nodes have the same."""
    (worker,) = Path(config.site_dir).glob("assets/javascripts/workers/search.*.min.js")
    text, count = UNENDED.subn(r'\1=\1+\2+\3.id+","', worker.read_text(encoding="utf-8"))
    assert count == 1, f"{count} places in {worker.name}: see whether this lunr still merges nodes that differ"
    worker.write_text(text, encoding="utf-8")


def _converted(found: re.Match[str]) -> str:
    kind, formula = found.groups()
    mathml = convert(html.unescape(formula), display="inline" if kind == "span" else "block")
    mathml = mathml.replace("\\_", "_")  # an underscore within text, whose backslash the converter leaves
    return mathml if kind == "span" else f'<div class="formula">{mathml}</div>'
