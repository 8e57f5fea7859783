"""The loop over batches: what a GPU is given before what is read, and that nothing else changes."""

import math
import time
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest

from mlx_packs import runtime
from mlx_packs.data.dataset import Batch
from mlx_packs.objectives.score import StoredScore
from mlx_packs.reading import sha256
from mlx_packs.runtime import mx
from mlx_packs.tasks.phases import RunPhase
from mlx_packs.training import step
from mlx_packs.training.loop import Loop, Reports
from mlx_packs.training.observer import Observer
from mlx_packs.training.on_nan import UpdateGuard
from mlx_packs.training.state import TrainingState
from mlx_packs.training.step import BatchStep, StartedStep, Stepper
from mlx_packs.training.watch import Watch
from tests.helpers.observers import observe
from tests.helpers.runs import LORA, TRAIN
from tests.helpers.variants import slow_except
from tests.training.conftest import untimed_metrics

DROPOUT = replace(LORA, dropout=0.1)


@pytest.fixture
def on_gpu(monkeypatch):
    """Steps run ahead as on a GPU; all else is that of this device."""
    monkeypatch.setattr(step, "runs_ahead", lambda: True)


class Recorder(Observer):
    """A device that takes steps, and an observer: both write into one log."""

    def __init__(self) -> None:
        self.log: list[str] = []
        self.waiting, self.ahead, self.scaled = 0, int(step.runs_ahead()), False
        self.optimizer = SimpleNamespace(learning_rate=0.1)
        self.started = 0

    def start(self, batch, last, alone):
        self.started += 1
        self.waiting = 0 if last else self.waiting + 1
        number = self.started
        self.log.append(f"start {number}")
        read = lambda: (self.log.append(f"read {number}"), (1.0, 2.0))[1]  # noqa: E731
        return SimpleNamespace(read=read)

    def start_together(self, batches, together):
        return [
            self.start(batch, number == len(batches), False)
            for number, batch in enumerate(batches, 1)
        ]

    def on_step(self, line):
        self.log.append(f"step {line['batch']}")

    def on_report(self, line, batches_per_s):
        self.log.append(f"report {line['batch']}")

    def on_validation(self, line, score, seconds):
        self.log.append(f"validation {line['batch']}")


def log_of(together: object = None, **settings) -> list[str]:
    """What happens in a phase of these settings, in its order."""
    quiet = {"steps_per_report": 100, "steps_per_eval": 100, "save_every": 100}
    train = replace(TRAIN, **{**quiet, "iters": 6, **settings})
    recorder = Recorder()
    phase = RunPhase("", train, ())
    score = StoredScore(1.0)

    objective = SimpleNamespace(
        unit="tokens",
        prepare=lambda batch: batch,
        score_trained=lambda batch: score,
        validate=lambda data: score,
        facts=dict,
    )

    batch_step = BatchStep(recorder, objective, collate=None, together=together)
    state = TrainingState()
    on_nan = SimpleNamespace(policy="stop", updated=lambda: None)

    model = SimpleNamespace(train=lambda: None)
    loop = Loop(
        phase=phase,
        trainable=SimpleNamespace(model=model, progress=lambda share: None),
        step=batch_step,
        state=state,
        validation=SimpleNamespace(batches_per_epoch=lambda: 1),
        guard=UpdateGuard(
            batch_step, state, on_nan, lambda s: recorder.log.append(f"save {s.batches}"), None
        ),
        watch=Watch(),
        reports=Reports([recorder], batch_step),
    )

    loop.train(iter([Batch({}, targets=3, denominator=3)] * train.iters))
    assert loop.state.batches == train.iters and loop.state.trained_tokens == 3 * train.iters
    assert loop.state.updates == math.ceil(train.iters / train.grad_accumulation_steps)
    return recorder.log


def steps(*events: str) -> list[str]:
    """``s1`` is a start; ``r1`` is a read with the call of observers."""
    log = []
    for event in " ".join(events).split():
        kind, number = event[0], event[1:]
        log += [f"start {number}"] if kind == "s" else [f"read {number}", f"step {number}"]
    return log


@pytest.mark.skipif(not runtime.on_cpu(), reason="steps run ahead here")
def test_a_cpu_takes_one_step_after_the_other():
    every = steps(*(f"s{n} r{n}" for n in range(1, 7)))
    assert log_of() == [*every, "report 6", "save 6"]


def test_a_gpu_has_the_next_step_before_one_is_read(on_gpu):
    assert log_of() == [*steps("s1 s2 r1 s3 r2 s4 r3 s5 r4 s6 r5 r6"), "report 6", "save 6"]


def test_reports_scores_and_checkpoints_wait_for_all_steps(on_gpu):
    log = log_of(steps_per_report=2, steps_per_eval=3, save_every=5)
    assert log == [
        *(*steps("s1 s2 r1 r2"), "report 2"),
        *(*steps("s3 r3"), "validation 3"),
        *(*steps("s4 r4"), "report 4"),
        *(*steps("s5 r5"), "save 5"),
        *(*steps("s6 r6"), "report 6", "save 6"),
    ]


def test_what_is_validated():
    for settings, validated in (
        ({}, [3, 6]),
        ({"iters": 5}, [3]),  # the last weights are evaluated after the run
        ({"iters": 5, "load_best": True}, [3, 5]),  # any may be the best
        ({"load_best": True, "grad_accumulation_steps": 2}, [4, 6, 7]),  # each after its update
    ):
        log = log_of(**{"iters": 7, "steps_per_eval": 3, **settings})
        expected = [f"validation {number}" for number in validated]
        assert [line for line in log if line.startswith("validation")] == expected


def test_a_checkpoint_waits_for_the_end_of_an_update(on_gpu):
    log = log_of(save_every=2, grad_accumulation_steps=3)
    assert log == [
        *(*steps("s1 s2 r1 r2 s3 r3"), "save 3"),
        *(*steps("s4 r4 s5 r5 s6 r6"), "report 6", "save 6"),
    ]


def test_batches_that_pass_blocks_together_start_at_once():
    """What is due after one of them waits for the end of their update."""
    settings = {"grad_accumulation_steps": 4, "steps_per_report": 3, "steps_per_eval": 3}
    assert log_of(together=list, save_every=2, **settings) == [
        *(*steps("s1 s2 s3 s4 r1 r2 r3 r4"), "report 4", "validation 4", "save 4"),
        *(*steps("s5 s6 r5 r6"), "report 6", "save 6"),
    ]


def test_seconds_of_steps_in_flight_are_counted_once(on_gpu, monkeypatch):
    """Time passes in a step's start (1 s) and in reading it (10 s)."""
    now, seconds = [100.0], []
    start, count = Recorder.start, TrainingState.count

    def timed(self, *args):
        now[0] += 1
        started = start(self, *args)

        def read():
            now[0] += 10
            return started.read()

        return SimpleNamespace(read=read)

    def counted(self, *args):
        seconds.append(args[3])
        count(self, *args)

    monkeypatch.setattr(time, "perf_counter", lambda: now[0])
    monkeypatch.setattr(Recorder, "start", timed)
    monkeypatch.setattr(TrainingState, "count", counted)
    log_of(iters=4)
    assert seconds == [12, 11, 11, 10] and sum(seconds) == now[0] - 100


def files_of(run: Path) -> dict[str, str]:
    """Hashes of the tensors of all checkpoints."""
    return {str(f.relative_to(run)): sha256(f) for f in sorted(run.rglob("*.safetensors"))}


@pytest.mark.parametrize("accumulate", slow_except([1, 2], 2))
def test_steps_ahead_change_no_byte(train, monkeypatch, accumulate):
    settings = {"iters": 5, "steps_per_report": 2, "save_every": 4, "steps_per_eval": 3}
    settings |= {"grad_accumulation_steps": accumulate}
    announced = {"cpu": [], "gpu": []}
    for device, lines in announced.items():
        with monkeypatch.context() as patch:
            patch.setattr(step, "runs_ahead", lambda device=device: device == "gpu")
            observe(patch, on_step=lambda line, lines=lines: lines.append(line))
            train(device, lora=DROPOUT, **settings)
    cpu, gpu = Path("cpu-run"), Path("gpu-run")
    assert files_of(cpu) == files_of(gpu) and untimed_metrics(cpu) == untimed_metrics(gpu)
    pairs = [[(line["batch"], line["loss"]) for line in lines] for lines in announced.values()]
    assert pairs[0] == pairs[1] and [number for number, _ in pairs[0]] == [1, 2, 3, 4, 5]


def test_a_gpu_is_given_steps_and_not_waited_for(train, on_gpu, monkeypatch):
    """To start a step evaluates nothing at once; the first step is read when the second started."""
    log, whole, read = [], Stepper.start, StartedStep.read

    def start(stepper, *args):
        assert stepper._evaluate is mx.async_eval
        log.append("start")
        with monkeypatch.context() as patch:
            patch.delattr(step.mx, "eval")
            return whole(stepper, *args)

    monkeypatch.setattr(Stepper, "start", start)
    monkeypatch.setattr(StartedStep, "read", lambda self: (log.append("read"), read(self))[1])
    train(iters=3, save_every=3, steps_per_report=3)
    assert log == ["start", "start", "read", "start", "read", "read"]
