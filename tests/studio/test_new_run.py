"""The form of a new run: its values, uploads, the check of the examples, the plan and the start."""

import html
import json
import os
import re
import urllib.parse

import pytest

from mlx_packs.errors import PackError
from mlx_packs.studio import new_run
from mlx_packs.studio.commands import reports_of
from tests.helpers.run_folders import make_run
from tests.helpers.serving import until
from tests.helpers.variants import nightly_except

ROW = {"prompt": "Say yes", "completion": "yes"}
MARKUP = "<script>alert(1)</script>"
BAD = ['{"prompt": "no completion"}', "{", json.dumps({"prompt": MARKUP, "completion": 3})]


def write(home, name: str, *lines: str | dict):
    file = home / "data" / name
    file.parent.mkdir(exist_ok=True)
    texts = [line if isinstance(line, str) else json.dumps(line) for line in lines]
    file.write_text("".join(text + "\n" for text in texts))
    return file


class Client:
    """Requests of the browser that signed in."""

    def __init__(self, studio) -> None:
        self._studio = studio
        self._headers = {**studio.sign_in(), "Origin": studio.url}

    def page(self, path: str, **values: object) -> str:
        query = urllib.parse.urlencode({name: each for name, each in values.items() if each})
        status, _, body = self._studio.request("GET", f"{path}?{query}", headers=self._headers)
        assert status == 200, body
        return body.decode()

    def post(self, path: str, body: bytes = b"", **form: object) -> tuple[int, dict, str]:
        headers = {**self._headers, "Content-Type": "application/x-www-form-urlencoded"}
        body = body or urllib.parse.urlencode(form).encode()
        status, answered, text = self._studio.request("POST", path, body, headers)
        return status, answered, text.decode()

    def upload(self, name: str, content: bytes, **headers: str) -> tuple[int, dict]:
        path = f"/upload?{urllib.parse.urlencode({'name': name})}"
        status, _, body = self._studio.request(
            "POST", path, content, {**self._headers, "Content-Type": "text/csv", **headers}
        )
        return status, json.loads(body)


@pytest.fixture
def client(studio):
    return Client(studio)


def test_values_are_what_is_filled_in_after_the_change_of_a_button():
    form = {"model": "tiny", "rank": "16", "other": "", "iters": "", "odd": "x"}
    assert new_run.values_of(form) == {"model": "tiny", "rank": "16"}
    form |= {"other": "owner/name", "change": "rank=8 batch_size=2"}
    assert new_run.values_of(form) == {"model": "owner/name", "rank": "8", "batch_size": "2"}


def test_a_preset_gives_way_to_what_is_specified():
    assert new_run.settings_of({}) == {"iters": "200", "rank": "16", "sample_every": "50"}
    named = {"preset": "Quick look", "rank": "4", "epochs": "2"}
    assert new_run.settings_of(named) == {"epochs": "2", "rank": "4", "sample_every": "20"}
    assert new_run.settings_of({"task": "classify"}) == {
        "task": "classify",
        "iters": "200",
        "rank": "16",
    }
    assert new_run.settings_of({"preset": MARKUP, "iters": "9"})["iters"] == "9"


def test_presets_say_how_often_they_read_an_example(home):
    form = new_run.NewRun(home, {})
    form.report = {"splits": {"train": {"rows": 400}}}
    plan = {"best": {"batch_size": 4, "seconds": {"high": 600.0}}, "changes": ""}
    assert dict(form.presets(plan)) == {
        "Quick look": "reads about 60 % of the examples, in at most 3 minutes; batches 60, rank 8, "
        "answers every 20",
        "Normal": "reads each example about 2 times, in at most 10 minutes; batches 200, rank 16, "
        "answers every 50",
        "Thorough": "reads each example about 6 times, in at most 30 minutes; batches 600, "
        "patience 3, rank 16, answers every 100",
    }
    assert dict(form.presets({}))["Quick look"] == "batches 60, rank 8, answers every 20"


def test_a_split_without_usable_rows_is_about_the_file(home, monkeypatch):
    def reports(*_):
        yield {"where": "b.jsonl:12", "message": "must be a JSON object, but is a list."}
        raise PackError("--on-bad-row: none of 1 examples can be used.", "data", "data")

    monkeypatch.setattr(new_run, "reports_of", reports)
    write(home, "b.jsonl", "[]")
    form = new_run.NewRun(home, {"data": "data/b.jsonl"})
    assert len(list(form.bad_rows())) == 1
    first = "b.jsonl, line 12: must be a JSON object, but is a list."
    assert form.blocked == f"data/b.jsonl: too few rows can be used. {first}"


def test_sources_are_files_and_folders_of_examples(home):
    write(home, "a.jsonl", ROW)
    for name in ("b.CSV", "notes.txt", ".hidden.csv", "[x].csv", "a\u202eb.csv"):
        write(home, name)
    (home / "data" / "folder").mkdir()
    (home / "data" / "link.csv").symlink_to("/etc/passwd")
    assert new_run.NewRun(home, {}).sources() == ["data/a.jsonl", "data/folder"]


@pytest.mark.parametrize("name", ["My tickets (2).csv", "../../x.csv", "a/b.csv", "é\n.csv"])
def test_an_upload_is_a_file_of_data(home, client, name):
    status, answer = client.upload(name, b"prompt,completion\na,b\n")
    assert status == 200
    (file,) = os.listdir(home / "data")
    assert answer == {"data": f"data/{file}"} and re.fullmatch(r"[\w.-]+\.csv", file)
    assert new_run.NewRun(home, {}).sources() == [f"data/{file}"]
    assert client.upload(name, b"other")[1] != answer
    assert (home / "data" / file).read_bytes() == b"prompt,completion\na,b\n"


@pytest.mark.parametrize(
    ("name", "content", "headers", "code"),
    [
        ("a.exe", b"x", {}, "unsupported"),
        ("a.csv", b"", {}, "invalid"),
        ("a.csv", b"", {"Content-Length": str(3 << 30)}, "invalid"),
        ("a.csv", b"", {"Content-Length": str(1 << 30)}, "unwritable"),
    ],
)
def test_an_upload_that_is_rejected_leaves_nothing(
    home, client, monkeypatch, name, content, headers, code
):
    usage = type("Usage", (), {"free": 1 << 30})
    monkeypatch.setattr(new_run.shutil, "disk_usage", lambda _: usage)
    monkeypatch.setattr(new_run, "_SPARE_BYTES", 0 if code != "unwritable" else 1)
    status, answer = client.upload(name, content, **headers)
    assert status >= 400 and answer["error"]["code"] == code
    assert not (home / "data").exists() or os.listdir(home / "data") == []


def test_a_command_that_fails_raises_its_error(home):
    with pytest.raises(PackError) as caught:
        list(reports_of(home, "plan", "--rank=x"))
    assert (caught.value.code, caught.value.flag) == ("invalid", "rank")


@pytest.mark.slow
def test_bad_rows_are_listed_left_out_and_trained_without(home, client):
    rows = [ROW] * 4 + BAD + [{"prompt": f"Say {n}", "completion": "yes"} for n in range(40)]
    write(home, "some.jsonl", *rows)
    values = {"model": "tiny", "data": "data/some.jsonl", "preset": "Quick look", "iters": 4}

    page = client.page("/new", **values)
    lines = re.findall(r"<li><b>some\.jsonl, line (\d+)</b>", page)
    assert sorted(lines) == ["5", "6", "7"] and MARKUP not in page
    assert "Leave out 3 bad rows" in page and "disabled" in page

    page = client.page("/new", **values, on_bad_row="skip")
    assert "disabled" not in page and "are left out" in page
    assert "--on-bad-row=skip" in html.unescape(page)

    status, headers, _ = client.post("/new", **values, on_bad_row="skip", name="some")
    assert (status, headers["location"]) == (303, "/runs/some")
    until(lambda: (home / "packs" / "some" / "pack.json").is_file())


@pytest.mark.slow
def test_examples_that_are_all_bad_cannot_be_trained_on(home, client):
    write(home, "bad.jsonl", *BAD[1:2] * 3)
    page = client.page("/new", model="tiny", data="data/bad.jsonl")
    assert re.search(r'<button class="start"[^>]* disabled>', page)
    assert "bad.jsonl:1" in re.search(r'id="blocked"[^>]*>(.*?)</p>', page)[1]


@pytest.mark.slow
def test_columns_with_other_names_are_chosen(home, client):
    lines = [f"Say {n},{n} it is,{MARKUP}" for n in range(40)]
    write(home, "table.csv", f"question,answer,{MARKUP}", *lines)
    values = {"model": "tiny", "data": "data/table.csv", "preset": "Quick look", "iters": 4}
    for chosen in ({}, {"prompt_feature": "question?"}):
        page = client.page("/new", **values, **chosen)
        (select,) = re.findall('<select name="prompt_feature">(.*?)</select>', page)
        options = map(html.unescape, re.findall("<option.*?>(.*?)</option>", select))
        assert [*options] == ["none", MARKUP, "answer", "question"]
        assert "Choose them." in page and "disabled" in page and MARKUP not in page
        assert "-feature" not in page.partition('<div class="command">')[0]

    values |= {"prompt_feature": "question", "completion_feature": "answer"}
    page = client.page("/new", **values)
    assert "<b>question</b>" in page and "disabled" not in page and "<mark>0 it is" in page
    assert "--prompt-feature=question --completion-feature=answer" in page


@pytest.mark.slow
def test_examples_from_a_line_in_a_cell_are_the_next_ones(home, client):
    lines = [f'Say {n},"{n} it is\n\n\n\n\n\nreally"' for n in range(40)]
    write(home, "table.csv", "prompt,completion", *lines)
    page = client.page("/new", model="tiny", data="data/table.csv", row=3)
    places = re.findall(r"table\.csv, line (\d+): \d+ of", page)
    assert len(places) == 5 and all(int(place) % 7 == 2 for place in places)
    assert 3 < int(places[0]) <= 16  # one may be held out


@pytest.mark.nightly(seconds=20)
def test_marked_texts_are_what_the_run_is_trained_on(home, client):
    write(home, "some.jsonl", *[{"prompt": f"Say {n}", "completion": f"<{n}>"} for n in range(40)])
    for row in ("", "7"):
        page = client.page("/new", model="tiny", data="data/some.jsonl", row=row)
        shown = re.findall(r'<p class="text example">(.*?)</p>', page, re.DOTALL)
        flags = [f"--rows={','.join(str(7 + n) for n in range(5))}"] if row else []
        command = ("train", "--data=data/some.jsonl", "--show-mask", *flags)
        *_, report = reports_of(home, *command)
        for text, example in zip(shown, report["examples"], strict=True):
            spans = [span["text"] for span in example["spans"] if span["learned"]]
            assert [
                html.unescape(m) for m in re.findall("<mark>(.*?)</mark>", text, re.DOTALL)
            ] == spans


@pytest.mark.parametrize(
    ("setting", "value"),
    nightly_except(
        [("learning_rate", "fast"), ("rank", "0"), ("patience", "-1")], ("learning_rate", "fast")
    ),
)
def test_a_wrong_setting_is_said_beside_its_field(home, client, setting, value):
    page = client.page("/new", model="tiny", data="tiny", **{setting: value})
    message = re.search(rf'id="{setting}-help"[^>]*>.*?<strong class="fault">(.*?)</strong>', page)
    assert message[1].startswith(f"{setting}: ") and "disabled" in page
    status, _, page = client.post("/new", model="tiny", data="tiny", **{setting: value})
    assert status == 400 and message[1] in page and not list((home / "packs").iterdir())


def test_a_name_that_is_taken_is_said(home, client):
    make_run(home)
    status, _, page = client.post("/new", name="tickets")
    assert status == 400 and "exists already" in page


@pytest.mark.nightly(seconds=20)
def test_37_bad_rows_of_100_000_are_found(home):
    lines = [json.dumps({"prompt": f"Say {n}", "completion": "yes"}) for n in range(100_000)]
    bad = list(range(17, 100_000, 2703))
    for number in bad:
        lines[number - 1] = "{"
    write(home, "large.jsonl", *lines)

    form = new_run.NewRun(home, {"model": "tiny", "data": "data/large.jsonl"})
    assert sorted(row["line"] for row in form.bad_rows()) == bad and len(bad) == 37
    assert form.bad == 37
