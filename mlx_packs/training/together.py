"""Several packs in one batch: each is a run of its own, and the steps of all are taken together.

A run yields the steps that it is about to take (`steps_of`), so that each has its own data order,
optimizer, schedule, checkpoints and metrics, and its pack is the one that it makes alone.
"""

import gc
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from .. import runtime, signals
from ..config.together import check_together
from ..distributed.group import group
from ..errors import Float16Overflow, PackError, RunStopped
from ..nn.joint_lora import copied
from ..ops import _backend, watchdog
from ..packs.base import Base, load_base
from ..run_clock import RunClock
from ..runtime import mx, set_random_state
from .folders import output_folders
from .joint_step import JointStepper, check_same_modules
from .result import TrainRun
from .run import steps_of
from .run_folder import common_batch
from .settings import Place, Request, RunSettings
from .step import DueStep, StartedStep, Steps
from .unattended import unattended


class _SharedBase:
    """Loads a base once; each run gets a model of its own, with the same weights.

    The packs of all requests must adapt the same modules.
    """

    def __init__(self, requests: Sequence[Request]) -> None:
        self._recipes = [request.recipe for request in requests]
        self._base: Base | None = None
        self._is_checked = False
        self._replacements = {}

    def __call__(self, *args: Any, **options: Any) -> Base:
        if self._base is None:
            self._base = load_base(*args, **options)
        return self.copy(self._base)

    def copy(self, base: Base) -> Base:
        if not self._is_checked:
            loras = [recipe.lora for recipe in self._recipes]
            check_same_modules(base, loras, self._recipes[0].train.train_fp16_fallback)
            self._is_checked = True
        return replace(base, model=copied(base.model), shared=self._replacements)


@dataclass
class _Member:
    """A run, the step that it waits for, and its end."""

    request: Request
    place: Place
    steps: Steps[TrainRun] | None = None  # once it has started
    random: mx.array | None = None  # MLX's random state while it works
    due: DueStep | None = None
    result: TrainRun | None = None
    error: PackError | None = None

    @property
    def number(self) -> int:
        """Which batch of its own it waits for."""
        return self.due.batch.number

    @property
    def overflowed(self) -> bool:
        """Whether it ended since float16 is too small for it, and may go on in bfloat16."""
        is_loaded = isinstance(self.request.base, Base)  # it is the caller's
        return isinstance(self.error, Float16Overflow) and not is_loaded

    def start(self, open_base: _SharedBase, packs: int) -> None:
        """Prepare a run that shares its base, and its steps, with ``packs`` - 1 others."""
        base = self.request.base
        if isinstance(base, Base):
            base = open_base.copy(base)

        own = replace(self.request, base=base, packs=packs, open_base=open_base)
        own.display.clock = RunClock(compiles=runtime.COMPILES)
        self.steps = steps_of(own, RunSettings.of(own), self.place)

    def restart(self) -> None:
        """Let a run that overflowed go on in bfloat16, from its last update, once it is started."""
        fault = self.error.fault
        resume = self.place.resume or self.error.saved

        self.request.display.line("dtype", f"{fault}; the run continues in bfloat16")
        self.place = replace(self.place, resume=resume, latest=None, overflow=fault)
        self.steps = None  # which, as the error, refers to the base in float16
        self.error = None
        self.random = None

    def go_on(self, started: StartedStep | None) -> None:
        """Let the run work up to its next step, or its end."""
        self.due = None
        if self.random is not None:
            set_random_state(self.random)

        try:
            self.due = self.steps.send(started)
        except StopIteration as end:
            self.result = end.value
        except PackError as error:
            self.error = error

        self.random = mx.random.state[0]

    def end(self, error: BaseException) -> None:
        """End the run by an error that is not its own; it may say which checkpoint it has."""
        self.due = None
        try:
            self.steps.throw(error)
        except PackError as own:
            self.error = own
        except BaseException as same:
            if same is not error:
                raise


def train_together(requests: Sequence[Request]) -> list[TrainRun]:
    """Train the packs of several requests on one base, and save each as its request says.

    Raises:
        PackError: As of `train_each`, or if a run fails; the others are trained to their end.
        RunStopped: After a signal; every run has a checkpoint.
    """
    ends = train_each(requests)
    failed = [end for end in ends if isinstance(end, PackError)]
    for error in failed:
        if isinstance(error, RunStopped):
            raise error

    for request, end in zip(requests, ends, strict=True):
        if isinstance(end, PackError):
            name = Path(request.option("out")).name
            raise PackError(f"{name}: {end.message}", end.code, end.flag)
    return ends


def train_each(requests: Sequence[Request]) -> list[TrainRun | PackError]:
    """Train packs as `train_together`, and return what became of each: its run, or its error.

    The requests differ in settings of `config.together`, and in where they write; base, data and
    all else are the same. The first one shows its progress. Runs that overflow in float16 go on in
    bfloat16 after the others.

    Raises:
        PackError: If a setting does not go with others in one batch, or a run cannot start.
    """
    for request in requests:
        check_together(request.recipe)
    if group().size > 1:
        raise PackError(
            "--seeds: trains on one machine. Leave --hosts out, or train one pack at a time.",
            "conflict",
            "seeds",
        )

    first = requests[0]
    _backend.start_record()
    with ExitStack() as closes:
        places = [closes.enter_context(_place(request)) for request in requests]
        if all(request.option("resume") for request in requests):  # so that they share all steps
            latest = common_batch([place.folder for place in places])
            places = [replace(place, latest=latest) for place in places]

        closes.enter_context(signals.handled())
        if not runtime.on_cpu():  # before MLX uses the GPU
            if line := watchdog.limit_operations(first.recipe.train.max_seq_length):
                first.display.line("gpu", line)

        closes.enter_context(runtime.memory_limits())
        closes.enter_context(unattended(first.recipe.train.awake, places[0].pack, first.display))

        members = [_Member(*each) for each in zip(requests, places, strict=True)]
        _take_together(members)
        stopped = any(isinstance(member.error, RunStopped) for member in members)
        overflowed = [member for member in members if member.overflowed]
        if overflowed and not stopped:
            for member in overflowed:
                member.restart()
            gc.collect()
            _take_together(overflowed)
    return [member.result or member.error for member in members]


@contextmanager
def _place(request: Request) -> Iterator[Place]:
    recipe = request.recipe
    resume = request.option("resume")
    overwrite = request.option("overwrite")

    with output_folders(request.option("out"), recipe.data, overwrite, resume) as (pack, run):
        yield Place(pack, run, resume)


def _take_together(members: Sequence[_Member]) -> None:
    """Take all steps of runs, those of the same batch number as one.

    Runs go on, and end, in the reverse of their order: what one restores is then what it found.
    """
    shared = _SharedBase([member.request for member in members])
    try:
        for member in members:
            member.start(shared, len(members))
            member.go_on(None)
            if member.error is not None and not member.overflowed:
                raise member.error

        stepper: JointStepper | None = None
        while live := [member for member in members if member.due is not None]:
            if stepper is None:
                stepper = JointStepper(live[0].due)

            least = min(member.number for member in live)  # a run that is behind catches up
            taken = [member for member in live if member.number == least]

            started = stepper.start([member.due for member in taken])
            for member, step in reversed(list(zip(taken, started, strict=True))):
                member.go_on(step)
    except BaseException as error:
        for member in reversed(members):
            if member.due is not None:
                member.end(error)

        is_stopped = any(isinstance(member.error, RunStopped) for member in members)
        if not isinstance(error, KeyboardInterrupt) or not is_stopped:
            raise
