"""Who may read: the login, its cookie, and where requests come from."""

import stat
import urllib.parse
from pathlib import Path

import pytest
from starlette.routing import Mount

from mlx_packs.cli import studio as command
from mlx_packs.reading import sha256
from mlx_packs.serving.page import ASKED
from mlx_packs.studio.access import LOGIN, POLICY
from mlx_packs.studio.app import __file__ as app_file
from tests.helpers.run_folders import losses, make_run

# uPlot 1.6.32 of the npm registry, package/dist/uPlot.iife.min.js
UPLOT = "19c8d4c6ad88929a79f4ae49d6f7161566dfd0ba3d15cc495e974f787eb78f1f"
MARKUP = "<script>alert(1)</script>"


def test_the_link_lets_one_browser_in_once(studio):
    status, headers, body = studio.request("GET", studio.link)
    cookie = headers["set-cookie"]
    assert status == 200 and b'content="0; url=/"' in body
    assert {"HttpOnly", "SameSite=strict", "Path=/"} <= set(cookie.split("; "))

    signed = {"Cookie": cookie.partition(";")[0]}
    assert studio.request("GET", "/", headers=signed)[0] == 200
    assert studio.request("GET", studio.link, headers=signed)[0] == 200  # the same browser again


def test_a_used_or_wrong_token_is_rejected(studio):
    link = studio.link
    for wrong in (LOGIN, f"{LOGIN}?token=", f"{LOGIN}?token=%ff%00", link[:-1]):
        assert studio.request("GET", wrong)[0] == 403
    studio.sign_in()
    for used in (link, f"{LOGIN}?token="):
        status, headers, body = studio.request("GET", used)
        assert status == 403 and "set-cookie" not in headers and b"used already" in body


def requests(app) -> list[tuple[str, str]]:
    """Return a method and path of every route, from the application."""
    files = [
        ("GET", r.path + "/studio.js") if isinstance(r, Mount) else (min(r.methods), r.path)
        for r in app.routes
    ]
    return [(method, path.replace("{name}", "tickets")) for method, path in files]


FORM = "application/x-www-form-urlencoded"
HOST = "http://127.0.0.1:{port}"
FOREIGN = {
    "no cookie": ({"Cookie": ""}, 401),
    "wrong cookie": ({"Cookie": "packs-00000000=secret"}, 401),
    "origin": ({"Origin": "https://example.com"}, 403),
    "port": ({"Origin": "http://127.0.0.1:1"}, 403),
    "no origin": ({"Origin": "null"}, 403),
    "site": ({"Sec-Fetch-Site": "cross-site"}, 403),
    "other port": ({"Sec-Fetch-Site": "same-site"}, 403),
    "host": ({"Host": "example.com"}, 403),
    "rebound host": ({"Host": "studio.example.com:8090"}, 403),
}


@pytest.mark.parametrize("kind", FOREIGN)
def test_every_route_rejects_foreign_requests(home, studio, kind):
    make_run(home, metrics=losses(10))
    signed = studio.sign_in()
    headers, expected = FOREIGN[kind]
    before = sorted(home.rglob("*"))
    every = requests(studio.app)
    for method, path in every:
        if path == LOGIN and "Host" not in headers:
            continue  # it is how a browser gets in
        ours = {"Origin": HOST.format(port=studio.port)}
        status, answered, body = studio.request(method, path, b"", signed | ours | headers)
        assert (status, path) == (expected, path)
        assert b"tickets" not in body and set(map(str.lower, POLICY)) <= set(answered)
    assert sorted(home.rglob("*")) == before
    print(f"{kind}: {len(every)} routes answer {expected}")


def test_every_route_answers_the_browser_that_signed_in(home, studio):
    make_run(home, metrics=losses(10, 20))
    signed = studio.sign_in()
    ours = {"Origin": HOST.format(port=studio.port), "Sec-Fetch-Site": "same-origin"}
    for path in [path for method, path in requests(studio.app) if method == "GET"]:
        status, headers, _ = studio.request("GET", path, headers=signed | ours)
        assert (status, path) == (400 if path in ASKED else 200, path)  # no server runs
        assert "'unsafe-inline'" not in headers["content-security-policy"].partition("style")[0]


def test_a_change_needs_the_origin_of_our_page(home, studio):
    make_run(home)
    ours = {"Origin": HOST.format(port=studio.port), "Content-Type": FORM}
    signed = studio.sign_in() | {"Content-Type": FORM}
    path = "/runs/tickets/stop"
    assert studio.request("POST", path, b"", signed)[0] == 403
    assert studio.request("POST", path, b"", signed | ours)[0] == 409  # it does not run
    for body, kind, status in (
        (b"{}", "text/plain", 415),
        (b"a=1&" * 200, FORM, 400),
        (b"\xff", FORM, 400),
    ):
        headers = signed | ours | {"Content-Type": kind}
        assert studio.request("POST", path, body, headers)[0] == status


def test_texts_of_runs_are_escaped(home, studio):
    samples = [{"batch": 0, "prompt": MARKUP, "expected": MARKUP, "answer": MARKUP + "\u202e"}]
    ended = {"reason": "diverged", "error": MARKUP}
    make_run(home, metrics=losses(10, 20), samples=samples, ended=ended)
    make_run(home, "<b>odd")
    signed = studio.sign_in()
    for path in ("/", "/runs/tickets", "/runs/tickets/report", "/runs/<script>"):
        body = studio.request("GET", urllib.parse.quote(path), headers=signed)[2].decode()
        assert MARKUP not in body and "<b>" not in body and "\u202e" not in body
    report = home / "packs" / "tickets-run" / "report.html"
    report.write_text(MARKUP)  # the page in a folder could have any content
    assert MARKUP.encode() not in studio.request("GET", "/runs/tickets/report", headers=signed)[2]


@pytest.mark.parametrize(
    ("path", "status"),
    [
        ("/runs/gone", 404),
        ("/runs/..%2f..", 404),
        ("/nothing", 404),
        ("/static/../app.py", 404),
        ("/static/%2e%2e/app.py", 404),
        ("/runs/tickets/lines?from=-1", 400),
        ("/runs/tickets/lines?from=" + "9" * 400, 400),
        ("/runs/damaged", 400),
    ],
)
def test_errors_are_pages(home, studio, path, status):
    make_run(home)
    (make_run(home, "damaged") / "config.json").write_text("{")
    answer = studio.request("GET", path, headers=studio.sign_in())
    assert answer[0] == status and b"This did not work" in answer[2]


def test_a_browser_is_opened_by_a_file_that_others_cannot_read(tmp_path, monkeypatch, run):
    opened = []

    def open_browser(address: str) -> None:
        file = Path(urllib.parse.unquote(urllib.parse.urlsplit(address).path))
        opened.append((file, stat.S_IMODE(file.stat().st_mode), file.read_text()))

    monkeypatch.setattr(command.webbrowser, "open_new_tab", open_browser)
    monkeypatch.setenv("DISPLAY", ":0")
    monkeypatch.setattr("mlx_packs.serving.running.run_until_signalled", lambda *_: None)
    code, out, _ = run("studio", "--home", tmp_path, "--port", 0)

    (file, mode, text) = opened[0]
    link = out.split("http://")[1].split()[0]
    assert (code, mode) == (0, 0o600) and link in text and not file.exists()

    code, out, _ = run("studio", "--home", tmp_path, "--port", 0, "--no-browser")
    assert code == 0 and len(opened) == 1


def test_a_home_that_is_none_is_one_line(tmp_path, run):
    code, out, err = run("studio", "--home", tmp_path / "gone")
    assert (code, out) == (2, "") and "--home" in err and "no such folder" in err


@pytest.mark.parametrize("flag", ["--out=elsewhere/mine", "--seeds=2", "--hosts=hosts.json"])
def test_a_run_that_no_page_lists_is_not_opened(tmp_path, rejected, monkeypatch, flag):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "hosts.json").write_text("[]")
    error = rejected("train", flag, "--open")
    assert (error.code, error.flag) == ("conflict", "open") and not list(tmp_path.glob("*-run"))


def test_the_vendored_script_is_the_published_one():
    assert sha256(Path(app_file).parent / "static" / "uplot.min.js") == UPLOT
