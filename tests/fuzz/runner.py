"""Run mutants and evaluate each call: how it ended, what it printed, wrote, took of memory and time."""

import faulthandler
import gc
import io
import json
import logging
import os
import random
import re
import resource
import shutil
import signal
import stat
import subprocess
import sys
import tempfile
import time
import traceback
import warnings
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path

import click
import pytest
from click.testing import CliRunner
from huggingface_hub import constants

from benchmarks.alone import peak_rss_bytes
from mlx_packs.cli.main import packs, user_errors
from mlx_packs.runtime import mx
from tests.fuzz.kind import OUT, SUBJECT, Call, Case, Kind
from tests.fuzz.kinds import KINDS
from tests.fuzz.mutate import Mutator

HANG_S = 10
STUCK_S = 60  # a library that does not return to Python; its process is killed
SPARE_BYTES = 200e6  # beside twice the subject
TOLD = "mutant: "  # before the report of a mutant, in the output of another process
_SPACE_BYTES = 8 << 30  # of addresses, so that no mutant takes the machine down
ROOT = Path(__file__).parents[2]
# C0 but tab and line feed, C1, marks and overrides of bidirectional text
_CONTROLS = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f\u061c\u200e\u200f\u202a-\u202e\u2066-\u2069]")


class Hang(BaseException):
    """A call took longer than `HANG_S`."""


@dataclass(frozen=True)
class Failure:
    """What a call did that none may do."""

    kind: str
    seed: int
    number: int
    call: str
    fault: str  # traceback, hang, memory, outside, half-written, control, exit, lines, crash
    where: str  # the line that raised, or what is wrong
    notes: tuple[str, ...] = ()
    details: str = ""

    def line(self) -> str:
        """Return one line, and how to run it again."""
        again = f"python -m tests.fuzz --kind {self.kind} --seed {self.seed} --only {self.number}"
        return f"{self.fault} · {self.where} · `{self.call[:80]}` · {'; '.join(self.notes)[:300]}\n    {again}"


@dataclass
class Report:
    """Counts of calls of a kind by how they ended, and the failures."""

    kind: str
    cases: int = 0
    calls: int = 0
    accepted: int = 0
    rejected: int = 0
    failures: list[Failure] = field(default_factory=list)

    def add(self, other: "Report") -> None:
        """Add the counts and failures of other mutants."""
        for name in ("cases", "calls", "accepted", "rejected", "failures"):
            setattr(self, name, getattr(self, name) + getattr(other, name))

    def lines(self) -> list[str]:
        """Return the counts, and the first failure at each place."""
        counts = f"{self.cases} mutants, {self.calls} calls, {self.accepted} accepted"
        failures = Counter(f"{f.fault} at {f.where}" for f in self.failures)
        first = {(f.fault, f.where): f.line() for f in reversed(self.failures)}
        return [
            f"{self.kind}: {counts}, {self.rejected} rejected, {len(self.failures)} failures",
            *(f"{n} x {where}" for where, n in failures.items()),
            *first.values(),
        ]


@dataclass(frozen=True)
class Outcome:
    """How a call ended."""

    code: int | None
    output: str
    error: BaseException | None
    more_bytes: int


@contextmanager
def sandbox() -> Iterator[Path]:
    """Stand in an empty folder that has everything a user has: home, caches, temporary files.

    No picture of a loss is drawn: matplotlib's first one writes its list of fonts to the home.
    """
    keep = dict(vars(constants))

    with (
        tempfile.TemporaryDirectory(prefix="fuzz-") as folder,
        pytest.MonkeyPatch.context() as patch,
        limited_addresses(),
    ):
        root = Path(folder).resolve()
        for name in ("home", "tmp", "elsewhere", "outside", OUT):
            (root / name).mkdir()
        (root / "elsewhere" / "file").write_text('{"secret": 1}')

        settings = {"HOME": f"{root}/home", "TMPDIR": f"{root}/tmp", "COLUMNS": "100"}
        for name, value in {**settings, "MLX_PACKS_CACHE": "off"}.items():
            patch.setenv(name, value)
        patch.chdir(root)
        vars(constants).update(_HUB | {name: str(root / "home" / name) for name in _CACHES})

        try:
            yield root
        finally:
            vars(constants).update(keep)


_CACHES = ("HF_HUB_CACHE", "HF_ASSETS_CACHE")
_HUB = {"HF_HUB_OFFLINE": True, "HF_HUB_DISABLE_XET": True} | dict.fromkeys(_CACHES)


@contextmanager
def limited_addresses() -> Iterator[None]:
    """Let allocations beyond `_SPACE_BYTES` fail, where the system can."""
    before = resource.getrlimit(resource.RLIMIT_AS)
    with suppress(ValueError, OSError):
        pages = int(Path("/proc/self/statm").read_text().split()[0])
        most = pages * resource.getpagesize() + _SPACE_BYTES
        resource.setrlimit(resource.RLIMIT_AS, (most, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_AS, before)


class Fuzzer:
    """The mutants of a kind in a sandbox."""

    def __init__(self, kind: Kind, seed: int, root: Path):
        self.kind, self.seed, self.root = kind, seed, root
        kind.make(root / SUBJECT)
        self.files = {
            str(file.relative_to(root / SUBJECT)): file.read_bytes()
            for file in sorted((root / SUBJECT).rglob("*"))
            if file.is_file()
        }
        self._check_valid()
        self.limit = 2 * sum(map(len, self.files.values())) + SPARE_BYTES

    def _case(self, number: int) -> Case:
        rng = random.Random(f"{self.kind.name} {self.seed} {number}")
        return Case(self.files, rng, Mutator(rng, self.kind.words))

    def _check_valid(self) -> None:
        """Run every call over the valid subject, which must be accepted; loads what is lazy."""
        for call in [*self.kind.cheap(), *self.kind.whole()]:
            outcome = run_call(call)
            if outcome.code not in ((0, 1) if call.gated else (0,)):
                text = outcome.output + _trace(outcome.error)
                raise RuntimeError(f"{call.name}: the valid subject is not accepted: {text}")
            self._tidy()
            self._case(0).restore()

    def run(self, number: int, report: Report) -> None:
        """Run one mutant and count it in the report."""
        case = self._case(number)

        try:
            self.kind.mutate(case)
            for call in self.kind.calls(case):
                before = self._snapshot()
                outcome = run_call(call)
                report.calls += 1
                report.accepted += outcome.error is None and outcome.code in (0, 1)
                report.rejected += outcome.code == 2

                here = (self.kind.name, self.seed, number, call.name)
                details = tuple(case.mutator.notes), _trace(outcome.error) or outcome.output[-3000:]
                for fault, where in self._faults(call, outcome, before):
                    report.failures.append(Failure(*here, fault, where, *details))
                self._tidy()
        finally:
            case.restore()
        report.cases += 1

    def _faults(self, call: Call, outcome: Outcome, before: dict) -> Iterator[tuple[str, str]]:
        """Yield what a call may not do, and where."""
        if isinstance(outcome.error, Hang):
            yield "hang", _site(outcome.error)
        elif outcome.error is not None:
            yield "traceback", f"{_site(outcome.error)} {type(outcome.error).__name__}"
        elif outcome.code not in ((0, 1, 2) if call.gated else (0, 2)):
            yield "exit", f"exit code {outcome.code}"

        if outcome.code == 2 and not outcome.output.rstrip("\n").rpartition("\n")[2].startswith(
            "packs: "
        ):
            yield "lines", f"ends with {outcome.output[-200:]!r}"

        if "memory is exhausted" in outcome.output:
            yield "memory", "allocates without bounds"
        elif outcome.more_bytes > self.limit:
            yield "memory", f"took {outcome.more_bytes / 1e6:.0f} MB"

        if control := _CONTROLS.search(outcome.output):
            yield "control", f"prints {control[0]!r}"
        if changed := {path for path, _ in self._snapshot().items() ^ before.items()}:
            yield "outside", f"changes {', '.join(sorted(changed))[:200]}"
        if outcome.code != 0 and (left := self.kind.left()):
            yield "half-written", f"leaves {left[:5]}"

    def _snapshot(self) -> dict[str, tuple]:
        """Every file but those that a call may write, by what changes when it is written."""
        files, own = {}, {OUT, SUBJECT} if self.kind.in_place else {OUT}
        for folder, folders, names in os.walk(self.root):
            if folder == str(self.root):
                folders[:] = [name for name in folders if name not in own]
            for path in (os.path.join(folder, name) for name in (*folders, *names)):
                facts = os.lstat(path)
                of_file = (facts.st_size, facts.st_mtime_ns)
                files[path] = facts.st_ino, *(() if stat.S_ISDIR(facts.st_mode) else of_file)
        return files

    def _tidy(self) -> None:
        os.chdir(self.root)
        shutil.rmtree(OUT, ignore_errors=True)
        Path(OUT).mkdir()


def run_call(call: Call) -> Outcome:
    """Run a call with an eye on the time and the memory."""
    logs = io.StringIO()
    handler = logging.StreamHandler(logs)
    loggers = [logging.getLogger(), logging.getLogger("transformers")]
    for logger in loggers:
        logger.addHandler(handler)

    with suppress(OSError):
        Path("/proc/self/clear_refs").write_text("5")  # the peak counts from here
    begin = peak_rss_bytes()
    code, output, error = None, "", None
    program = packs
    if call.function:
        program = click.Command("function", callback=user_errors()(call.function))

    try:
        with _printed() as printed, warnings.catch_warnings(), _time_limit():
            warnings.simplefilter("ignore")
            result = CliRunner().invoke(program, list(call.args), prog_name="packs")
            code, output, error = result.exit_code, result.output, result.exception
    except BaseException as raised:  # noqa: BLE001 (a Hang, a Rust panic)
        if isinstance(raised, KeyboardInterrupt):
            raise
        error = raised
    finally:
        for logger in loggers:
            logger.removeHandler(handler)

    error = None if isinstance(error, SystemExit) else error
    return Outcome(code, printed[0] + logs.getvalue() + output, error, peak_rss_bytes() - begin)


@contextmanager
def _time_limit() -> Iterator[None]:
    began, computed = time.monotonic(), time.process_time()

    def stop(*_: object) -> None:
        passed, own = time.monotonic() - began, time.process_time() - computed
        if own > HANG_S or own < passed / 20 or passed > STUCK_S / 2:  # not a busy machine's fault
            raise Hang

    before = signal.signal(signal.SIGALRM, stop)
    signal.setitimer(signal.ITIMER_REAL, HANG_S, HANG_S / 5)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


@contextmanager
def _printed() -> Iterator[list[str]]:
    """Take what is printed beside Python: by C++, by Rust."""
    text = [""]
    sys.stdout.flush()
    sys.stderr.flush()
    kept = os.dup(1), os.dup(2)

    with tempfile.TemporaryFile(dir=_SHM) as file:
        for number in (1, 2):
            os.dup2(file.fileno(), number)
        try:
            yield text
        finally:
            for number, copy in zip((1, 2), kept, strict=True):
                os.dup2(copy, number)
                os.close(copy)
            file.seek(0)
            text[0] = file.read().decode(errors="replace")


_SHM = "/dev/shm" if os.path.isdir("/dev/shm") else None


def _site(error: BaseException) -> str:
    """Return the last line of the package in a traceback."""
    frames = traceback.extract_tb(error.__traceback__)
    for frame in reversed([f for f in frames if "/mlx_packs/" in f.filename] or frames):
        return f"{frame.filename.rpartition('/mlx_packs/')[2]}:{frame.lineno}"
    return "?"


def _trace(error: BaseException | None) -> str:
    return "" if error is None else "".join(traceback.format_exception(error))[-3000:]


def fuzz(
    name: str, cases: range, seed: int, told: Callable[[Report], None] | None = None
) -> Report:
    """Run mutants of a kind in this process; ``told`` gets the report of each."""
    report = Report(name)
    kind = KINDS[name]()
    errors = os.dup(2)  # a call has another
    with sandbox() as root:
        try:
            fuzzer = Fuzzer(kind, seed, root)
            gc.collect()
            for number in cases:
                one = Report(name)
                if told:
                    faulthandler.dump_traceback_later(STUCK_S, exit=True, file=errors)
                fuzzer.run(number, one)
                report.add(one)
                if told:
                    told(one)
        finally:
            faulthandler.cancel_dump_traceback_later()
            os.close(errors)
            kind.close()
            mx.clear_cache()

    return report


def supervise(name: str, cases: int, seed: int, first: int = 0) -> Report:
    """Run mutants in another process; one that crashes or never returns is a failure."""
    report = Report(name)
    end = first + cases

    while (start := first + report.cases) < end:
        args = f"--kind {name} --seed {seed} --first {start} --cases {end - start} --told"
        child = subprocess.run(
            [sys.executable, "-m", "tests.fuzz", *args.split()],
            cwd=ROOT,
            capture_output=True,
            text=True,
        )
        for line in child.stdout.splitlines():
            if line.startswith(TOLD):
                one = json.loads(line.removeprefix(TOLD))
                one["failures"] = [Failure(**f) for f in one["failures"]]
                report.add(Report(**one))

        errors = child.stderr[-3000:]
        stuck = "Timeout (" in child.stderr
        if (at := first + report.cases) == start and not stuck and child.returncode > 0:
            raise RuntimeError(f"{name}: cannot be set up:\n{errors}")
        if at < end:
            fault = (
                ("hang", f"over {STUCK_S} s") if stuck else ("crash", f"exit {child.returncode}")
            )
            report.failures.append(Failure(name, seed, at, "?", *fault, details=errors))
            report.cases += 1

    return report


def tell(one: Report) -> None:
    """Print the report of a mutant for `supervise`."""
    print(TOLD + json.dumps(asdict(one)), flush=True)
