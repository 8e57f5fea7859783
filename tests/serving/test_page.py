"""The page at `/`, as it is served; test_page_in_browser.py opens it."""

import json
import re
import shutil
import subprocess
from pathlib import Path

import pytest

from mlx_packs.serving import app
from mlx_packs.serving.page import page
from tests.helpers.serving import Running

PAGE = Path(app.__file__).with_name("page.html").read_text(encoding="utf-8")


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


def test_a_host_puts_its_header_before_the_content():
    header = '<data id="api" value="http://127.0.0.1:1"></data>'
    shown = page(header)
    assert page() == PAGE and shown.count(header) == 1
    assert shown.index("<body>") < shown.index(header) < shown.index("<main")
    assert len(shown) < len(PAGE) + len(header)  # in place of a comment


def test_page_loads_nothing_and_makes_no_markup_of_text():
    assert not re.search(r"https?:|//\w+\.|@import|url\(", PAGE)
    assert re.findall(r"<[^>]* (?:src|href|action)=(\S+?)>", PAGE) == ['"data:,"']  # of no icon
    assert not re.search(r"innerHTML|outerHTML|insertAdjacent|document\.write|eval\(", PAGE)
    assert not re.search(r"<\w+[^>]* on\w+=", PAGE)
    assert re.search(r"@media \(prefers-reduced-motion: (reduce|no-preference)\)", PAGE)


@pytest.mark.skipif(shutil.which("node") is None, reason="needs node")
def test_the_last_word_on_an_answer_counts():
    up, down, yes = {"rating": "up"}, {"rating": "down"}, {"correction": "Yes."}
    cases = [(yes, up, up), (yes, down, yes | down), (up, yes, yes), (down, yes, down | yes)]
    function = re.search(r"^function feedbackAfter\(.*?^}$", PAGE, re.DOTALL | re.MULTILINE)[0]
    call = f"{json.dumps(cases)}.map(([said, change]) => feedbackAfter(said, change))"
    command = ["node", "-e", f"{function} console.log(JSON.stringify({call}))"]
    assert json.loads(subprocess.check_output(command)) == [kept for _, _, kept in cases]
