"""The page at `/`, as it is served: self-contained, well-formed, labelled and legible."""

import json
import re
import shutil
import subprocess
from html.parser import HTMLParser
from pathlib import Path

import pytest

from mlx_packs.serving import app
from tests.helpers.serving import Running

PAGE = Path(app.__file__).with_name("page.html").read_text(encoding="utf-8")
VOID = {"meta", "link", "input", "br", "img", "hr"}
FIELDS = {"input", "select", "textarea"}
# Colours of text, and what is behind them.
TEXT_ON = [("ink", "page"), ("ink", "card"), ("muted", "page"), ("muted", "card")]
TEXT_ON += [("on-after", "after"), ("warn-ink", "warn")]


class Elements(HTMLParser):
    """Elements in their order with their attributes and parents; unmatched tags raise."""

    def __init__(self, page: str) -> None:
        super().__init__()
        self.open, self.all, self.texts = [], [], {}
        self.feed(page)
        self.close()
        assert not self.open

    def handle_starttag(self, tag, attrs):
        assert len(dict(attrs)) == len(attrs), f"{tag} has an attribute twice"
        self.all.append((tag, dict(attrs), [name for name, _ in self.open]))
        if tag not in VOID:
            self.open.append((tag, len(self.all) - 1))

    def handle_endtag(self, tag):
        name, _ = self.open.pop()
        assert name == tag, f"</{tag}> closes <{name}>, line {self.getpos()[0]}"

    def handle_data(self, data):
        for _, number in self.open:
            self.texts[number] = self.texts.get(number, "") + data


@pytest.fixture(scope="module")
def elements():
    return Elements(PAGE)


def test_page_is_served_with_its_policy_and_without_a_key(shared_server):
    with Running(shared_server.worker, api_key="secret") as server:
        status, headers, body = server.request("GET", "/")
        assert (status, body.decode()) == (200, PAGE)
        assert headers["content-type"] == "text/html; charset=utf-8"
        assert headers["x-content-type-options"] == "nosniff"
        policy = dict(part.split(" ", 1) for part in headers["content-security-policy"].split("; "))
        assert policy["default-src"] == policy["frame-ancestors"] == "'none'"
        assert policy["connect-src"] == "'self'"
        assert policy["script-src"] == policy["style-src"] == "'unsafe-inline'"
        assert server.json("GET", "/v1/packs")[0] == 401


def test_page_loads_nothing_and_makes_no_markup_of_text(elements):
    assert not re.search(r"https?:|//\w+\.|@import|url\(", PAGE)
    loads = [a[k] for _, a, _ in elements.all for k in ("src", "href", "action") if k in a]
    assert loads == ["data:,"]  # no icon is asked for
    assert not re.search(r"innerHTML|outerHTML|insertAdjacent|document\.write|eval\(", PAGE)
    assert not [name for _, a, _ in elements.all for name in a if name.startswith("on")]


@pytest.mark.skipif(shutil.which("node") is None, reason="needs node")
def test_the_last_word_on_an_answer_counts():
    up, down, yes = {"rating": "up"}, {"rating": "down"}, {"correction": "Yes."}
    cases = [(yes, up, up), (yes, down, yes | down), (up, yes, yes), (down, yes, down | yes)]
    function = re.search(r"^function feedbackAfter\(.*?^}$", PAGE, re.DOTALL | re.MULTILINE)[0]
    call = f"{json.dumps(cases)}.map(([said, change]) => feedbackAfter(said, change))"
    command = ["node", "-e", f"{function} console.log(JSON.stringify({call}))"]
    assert json.loads(subprocess.check_output(command)) == [kept for _, _, kept in cases]


def test_references_are_to_elements_that_exist_once(elements):
    names = [attributes["id"] for _, attributes, _ in elements.all if "id" in attributes]
    assert len(names) == len(set(names)) > 20
    used = set(re.findall(r'\$\("([\w-]+)"\)', PAGE))
    used |= {a["aria-labelledby"] for _, a, _ in elements.all if "aria-labelledby" in a}
    assert used <= set(names)


def test_every_field_has_a_label_and_every_button_a_name(elements):
    fields = 0
    for number, (tag, attributes, parents) in enumerate(elements.all):
        if tag in FIELDS:
            label = max(i for i in range(number) if elements.all[i][0] == "label")
            assert "label" in parents and elements.texts[label].strip(), attributes
            fields += 1
        elif tag == "button":
            assert elements.texts[number].strip(), attributes
    assert fields == 11


def test_text_is_legible_in_both_schemes_and_motion_can_be_reduced():
    assert re.search(r"@media \(prefers-reduced-motion: (reduce|no-preference)\)", PAGE)
    roots = re.findall(r":root \{(.*?)\}", PAGE, re.DOTALL)
    schemes = [dict(re.findall(r"--([\w-]+): (#\w{6});", block)) for block in roots]
    assert len(schemes) == 2
    for colours in schemes:
        for text, behind in TEXT_ON:
            assert contrast(colours[text], colours[behind]) >= 4.5, (text, behind)
        assert contrast(colours["edge"], colours["card"]) >= 3  # borders of fields
        assert contrast(colours["after"], colours["card"]) >= 3  # the focus


def contrast(a: str, b: str) -> float:
    """Return the contrast ratio of two colours, by WCAG."""

    def luminance(colour: str) -> float:
        parts = [int(colour[i : i + 2], 16) / 255 for i in (1, 3, 5)]
        linear = [p / 12.92 if p <= 0.04045 else ((p + 0.055) / 1.055) ** 2.4 for p in parts]
        return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]

    dark, light = sorted((luminance(a), luminance(b)))
    return (light + 0.05) / (dark + 0.05)
