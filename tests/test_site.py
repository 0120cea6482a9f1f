"""The built site in a real browser without a network: nothing is asked of other hosts, and the search finds things.

`make docs` builds it and runs this; elsewhere it is skipped.
"""

import html
import re
import shutil
from collections.abc import Iterator
from pathlib import Path
from urllib.parse import unquote

import pytest
from playwright.sync_api import Browser, Page, expect, sync_playwright

DOCS = Path(__file__).resolve().parents[1] / "docs"
SITE = DOCS.parent / "build" / "site"
CHROMIUM = shutil.which("chromium")
BUILT = sorted({*SITE.rglob("*.html")} - {SITE / "404.html"})  # that one is for a server
SIZES = {"laptop": (1280, 800), "phone": (390, 844)}

pytestmark = [
    pytest.mark.skipif(not BUILT, reason="the site is not built: make docs"),
    pytest.mark.skipif(CHROMIUM is None, reason="needs chromium"),
]


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    with sync_playwright() as playwright:
        yield playwright.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("size", SIZES)
def test_every_page_fits_and_asks_nobody(browser: Browser, size: str, scheme: str) -> None:
    """No request to another host, no error on the console, no page that is wider than the window."""
    width, height = SIZES[size]
    page = browser.new_page(viewport={"width": width, "height": height}, color_scheme=scheme)
    complaints: list[str] = []
    page.on("request", lambda request: request.url.startswith(("file:", "data:")) or complaints.append(request.url))
    page.on("console", lambda message: message.type in ("error", "warning") and complaints.append(message.text))
    page.on("pageerror", lambda error: complaints.append(str(error)))
    for file in BUILT:
        page.goto(file.as_uri())
        if page.evaluate("document.documentElement.scrollWidth") > width:
            complaints.append(f"{file.name} is wider than a {size}")
        cut = "[...document.querySelectorAll('.formula')].some((one) => one.scrollWidth > one.clientWidth)"
        if size == "laptop" and page.evaluate(cut):
            complaints.append(f"{file.name} has a formula that is wider than its column")
    page.close()
    assert complaints == []


def test_settings_are_read_on_a_phone_without_scrolling_sideways(browser: Browser) -> None:
    width, height = SIZES["phone"]
    page = browser.new_page(viewport={"width": width, "height": height})
    page.goto((SITE / "configuration.html").as_uri())
    page.wait_for_selector(".md-typeset__scrollwrap")  # which a script makes around every table
    ends = page.eval_on_selector_all("td", "cells => cells.map((cell) => cell.getBoundingClientRect().right)")
    assert max(ends) <= width
    page.close()


def letters(formula: str) -> str:
    """The Latin letters and digits that a reader of a formula in TeX sees."""
    return "".join(re.findall(r"[A-Za-z0-9]", re.sub(r"\\(?!(?:cos|exp|log|max|min)\b)[A-Za-z]+", "", formula)))


@pytest.mark.parametrize("source", sorted(DOCS.rglob("*.md")), ids=lambda source: str(source.relative_to(DOCS)))
def test_formulas_say_what_their_source_says(source: Path) -> None:
    """Each formula is one of its own, has the letters of its source, and nothing of TeX is left in it."""
    text = re.sub(r"^```.*?^```|`[^`\n]+`", "", source.read_text(encoding="utf-8"), flags=re.DOTALL | re.MULTILINE)
    written = re.findall(r"\$\$.+?\$\$|\$[^$]+\$", text, re.DOTALL)
    built = (SITE / source.relative_to(DOCS).with_suffix(".html")).read_text(encoding="utf-8")
    shown = [html.unescape(re.sub("<[^>]+>", "", one)) for one in re.findall(r"<math.*?</math>", built, re.DOTALL)]
    assert [letters(one) for one in written] == ["".join(re.findall(r"[A-Za-z0-9]", one)) for one in shown]
    assert not [one for one in shown if re.search(r"[\\$]", one)]


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize(
    ("wanted", "found"),
    {
        "kept_share": "Does the correction leave anything?",
        "hyperparameters": "Hyperparameters for 0.5B, 1.5B and 7B",
        "1.5B": "1.5B on one GPU",
        "LoRA 24 GB": "LoRA in 24 GB",
        "dashboard": "Trackers",
        "cite": "Cite: BibTeX",
    }.items(),
)
def test_search(browser: Browser, size: str, wanted: str, found: str) -> None:
    """Common searches lead to a page or section about them, among the first three pages."""
    width, height = SIZES[size]
    page: Page = browser.new_page(viewport={"width": width, "height": height})
    page.goto((SITE / "index.html").as_uri())
    if size == "phone":
        page.locator("label[for=__search]").locator("visible=true").first.click()
    page.locator("input.md-search__input").press_sequentially(wanted)
    expect(page.locator(".md-search-result__meta")).to_contain_text("matching document")
    results = page.locator(".md-search-result__item").all_inner_texts()
    assert any(found in result for result in results[:3])
    page.close()


def test_every_link_within_the_site_has_its_target() -> None:
    """Files and anchors, in the pages as they were built."""
    texts = {file: file.read_text(encoding="utf-8") for file in BUILT}
    anchors = {file: set(re.findall(r'\bid="?([^"\s>]+)', text)) for file, text in texts.items()}
    broken = []
    for file, text in texts.items():
        for link in re.findall(r'<a [^>]*?href="([^"]*)"', text):
            path, _, anchor = unquote(link).partition("#")
            if re.match(r"\w+:", link):
                continue
            target = (file.parent / path).resolve() if path else file
            if not target.is_file() or (anchor and target in anchors and anchor not in anchors[target]):
                broken.append(f"{file.relative_to(SITE)}: {link}")
    assert broken == []
