"""A chat template that reads the clock: one date for a run, which a resumed run takes again."""

import datetime
import json
import shutil

import pytest

from mlx_packs import Pack, evaluate, load_base, train_pack
from mlx_packs.bases.chat_template import render_chat
from mlx_packs.config.schema import DataConfig
from mlx_packs.errors import PackError
from mlx_packs.inference.generate import chat_prompt
from mlx_packs.training import prepare
from tests.helpers.rows import chat
from tests.helpers.runs import LORA

CLOCK = "{% for m in messages %}{{ '<|im_start|>' + m.role + '\n' + strftime_now('%d %b %Y %H:%M:%S.%f') + m.content + '<|im_end|>\n' }}{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
CHAT = [chat(f"Say {i}.", str(i)) for i in range(8)]
PAIRS = [{"prompt": f"Say {i}.", "chosen": str(i), "rejected": "no"} for i in range(8)]
FEW = {"iters": 2, "batch_size": 2, "save_every": 1, "seed": 1, "matmul_path": "dense"}
FEW |= {"test_batches": 1, "val_batches": 0, "lr_schedule": "constant"}
PHASES = {"phases": [{"iters": 1}, {"iters": 1}], "iters": 600}  # 600: the default
PROMPTS = [{"prompt": f"Say {i}.", "completion": str(i)} for i in range(8)]
GRPO = {"task": "grpo", "num_generations": 2, "max_completion_length": 4}


class Day(datetime.date):
    """A date whose today is set."""

    now = "2026-03-01"

    @classmethod
    def today(cls):
        return datetime.date.fromisoformat(cls.now)


@pytest.fixture
def on(monkeypatch):
    def set_day(day):
        monkeypatch.setattr(Day, "now", day)

    monkeypatch.setattr(prepare, "date", Day)
    return set_day


@pytest.fixture(scope="module")
def clock(small_folder, tmp_path_factory):
    """The small base with a template that reads the clock; tests leave it as it was."""
    folder = shutil.copytree(small_folder, tmp_path_factory.mktemp("clock") / "base")
    (folder / "chat_template.jinja").write_text(CLOCK)
    return load_base(folder)


def adapters(pack):
    return (pack / "adapters.safetensors").read_bytes()


@pytest.mark.parametrize(
    ("rows", "task"),
    [
        pytest.param(CHAT, {}, id="lm"),
        pytest.param(CHAT, PHASES, id="phases", marks=pytest.mark.slow),  # as lm, twice
        pytest.param(PAIRS, {"task": "dpo"}, id="dpo", marks=pytest.mark.slow),
        pytest.param(PROMPTS, GRPO, id="grpo", marks=pytest.mark.slow),  # renders as the others
    ],
)
def test_runs_of_one_date_are_equal_and_of_two_differ(clock, tmp_path, on, rows, task):
    for name, day, specified in (
        ("a", "2026-03-01", None),
        ("b", "2026-04-02", "2026-03-01"),
        ("c", "2026-04-02", None),
    ):
        on(day)
        run = train_pack(
            clock,
            lora=LORA,
            out=tmp_path / name,
            columns=DataConfig(data=rows, template_date=specified),
            train={**FEW, **task},
            reward=(lambda completions, **_: [*map(len, completions)]) if task is GRPO else None,
        )

        date = specified or day
        assert run.pack.manifest["recipe"]["template_date"] == date
        assert json.loads((run.run / "config.json").read_text())["recipe"]["template_date"] == date

    assert adapters(tmp_path / "a") == adapters(tmp_path / "b")
    assert adapters(tmp_path / "a") != adapters(tmp_path / "c")
    if rows is CHAT:
        first, second = (evaluate(clock, run.pack, CHAT[:2]).to_json() for _ in range(2))
        assert first == second


def test_a_run_resumed_on_another_day_has_the_same_date(clock, tmp_path, on):
    on("2026-03-01")
    train_pack(clock, CHAT, LORA, out=tmp_path / "whole", train=FEW)
    train_pack(clock, CHAT, LORA, out=tmp_path / "parts", train={**FEW, "iters": 1})
    on("2026-04-02")
    run = train_pack(clock, CHAT, LORA, out=tmp_path / "parts", train=FEW, resume=True)
    assert run.pack.manifest["recipe"]["template_date"] == "2026-03-01"
    assert adapters(tmp_path / "whole") == adapters(tmp_path / "parts")
    other = DataConfig(data=CHAT, template_date="2026-04-02")
    with pytest.raises(PackError, match="template_date is '2026-04-02'"):
        train_pack(clock, None, LORA, FEW, tmp_path / "parts", other, resume=True)


def test_prompts_of_generation_have_the_present_time(clock):
    text = clock.tokenizer.decode(chat_prompt(clock, CHAT[0]["messages"][:1]))
    assert str(datetime.date.today().year) in text
    assert "01 Mar 2026 00" in render_chat(clock.tokenizer, CHAT[0]["messages"], "2026-03-01")


def test_a_template_without_a_clock_takes_no_date(small, trained, tmp_path):
    columns = DataConfig(data=CHAT, template_date="2026-03-01")
    with pytest.raises(PackError, match="does not read the clock") as error:
        train_pack(small, out=tmp_path / "pack", columns=columns, train=FEW)
    assert error.value.flag == "template_date"
    assert Pack.open(trained / "o").manifest["recipe"].get("template_date") is None


@pytest.mark.parametrize("value", ["today", "20260301", "2026-13-01", ""])
def test_a_date_that_is_none_is_rejected(value):
    with pytest.raises(PackError, match="template_date: must be a date such as"):
        DataConfig(template_date=value)
