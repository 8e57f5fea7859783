"""A chat template that reads the clock: one date for a run, which a resumed run takes again."""

import datetime
import json
import shutil

import pytest
from safetensors.numpy import load_file

from mlx_packs import evaluate, load_base, train_pack
from mlx_packs.bases.files import resolve_checkpoint
from mlx_packs.bases.template_clock import clock_at, strftime_now
from mlx_packs.config.schema import DataConfig
from mlx_packs.errors import PackError
from mlx_packs.training import identity
from tests.helpers.runs import LORA

CLOCK = "{% for m in messages %}{{ '<|im_start|>' + m.role + '\n' + strftime_now('%d %b %Y %H:%M:%S.%f') + m.content + '<|im_end|>\n' }}{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
CHAT = [
    {
        "messages": [
            {"role": "user", "content": f"Say {i}."},
            {"role": "assistant", "content": str(i)},
        ]
    }
    for i in range(8)
]
PAIRS = [{"prompt": f"Say {i}.", "chosen": str(i), "rejected": "no"} for i in range(8)]
LABELLED = [{"prompt": f"Say {i}.", "completion": str(i), "label": i % 2 == 0} for i in range(8)]
FEW = {
    "iters": 2,
    "batch_size": 2,
    "test_batches": 1,
    "val_batches": 0,
    "seed": 1,
    "save_every": 2,
    "matmul_path": "dense",
}
MORE = {**FEW, "iters": 4, "lr_schedule": "constant"}
PHASES = {"phases": [{"iters": 1}, {"iters": 1}], "iters": 250}  # 250: the default
PREFERENCE_PHASES = {"phases": [{"task": t, "iters": 1} for t in ("dpo", "orpo")], "iters": 250}
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

    monkeypatch.setattr(identity, "date", Day)
    return set_day


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """The bundled base with a template that reads the clock; tests only read it."""
    folder = shutil.copytree(resolve_checkpoint("tiny"), tmp_path_factory.mktemp("clock") / "base")
    (folder / "chat_template.jinja").write_text(CLOCK)
    return folder


def letters(completions, **_):
    """A reward that differs between completions."""
    return [float(len(text)) for text in completions]


def adapters(pack):
    return {k: v.tobytes() for k, v in load_file(pack / "adapters.safetensors").items()}


@pytest.mark.parametrize(
    ("rows", "task"),
    [
        (CHAT, {}),
        pytest.param(PAIRS, {"task": "dpo"}, marks=pytest.mark.slow),
        pytest.param(LABELLED, {"task": "kto"}, marks=pytest.mark.slow),
        pytest.param(CHAT, PHASES, marks=pytest.mark.slow),
        pytest.param(PAIRS, PREFERENCE_PHASES, marks=pytest.mark.slow),
        pytest.param(PROMPTS, GRPO, marks=pytest.mark.slow),
    ],
)
def test_runs_of_one_date_are_equal_and_of_two_differ(folder, tmp_path, on, rows, task):
    for name, day, specified in (
        ("a", "2026-03-01", None),
        ("b", "2026-04-02", "2026-03-01"),
        ("c", "2026-04-02", None),
    ):
        on(day)
        columns = DataConfig(data=rows, template_date=specified)
        settings = {**FEW, **task}
        reward = letters if task is GRPO else None
        run = train_pack(
            folder,
            lora=LORA,
            out=tmp_path / name,
            columns=columns,
            train=settings,
            reward=reward,
        )
        date = specified or day
        assert run.pack.manifest["recipe"]["template_date"] == date
        assert json.loads((run.run / "config.json").read_text())["recipe"]["template_date"] == date
    assert adapters(tmp_path / "a") == adapters(tmp_path / "b")
    assert adapters(tmp_path / "a") != adapters(tmp_path / "c")


@pytest.mark.parametrize(
    ("rows", "task"), [(CHAT, "lm"), pytest.param(PAIRS, "dpo", marks=pytest.mark.slow)]
)
def test_a_run_resumed_on_another_day_has_the_same_date(folder, tmp_path, on, rows, task):
    on("2026-03-01")
    settings = {**MORE, "task": task}
    train_pack(folder, rows, LORA, out=tmp_path / "whole", train=settings)
    train_pack(folder, rows, LORA, out=tmp_path / "parts", train={**settings, "iters": 2})
    on("2026-04-02")
    run = train_pack(folder, rows, LORA, out=tmp_path / "parts", train=settings, resume=True)
    assert run.pack.manifest["recipe"]["template_date"] == "2026-03-01"
    assert adapters(tmp_path / "whole") == adapters(tmp_path / "parts")
    with pytest.raises(PackError, match="template_date is '2026-04-02'"):
        columns = DataConfig(data=rows, template_date="2026-04-02")
        train_pack(
            folder, lora=LORA, out=tmp_path / "parts", columns=columns, train=settings, resume=True
        )


def test_an_evaluation_sees_the_date_of_the_training(folder, tmp_path, on):
    on("2026-03-01")
    run = train_pack(folder, CHAT, LORA, out=tmp_path / "pack", train=FEW)
    base = load_base(folder)
    first, second = (evaluate(base, run.pack, CHAT[:2]).to_json() for _ in range(2))
    assert first == second


def test_prompts_of_generation_have_the_present_time(folder, tmp_path, on):
    from mlx_packs.inference.generate import chat_prompt

    base = load_base(folder)
    text = base.tokenizer.decode(chat_prompt(base, CHAT[0]["messages"][:1]))
    assert str(datetime.date.today().year) in text
    with clock_at("2026-03-01"):
        assert strftime_now("%d %b %Y %H") == "01 Mar 2026 00"


def test_a_template_without_a_clock_takes_no_date(tmp_path):
    columns = DataConfig(data=CHAT, template_date="2026-03-01")
    with pytest.raises(PackError, match="does not read the clock") as error:
        train_pack("tiny", out=tmp_path / "pack", columns=columns, train=FEW)
    assert error.value.flag == "template_date"
    run = train_pack("tiny", CHAT, out=tmp_path / "pack", train=FEW)
    assert run.pack.manifest["recipe"].get("template_date") is None


@pytest.mark.parametrize("value", ["today", "20260301", "2026-13-01", ""])
def test_a_date_that_is_none_is_rejected(value):
    with pytest.raises(PackError, match="template_date: must be a date such as"):
        DataConfig(template_date=value)
