"""Training steered from Python: observers, a loss of one's own, settings as mappings."""

import json
import traceback
from pathlib import Path

import mlx.nn as nn
import pytest

import mlx_packs as mp
from mlx_packs import DataConfig, Observer, Pack
from mlx_packs.cli.main import main
from mlx_packs.data.in_memory import columns_of
from mlx_packs.objectives.causal_lm import CausalLM
from mlx_packs.runtime import mx
from mlx_packs.tasks import tokens
from mlx_packs.training import planning
from mlx_packs.training import run as run_module
from tests.helpers.errors import raises
from tests.helpers.rows import chat
from tests.training.conftest import ROWS

FOUR = {"iters": 4, "steps_per_report": 2, "save_every": 2}


class StopsAfter(Observer):
    """Keeps the numbers of batches; ends the run after one of them."""

    def __init__(self, last: int = 0) -> None:
        self.last, self.batches = last, []

    def on_step(self, line) -> None:
        self.batches.append(line["batch"])
        if line["batch"] == self.last:
            self.stop_reason = "enough"


def test_the_loss_is_few_calls_away(train, monkeypatch):
    stacks, loss = [], CausalLM.loss

    def recorded(*args):
        stacks.append(traceback.extract_stack())
        return loss(*args)

    monkeypatch.setattr(CausalLM, "loss", recorded)
    train(iters=1, val_batches=0, test_batches=1)
    package = Path(run_module.__file__).parents[1]
    names = [frame.name for frame in stacks[0] if Path(frame.filename).is_relative_to(package)]
    assert len(names[names.index("train_pack") :]) < 12, names  # with the loss, twelve


def test_observers_of_the_caller_follow_a_run_and_may_end_it(train):
    one, other = StopsAfter(), StopsAfter(last=2)
    run = train(callbacks=[one, other], **FOUR)
    assert one.batches == other.batches == [1, 2]
    assert run.report["stopped"] == "enough" and run.report["batches"] == 2
    assert Pack.open(run.pack.path).manifest["end"]["stopped"] == "enough"


def test_an_error_of_an_observer_ends_the_run(train):
    """The progress bar, which ends with a phase, is closed."""
    ended = []

    class Broken(Observer):
        def on_report(self, line, batches_per_s) -> None:
            raise ZeroDivisionError

        def on_phase_end(self) -> None:
            ended.append(True)

    with pytest.raises(ZeroDivisionError):
        train(callbacks=[Broken()])
    assert ended == [True] and not Path("p").exists()


def halved(logits: mx.array, targets: mx.array) -> mx.array:
    return 0.5 * nn.losses.cross_entropy(logits, targets)


def test_a_loss_of_ones_own_is_minimized(train):
    def plain(logits: mx.array, targets: mx.array) -> mx.array:
        assert logits.dtype == mx.float32 and logits.ndim == 2
        return nn.losses.cross_entropy(logits, targets)

    ours, theirs, other = (
        train(name, loss=loss, learning_rate=1e-2)
        for name, loss in (("a", None), ("b", plain), ("c", halved))
    )
    losses = [[line["loss"] for line in run.curve if "loss" in line] for run in (ours, theirs)]
    assert losses[0] == pytest.approx(losses[1], rel=1e-4)
    assert theirs.report["ppl_after"] == pytest.approx(ours.report["ppl_after"], rel=1e-3)
    assert other.curve[0]["loss"] < 0.6 * ours.curve[0]["loss"]
    assert other.report["ppl_before"] == ours.report["ppl_before"]
    assert other.report["ppl_after"] < ours.report["ppl_before"]
    assert "halved" in other.pack.manifest["objective"]["loss"]
    assert "loss" not in ours.pack.manifest["objective"]


@pytest.mark.parametrize("wrong", [lambda x, t: x.sum(), lambda x, t: 1.0, lambda x, t: x])
def test_a_loss_that_is_none_of_each_target_is_said(train, wrong):
    with raises("invalid", "loss"):
        train(loss=wrong)
    assert not Path("p").exists()


def test_a_loss_does_not_go_with_settings_of_another(train):
    with raises("conflict", "z_loss"):
        train(z_loss=0.1, loss=lambda x, t: x[:, 0])
    with raises("conflict", "loss"):
        train(task="embedding", loss=lambda x, t: x[:, 0])


def test_a_resumed_run_has_the_loss_that_it_began_with(train):
    train(loss=halved)
    with raises("mismatch", "loss", "halved"):
        train(iters=4, resume=True)
    assert train(iters=4, loss=halved, resume=True).report["batches"] == 4


def test_callbacks_are_observers(train, monkeypatch):
    monkeypatch.setattr(run_module, "_train", None)  # nothing begins
    with raises("invalid", "callbacks", "function"):
        train(callbacks=[lambda line: None])


def test_rows_in_memory_have_columns_of_their_own():
    rows = [{"body": f"row {i}"} for i in range(30)]
    columns = columns_of(rows, DataConfig(text_feature="body"))
    assert columns.text_feature == "body"
    assert columns.data.splits["train"][3].value == {"body": "row 3"}
    with raises("conflict", "data"):
        columns_of(rows, DataConfig(data="notes"))
    same = columns_of(None, DataConfig(data=rows, text_feature="body"))
    assert list(same.data.splits["train"]) == list(columns.data.splits["train"])


def test_wrong_modules_are_said_before_anything_is_measured(train, monkeypatch):
    def measured(*_, **__):
        raise AssertionError("rows were encoded or products measured")

    monkeypatch.setattr(tokens, "encode_cached", measured)
    monkeypatch.setattr(planning, "choose_matmul_path", measured)
    with raises("unknown", "target_modules", "q_prj", "q_proj"):
        train(lora={"target_modules": ("q_prj",)})


def test_a_pack_records_the_layout_of_the_json_in_its_rows(train):
    rows = [chat(f"Word {i}?", json.dumps({"word": i, "red": [i, None]})) for i in range(6)]
    objective = Pack.open(train(data=rows, iters=1).pack.path).manifest["objective"]
    layout = {"item_separator": ", ", "key_separator": ": ", "keys": ["word", "red"]}
    assert objective["json_layout"] == layout


def test_a_run_is_shown_in_one_line_and_its_report_begins_with_the_result(train):
    run = train(test_batches=1)
    assert len(repr(run)) < 300 and "PPL" in repr(run) and "2 updates" in repr(run)
    assert repr(run.pack) in repr(run)
    assert run.report["sample"]["wanted"] == ROWS[0]["messages"][1]["content"]

    keys = list(run.to_json())
    assert keys[:2] == ["pack", "run"] and keys[-1] == "versions"
    first = ["steps", "batches", "first_loss", "last_loss", "ppl_before", "ppl_after"]
    assert [key for key in keys if key in first] == first
    losses = [line["loss"] for line in run.curve if "loss" in line]
    assert [run.report["first_loss"], run.report["last_loss"]] == losses
    assert run.report["versions"] == run.pack.manifest["versions"]
    assert {"mlx", "device"} <= set(run.report["versions"])


def test_a_run_from_python_shows_its_progress_unless_told_otherwise(train, capsys):
    train("silent", progress=False)
    assert capsys.readouterr() == ("", "")
    train(progress=True)
    shown = capsys.readouterr()
    assert shown.out == "" and "plan " in shown.err and "data " in shown.err


def test_train_takes_settings_by_name_as_the_command_line_does(tmp_path):
    named = mp.train(
        *("tiny", ROWS),
        iters=2,
        lora_parameters={"rank": 4},
        val_batches=0,
        out=tmp_path / "named",
        progress=False,
    )
    recipe = named.pack.manifest["recipe"]
    assert (recipe["iters"], recipe["rank"]) == (2, 4)
    of_tiny = {"learning_rate": 0.003, "warmup_steps": 10, "lr_schedule": "linear"}
    assert of_tiny.items() <= recipe.items()  # as `packs train --iters 2 --rank 4`


@pytest.mark.parametrize(
    ("settings", "code", "flag", "name"),
    [
        ({"epoch": 3}, "unknown", "epoch", "'epochs'"),
        ({"base": "tiny"}, "unknown", "base", "'model'"),
        ({"seeds": 3}, "invalid", "seeds", "train_seeds"),
        ({"train": {"iters": 3}}, "invalid", "train", "rank=16"),
        ({"columns": DataConfig()}, "invalid", "columns", "rank=16"),
        ({"loss": "focal"}, "unknown", "loss", "'focal'"),
        ({"reward": len}, "conflict", "reward", "grpo"),
    ],
)
def test_train_names_what_is_wrong_and_writes_nothing(tmp_path, settings, code, flag, name):
    with raises(code, flag, name):
        mp.train("tiny", ROWS, out=tmp_path / "pack", **settings)
    assert not any(tmp_path.iterdir())


def printed(capsys, command: str) -> dict:
    with pytest.raises(SystemExit, match="0"):
        main([*command.split(), "--json"])
    return json.loads(capsys.readouterr().out)


def test_plans_and_descriptions_are_those_of_the_commands(capsys):
    plan = mp.plan("tiny", "tiny", memory=16, device="gpu", rank=4)
    shown = printed(capsys, "plan --model tiny --data tiny --memory 16 --device gpu --rank 4")
    assert {name: shown[name] for name in plan.report} == json.loads(json.dumps(plan.report))
    assert plan.fits and f"try:    {plan.command}" in repr(plan)
    assert plan.peak_gb == shown["options"][0]["peak_gb"]
    in_memory = mp.plan("tiny", ROWS)
    assert f"{len(ROWS) - 1} training examples" in repr(in_memory)
    assert in_memory.command.endswith(" --data DATA")
    questions = [{"q": "a", "completion": "b"}] * 6
    assert mp.plan("tiny", questions, prompt_feature="q").command.endswith(" --prompt-feature q")

    described = mp.describe_data("tiny", progress=False)
    shown = printed(capsys, "data tiny")
    report = json.loads(json.dumps(described.to_json()))
    assert report == {name: shown[name] for name in report}
    assert "<td>2,400 examples · " in described._repr_html_()


@pytest.mark.parametrize(
    ("arguments", "code"),
    [({"device": "mps", "memory": 16}, "unknown"), ({"device": "gpu"}, "conflict")],
)
def test_a_plan_for_another_device_names_it_and_its_memory(arguments, code):
    with raises(code, "device"):
        mp.plan("tiny", **arguments)
