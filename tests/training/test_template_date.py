"""A chat template that reads the clock: one date for a run, which a resumed run takes again."""

import datetime
import json
import shutil
from types import SimpleNamespace

import pytest

from mlx_packs import Pack, evaluate, load_base, train_pack
from mlx_packs.bases.chat_template import render_chat
from mlx_packs.config.schema import DataConfig
from mlx_packs.inference.generate import chat_prompt
from mlx_packs.training import prepare
from tests.helpers.errors import raises
from tests.helpers.rows import chat
from tests.helpers.runs import LORA

CLOCK = "{% for m in messages %}{{ '<|im_start|>' + m.role + '\n' + strftime_now('%d %b %Y %H:%M:%S.%f') + m.content + '<|im_end|>\n' }}{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
CHAT = [chat(f"Say {i}.", str(i)) for i in range(8)]
FEW = {"iters": 2, "batch_size": 2, "save_every": 1, "seed": 1, "matmul_path": "dense"}
FEW |= {"test_batches": 1, "val_batches": 0, "lr_schedule": "constant"}
FIRST, LATER = "2026-03-01", "2026-04-02"


@pytest.fixture(scope="module")
def clock(small_folder, tmp_path_factory):
    """The small base with a template that reads the clock; tests leave it as it was."""
    folder = shutil.copytree(small_folder, tmp_path_factory.mktemp("clock") / "base")
    (folder / "chat_template.jinja").write_text(CLOCK)
    return load_base(folder)


@pytest.mark.slow
def test_runs_of_one_date_are_equal_and_a_resumed_one_keeps_its_date(clock, tmp_path, monkeypatch):
    def train(name, day, specified=None, iters=2, **options) -> bytes:
        today = datetime.date.fromisoformat(day)
        monkeypatch.setattr(prepare, "date", SimpleNamespace(today=lambda: today))
        columns = DataConfig(data=CHAT, template_date=specified)
        settings = {**FEW, "iters": iters}
        run = train_pack(clock, None, LORA, settings, tmp_path / name, columns, **options)

        date = specified or (FIRST if options else day)
        assert run.pack.manifest["recipe"]["template_date"] == date
        assert json.loads((run.run / "config.json").read_text())["recipe"]["template_date"] == date
        return (run.pack.path / "adapters.safetensors").read_bytes()

    first = train("a", FIRST)
    assert train("b", LATER, FIRST) == first != train("c", LATER)
    scores = [evaluate(clock, tmp_path / "a", CHAT[:2]).to_json() for _ in range(2)]
    assert scores[0] == scores[1]

    train("parts", FIRST, iters=1)
    assert train("parts", LATER, resume=True) == first
    with raises("mismatch", "template_date", "template_date is '2026-04-02'"):
        train("parts", LATER, LATER, resume=True)


def test_prompts_of_generation_have_the_present_time(clock):
    text = clock.tokenizer.decode(chat_prompt(clock, CHAT[0]["messages"][:1]))
    assert str(datetime.date.today().year) in text
    assert "01 Mar 2026 00" in render_chat(clock.tokenizer, CHAT[0]["messages"], "2026-03-01")


def test_a_template_without_a_clock_takes_no_date(small, trained, tmp_path):
    columns = DataConfig(data=CHAT, template_date="2026-03-01")
    with raises("conflict", "template_date", "does not read the clock"):
        train_pack(small, out=tmp_path / "pack", columns=columns, train=FEW)
    assert Pack.open(trained / "o").manifest["recipe"].get("template_date") is None


@pytest.mark.parametrize("value", ["today", "20260301", "2026-13-01", ""])
def test_a_date_that_is_none_is_rejected(value):
    with raises("invalid", "template_date", "must be a date such as"):
        DataConfig(template_date=value)
