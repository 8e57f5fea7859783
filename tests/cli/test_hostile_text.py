"""Rows, templates, names and generated text with control characters: none reaches a terminal."""

import json
import logging
import os
import shutil

import click
import pytest

from mlx_packs.bases.files import tiny_checkpoint
from mlx_packs.cli.main import packs
from mlx_packs.cli.output import exit_if_failed
from mlx_packs.inference import generate as generation
from mlx_packs.terminal import printable_text
from tests.helpers.packs import BASE, edit_manifest, write_pack
from tests.helpers.rows import chat, write_rows

HOSTILE = "x\x1b]0;owned\x07\x9b31m\u202ey\u2066\u200f"
SAFE = "x?]0;owned??31m?y??"
PIECES = ["a\n\tb\x1b", "[31m", "\x1b]0;", "owned\x07\u202e", "\udc9b", "c"]


def check_safe(*texts: str) -> None:
    for text in texts:
        assert printable_text(text) == text


@pytest.fixture
def generated(monkeypatch) -> None:
    """Bases generate escape sequences, in pieces."""
    monkeypatch.setattr(generation, "stream", lambda *_, **__: iter(PIECES))


def test_generated_text_cannot_steer_the_terminal(run, generated):
    code, out, _ = run("generate", "--prompt", "x")
    assert (code, out) == (0, "a\n\tb?[31m?]0;owned???c\n")


def test_generated_text_is_whole_in_json(run, generated):
    code, out, _ = run("generate", "--prompt", HOSTILE, "--json")
    check_safe(out)
    assert code == 0 and json.loads(out)["text"] == "".join(PIECES)
    assert json.loads(out)["prompt"] == HOSTILE


@pytest.mark.parametrize("json_flag", [(), ("--json",)], ids=["text", "json"])
def test_rows_and_templates_cannot_steer_the_terminal(here, run, json_flag):
    base = shutil.copytree(tiny_checkpoint(), here / "base")
    config = json.loads((base / "tokenizer_config.json").read_text())
    template = "{% for m in messages %}" + HOSTILE + "{{ m['content'] }}\n{% endfor %}"
    (base / "tokenizer_config.json").write_text(json.dumps(config | {"chat_template": template}))
    (base / "chat_template.jinja").write_text(template, encoding="utf-8")

    write_rows(here, **{HOSTILE: [chat(HOSTILE, "b")] * 4})

    data = here / f"{HOSTILE}.jsonl"
    command = ("train", "--model", "base", "--data", data, "--show-mask", *json_flag)
    code, out, err = run(*command)
    assert code == 0, err
    check_safe(out, err)

    if json_flag:
        spans = json.loads(out)["examples"][0]["spans"]
        assert "".join(span["text"] for span in spans).count(HOSTILE) == 3
    else:
        # of each row: its file, the template twice, the message
        assert out.count(SAFE) == 4 * out.count("are trained on") > 0


@pytest.mark.parametrize("command", [("list", "."), ("inspect", "p"), ("diff", "p", "q")], ids=str)
@pytest.mark.parametrize("json_flag", [(), ("--json",)], ids=["text", "json"])
def test_manifests_cannot_steer_the_terminal(here, run, command, json_flag):
    for name in ("p", "q"):
        write_pack(here / name, license=HOSTILE, measured={"created": HOSTILE})
        edit_manifest(here / name, lambda manifest: manifest.update(base=BASE | {"id": HOSTILE}))
    code, out, err = run(*command, *json_flag)
    assert code == 0, err
    check_safe(out, err)
    if json_flag:
        assert repr(HOSTILE)[1:-1] in str(json.loads(out))


def test_names_of_files_cannot_steer_the_terminal(here, run):
    for name in (HOSTILE.encode(), b"bad \xff\x9b31m"):
        write_pack(here / "p").path.rename(os.fsdecode(os.fsencode(here) + b"/" + name))
    code, out, err = run("list")
    assert code == 0 and out.count("Some-4bit") == 2, err
    check_safe(out, err)
    names = [entry["name"] for entry in json.loads(run("list", "--json")[1])["packs"]]
    assert sorted(names) == sorted([HOSTILE, "bad \udcff\udc9b31m"])
    code, out, err = run("inspect", "no\x1b[31m\udc9b\u202e")
    assert (code, out) == (2, "") and err.count("\n") == 1
    check_safe(err)


def test_gates_and_wrong_options_cannot_steer_the_terminal(run, capsys):
    with pytest.raises(click.exceptions.Exit):
        exit_if_failed([f"gate of {HOSTILE} failed"])
    assert capsys.readouterr().err == f"packs: gate of {SAFE} failed\n"
    for arguments in ([HOSTILE], ["train", f"--{HOSTILE}"], ["train", "--iters", HOSTILE]):
        code, out, err = run(*arguments)
        assert (code, out) == (2, "") and err.count("\n") == 1
        check_safe(err)


def test_messages_and_tracebacks_cannot_steer_the_terminal(monkeypatch, run):
    def inspect(**_):
        print(HOSTILE)
        logging.StreamHandler().handle(logging.makeLogRecord({"msg": HOSTILE}))
        raise RuntimeError(HOSTILE)

    command = packs.get_command(click.Context(packs), "inspect")
    monkeypatch.setattr(command, "callback", inspect)
    _, out, err = run("inspect", "p")
    assert out == f"{SAFE}\n" and err.startswith(f"{SAFE}\nTraceback") and err.count(SAFE) == 2
    check_safe(out, err)
