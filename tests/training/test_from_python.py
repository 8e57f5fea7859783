"""Training steered from Python: observers, a loss of one's own, settings as mappings."""

from pathlib import Path

import mlx.nn as nn
import pytest

from mlx_packs import DataConfig, Observer, Pack, TrainConfig, train_pack
from mlx_packs.data.given import columns_of
from mlx_packs.runtime import mx
from mlx_packs.training import run as run_module
from tests.helpers.errors import raises
from tests.helpers.rows import CHATS, write_rows
from tests.helpers.runs import LORA

SETTINGS = {
    **{"iters": 4, "batch_size": 1, "max_seq_length": 64, "steps_per_report": 2, "save_every": 2},
    **{"val_batches": 1, "steps_per_eval": 3, "test_batches": 1, "matmul_path": "dense"},
    **{"learning_rate": 1e-2, "lr_schedule": "constant"},
}


class Recorder(Observer):
    """Keeps what it is told; ends the run after a batch."""

    def __init__(self, last: int = 0) -> None:
        self.last, self.calls = last, []

    def on_step(self, line) -> None:
        self.calls.append(("step", line["batch"]))
        if line["batch"] == self.last:
            self.stop_reason = "enough"

    def on_report(self, line, batches_per_s) -> None:
        self.calls.append(("report", line["batch"]))

    def on_validation(self, line, score, seconds) -> None:
        self.calls.append(("validation", line["batch"]))

    def on_end(self, report) -> None:
        self.calls.append(("end", report["batches"]))


@pytest.fixture
def train(small, tmp_path):
    data = write_rows(tmp_path / "d", train=CHATS, valid=CHATS[:1], test=CHATS[:1])

    def train(out: str = "p", settings=SETTINGS, **options):
        options = {"overwrite": True, **options}
        return train_pack(small, data, LORA, settings, tmp_path / out, **options)

    return train


def test_observers_of_the_caller_follow_a_run(train):
    one, other = Recorder(), Recorder()
    assert train(callbacks=[one, other]).report["batches"] == 4
    assert one.calls == other.calls
    steps = [batch for kind, batch in one.calls if kind == "step"]
    assert steps == [1, 2, 3, 4] and one.calls[-1] == ("end", 4)
    assert [c for c in one.calls if c[0] == "report"] == [("report", 2), ("report", 4)]
    assert ("validation", 3) in one.calls


def test_an_observer_ends_a_run_with_a_pack(train):
    run = train(callbacks=[Recorder(last=2)])
    assert run.report["stopped"] == "enough" and 2 <= run.report["batches"] < 4
    assert Pack.open(run.pack.path).manifest["end"]["stopped"] == "enough"


def test_an_error_of_an_observer_ends_the_run(train, tmp_path):
    class Broken(Observer):
        def on_report(self, line, batches_per_s) -> None:
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        train(callbacks=[Broken()])
    assert not (tmp_path / "p").exists()


def halved(logits: mx.array, targets: mx.array) -> mx.array:
    return 0.5 * nn.losses.cross_entropy(logits, targets)


def test_a_loss_of_ones_own_is_minimized(train):
    """The cross-entropy gives the same run; another loss another one, which is recorded."""

    def plain(logits: mx.array, targets: mx.array) -> mx.array:
        assert logits.dtype == mx.float32 and logits.ndim == 2
        return nn.losses.cross_entropy(logits, targets)

    ours, theirs, other = (
        train(name, loss=loss) for name, loss in (("a", None), ("b", plain), ("c", halved))
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
def test_a_loss_that_is_none_of_each_target_is_said(train, tmp_path, wrong):
    with raises("invalid", "loss"):
        train(loss=wrong)
    assert not (tmp_path / "p").exists()


def test_a_loss_does_not_go_with_settings_of_another(train):
    with raises("conflict", "z_loss"):
        train(settings={**SETTINGS, "z_loss": 0.1}, loss=lambda x, t: x[:, 0])
    with raises("conflict", "loss"):
        train(settings={"task": "embedding"}, loss=lambda x, t: x[:, 0])


def test_a_resumed_run_has_the_loss_that_it_began_with(train):
    few = {**SETTINGS, "iters": 2}
    again = {"overwrite": False, "resume": True}
    uninterrupted = train("a", loss=halved)
    train("b", few, loss=halved)
    with raises("mismatch", "loss", "halved"):
        train("b", **again)
    resumed = train("b", loss=halved, **again)
    files = [run.pack.path / "adapters.safetensors" for run in (uninterrupted, resumed)]
    assert files[0].read_bytes() == files[1].read_bytes()
    train("c", few)
    with raises("mismatch", "loss", "halved"):
        train("c", few, loss=halved, **again)


def test_callbacks_are_observers(train, monkeypatch):
    monkeypatch.setattr(run_module, "run", None)  # nothing begins
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


def test_settings_may_be_mappings(train):
    run, same = train("a"), train("b", settings=TrainConfig(**SETTINGS))
    assert run.report["ppl_after"] == same.report["ppl_after"]
    with raises("unknown", "iter", "iters"):
        train(settings={"iter": 5})
    with raises("invalid", "iters"):
        train(settings={"iters": "many"})


def test_wrong_modules_are_said_before_anything_is_measured(small, tmp_path, monkeypatch):
    def measured(*_, **__):
        raise AssertionError("rows were encoded or products measured")

    monkeypatch.setattr("mlx_packs.tasks.tokens.encode_cached", measured)
    monkeypatch.setattr("mlx_packs.training.planning.load", lambda name: measured)
    with raises("unknown", "target_modules", "q_prj", "q_proj"):
        data = write_rows(tmp_path / "d", train=CHATS)
        train_pack(small, data, {"target_modules": ("q_prj",)}, SETTINGS, tmp_path / "p")


@pytest.mark.parametrize("kind", [str, Path])
def test_a_folder_that_is_called_as_the_bundled_base_needs_data(tmp_path, kind):
    with raises("invalid", "data", "name the examples"):
        train_pack(kind(tmp_path / "tiny"), train=TrainConfig(iters=1), out=tmp_path / "p")
