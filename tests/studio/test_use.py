"""Use, Ratings and Export: the commands of the forms, and real children on the bundled model."""

import http.client
import json
import os
import re
import signal
import subprocess
import sys
import time
import urllib.parse
from pathlib import Path

import pytest

from mlx_packs import Pack
from mlx_packs.convert.interop import import_adapter
from mlx_packs.errors import PackError
from mlx_packs.learning.rows import FILES
from mlx_packs.runtime import mx
from mlx_packs.studio import app
from mlx_packs.studio.commands import Child, Outcome
from mlx_packs.studio.use import COMMANDS
from tests.helpers.packs import random_pack
from tests.helpers.serving import until

PROMPT = "Remind me to call"


@pytest.fixture
def packed(home, shared_tiny) -> Path:
    """A home with the pack ``tickets`` of the bundled model."""
    random_pack(shared_tiny, 3, 4, ("q_proj", "down_proj"), size=0.3).save(home / "packs/tickets")
    return home


def browser_of(studio):
    """Return a function that sends requests as the pages do, with the form or JSON of a body."""
    signed = studio.sign_in() | {"Origin": studio.url}

    def ask(method: str, path: str, body: object = None, **form: str) -> tuple[int, str]:
        headers = dict(signed)
        if method == "POST" and body is None:
            headers["Content-Type"] = "application/x-www-form-urlencoded"
            body = urllib.parse.urlencode(form).encode()
        status, _, answer = studio.request(method, path, body, headers)
        return status, answer.decode()

    return ask


def outcome_of(ask, screen: str) -> tuple[str, str]:
    """Return state and text of a command when it works no longer."""
    until(lambda: json.loads(ask("GET", f"/{screen}/state")[1])[0] != "working", 60)
    return tuple(json.loads(ask("GET", f"/{screen}/state")[1]))


@pytest.mark.parametrize(
    ("screen", "form", "command"),
    [
        ("use", {}, "serve --port=0 --model=tiny"),
        (
            "use",
            {"model": "tiny", "pack:a": "on", "pack:b": "on", "learn": "on"},
            "serve --port=0 --model=tiny --pack=packs/a --pack=packs/b --learn=learned/a",
        ),
        ("ratings", {"folder": "a"}, "learn learned/a"),
        ("ratings", {"folder": "a", "version": "2"}, "learn learned/a --use=2"),
        (
            "export",
            {"pack": "a", "to": "ollama", "out": "o", "from": "m:1b"},
            "export packs/a --to=ollama --out=o --from=m:1b",
        ),
        ("export", {"pack": "a", "to": "lmstudio", "out": "o"}, "export packs/a --to=lmstudio"),
        (
            "export",
            {"pack": "a", "to": "merged", "out": "o", "same": "on"},
            "merge packs/a --out=o --requantize=same",
        ),
    ],
)
def test_a_form_is_a_command_of_the_terminal(screen, form, command):
    assert " ".join(COMMANDS[screen](form)) == command


@pytest.mark.parametrize("name", ["..", "../a", "/etc", "-x", "", "a/b", "a" * 65, "a\u202eb"])
@pytest.mark.parametrize(
    ("screen", "field"),
    [("use", "pack"), ("ratings", "folder"), ("export", "pack"), ("export", "out")],
)
def test_a_name_that_could_lead_elsewhere_starts_nothing(screen, field, name):
    form = {"pack": "a", "to": "peft", "out": "o"}
    form |= {f"pack:{name}": "on"} if screen == "use" else {field: name}
    with pytest.raises(PackError, match="letters, digits"):
        COMMANDS[screen](form)


def test_screens_of_an_empty_home_say_what_to_do(studio):
    ask = browser_of(studio)
    assert "Start with a finished run" in ask("GET", "/use")[1]
    assert "There is no pack yet" in ask("GET", "/export")[1]
    assert "No ratings yet" in ask("GET", "/ratings")[1]
    for path in ("/v1/models", "/v1/packs"):
        status, answer = ask("GET", path)
        assert status == 400 and "No model answers" in json.loads(answer)["error"]["message"]


@pytest.mark.slow
def test_an_export_shows_what_the_command_verified_and_comes_back_identical(
    packed, studio, run, monkeypatch
):
    ask = browser_of(studio)
    assert ask("POST", "/export", pack="tickets", to="peft", out="for-peft")[0] == 303
    assert outcome_of(ask, "export")[0] == "done"
    page = ask("GET", "/export")[1]
    count = len(Pack.open(packed / "packs/tickets").specs)
    assert f"Checked: {2 * count} tensors read back, {count} modules compared" in page
    assert "adapter_model.safetensors" in page and "packs export packs/tickets" in page

    shown = re.search("<code id=.command.>packs (.*?)</code>", page)[1].split()
    monkeypatch.chdir(packed)
    assert run(*shown[:-1], "--out=in-terminal")[0] == 0  # the command as shown, but for its folder
    for file in (packed / "for-peft").iterdir():
        assert file.read_bytes() == (packed / "in-terminal" / file.name).read_bytes()

    import_adapter(packed / "for-peft", packed / "again", "tiny")
    tensors = Pack.open(packed / "packs/tickets").load_tensors()
    again = Pack.open(packed / "again").load_tensors()
    assert sorted(again) == sorted(tensors)
    assert all(mx.array_equal(again[name], tensors[name]).item() for name in tensors)

    ask("POST", "/export", pack="tickets", to="peft", out="for-peft")
    state, text = outcome_of(ask, "export")
    assert state == "failed" and "already exists" in text and text in ask("GET", "/export")[1]


@pytest.mark.slow
def test_a_merge_shows_its_drift(packed, studio):
    ask = browser_of(studio)
    ask("POST", "/export", pack="tickets", to="merged", out="whole")
    assert outcome_of(ask, "export")[0] == "done"
    page = ask("GET", "/export")[1]
    assert "Checked: KL in nats per token" in page and "model.safetensors" in page


def test_a_merge_that_fails_its_gate_says_that_nothing_was_written(studio, monkeypatch):
    report = {"passed": False, "requantize": "same", "tried": {"same": 0.5}, "max_drift": 0.02}
    ended = Outcome("done", "", report, "packs merge")
    monkeypatch.setattr(app.Studio, "outcome", lambda *_: ended)
    page = browser_of(studio)("GET", "/export")[1]
    assert "Nothing was written" in page and "by 0.5; at most 0.02 passes" in page


def test_a_form_keeps_what_was_chosen_when_its_command_has_ended(packed, studio, monkeypatch):
    ask = browser_of(studio)
    form = {"pack": "tickets", "to": "peft", "out": "mine", "same": "on"}
    ended = Outcome("failed", "full", {}, "packs export", PackError("full"), form)
    monkeypatch.setattr(app.Studio, "outcome", lambda *_: ended)
    page = ask("GET", "/export")[1]
    assert '<option value="peft" selected>' in page and 'value="mine"' in page
    assert 'name="same" checked' in page

    form = {"model": "tiny", "pack:other": "on"}
    ended = Outcome("done", "", {"address": "http://127.0.0.1:1"}, "packs serve", None, form)
    assert "Stop answering" in ask("GET", "/use")[1]
    assert "Stop answering" in ask("GET", "/use?pack=other")[1]
    page = ask("GET", "/use?pack=tickets")[1]
    assert "Another pack answers now" in page and 'name="pack:tickets" checked' in page


@pytest.mark.slow
def test_columns_answer_as_packs_generate_does(packed, studio, run, monkeypatch):
    monkeypatch.chdir(packed)
    monkeypatch.setenv("MLX_PACKS_API_KEY", "secret")  # which the server then asks for
    ask = browser_of(studio)
    ask("POST", "/use", **{"model": "tiny", "pack:tickets": "on", "learn": "on"})
    assert outcome_of(ask, "use") == ("done", "")

    packs = json.loads(ask("GET", "/v1/packs")[1])
    hashes = {pack["name"]: pack["sha256"] for pack in packs["data"]}
    assert hashes == {"tickets": Pack.open("packs/tickets")._adapters_hash}

    answers = {}
    for name, options in (("base", ()), ("tickets", ("--pack", "packs/tickets"))):
        body = {"model": name, "messages": [{"role": "user", "content": PROMPT}]}
        body |= {"temperature": 0, "max_tokens": 24, "seed": 1}
        status, text = ask("POST", "/v1/chat/completions", body)
        answer = json.loads(text)
        answers[name] = answer["choices"][0]["message"]["content"]
        generate = [
            "generate",
            "--prompt",
            PROMPT,
            "--temperature",
            "0",
            "--max-tokens",
            "24",
            *options,
        ]
        code, out, err = run(*generate, "--json")
        assert (status, code) == (200, 0), err
        assert answers[name] == json.loads(out)["text"]
    assert answers["base"] != answers["tickets"]

    rated = {"id": answer["id"], "rating": "down"}
    assert json.loads(ask("POST", "/v1/feedback", rated)[1])["kept"] == [FILES["kto"]]
    page = ask("GET", "/ratings")[1]
    assert "1 rated, 0 corrected" in page and "disabled" in page

    status, stream = ask("POST", "/v1/chat/completions", body | {"stream": True})
    assert status == 200 and stream.rstrip().endswith("data: [DONE]")
    status, rejected = ask("POST", "/v1/chat/completions", body | {"model": "gone"})
    assert status == 404 and "gone" in json.loads(rejected)["error"]["message"]

    assert ask("POST", "/use/stop")[0] == 303
    assert json.loads(ask("GET", "/use/state")[1]) == ["", ""]
    assert ask("GET", "/v1/models")[0] == 400


@pytest.mark.nightly(seconds=20)
def test_ratings_train_a_candidate_and_a_version_is_put_back(packed, studio):
    """Twenty rated answers of the pack; the version that learning makes is not of interest."""
    ask = browser_of(studio)
    ask("POST", "/use", **{"pack:tickets": "on", "learn": "on"})
    assert outcome_of(ask, "use")[0] == "done"
    for number in range(60):
        messages = [{"role": "user", "content": f"Remind me of number {number}"}]
        body = {"model": "tickets", "messages": messages, "max_tokens": 4, "temperature": 0}
        answer = json.loads(ask("POST", "/v1/chat/completions", body)[1])
        correction = {"id": answer["id"], "correction": f"Reminder {number}."}
        assert ask("POST", "/v1/feedback", correction)[0] == 200
    assert "60 corrected" in ask("GET", "/ratings")[1]

    ask("POST", "/ratings", folder="tickets")
    assert outcome_of(ask, "ratings")[0] == "done", outcome_of(ask, "ratings")
    page = ask("GET", "/ratings")[1]
    assert "The candidate: dpo" in page and "Version 1 is served" in page
    assert "Put version 0 back" in page

    ask("POST", "/ratings", folder="tickets", version="0")
    assert outcome_of(ask, "ratings")[0] == "done"
    page = ask("GET", "/ratings")[1]
    assert "Version 0 is served" in page and "Put version 1 back" in page


@pytest.mark.slow
def test_the_error_of_a_command_is_shown_as_it_is(packed, studio):
    ask = browser_of(studio)
    ask("POST", "/use", **{"pack:gone": "on"})
    state, text = outcome_of(ask, "use")
    assert state == "failed" and text == "packs/gone: no such pack folder."
    assert text in ask("GET", "/use")[1]


@pytest.mark.slow
def test_children_end_when_the_studio_is_killed(packed):
    code = (
        "import sys, time; from pathlib import Path; from mlx_packs.studio.commands import Child\n"
    )
    code += "child = Child(Path('.'), 'serve', '--port=0')\n"
    code += "while child.outcome.state == 'working': time.sleep(0.05)\n"
    code += "print(child.outcome.report['address'], flush=True); time.sleep(600)"
    studio = subprocess.Popen(
        [sys.executable, "-c", code], cwd=packed, stdout=subprocess.PIPE, text=True
    )
    address = urllib.parse.urlsplit(studio.stdout.readline().strip()).netloc

    def answers() -> bool:
        connection = http.client.HTTPConnection(address, timeout=5)
        try:
            connection.request("GET", "/health")
            return connection.getresponse().status == 200
        except OSError:
            return False
        finally:
            connection.close()

    assert answers()
    os.kill(studio.pid, signal.SIGKILL)
    studio.communicate()
    started = time.monotonic()
    until(lambda: not answers(), 30)
    print(f"the server ended {time.monotonic() - started:.1f} s after the studio")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("number", "text"), [(signal.SIGTERM, "interrupted"), (signal.SIGKILL, "killed (signal 9)")]
)
def test_a_server_that_ends_has_failed(packed, number, text):
    child = Child(packed, "serve", "--port=0")
    until(lambda: child.outcome.state != "working", 60)
    assert child.outcome.state == "done"
    child._process.send_signal(number)
    until(lambda: child.outcome.state != "done", 60)
    assert child.outcome.state == "failed" and text in child.outcome.text
    child.stop()
