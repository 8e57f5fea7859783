"""Errors that a user can act on; the command line prints them as one line and exits with 2."""

import errno
import logging
import re
import signal
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from functools import lru_cache
from pathlib import Path
from typing import IO, Any, Literal

import click

from .terminal import echo, printable

Code = Literal[
    "invalid",  # a value breaks a rule
    "unknown",  # a name that is not among the valid ones
    "conflict",  # settings that exclude or do not apply to each other
    "not-found",
    "exists",  # the path of the result is in use
    "unreadable",  # a damaged or malformed file
    "unwritable",  # a place that cannot be written, a full disk
    "unsupported",  # an architecture, format or feature that is not implemented
    "mismatch",  # pack, base, run or tensors that do not belong together
    "data",  # examples that cannot be used
    "memory",  # more than the machine has
    "dependency",  # a package that is not installed, or too old
    "busy",  # another process writes there
    "diverged",  # a loss, gradient or weight that is not finite
    "network",
    "timeout",  # more time than a request may take
    "interrupted",
]


_FLAG = re.compile(r"(?<![\w-])--(no-)?([a-z][a-z0-9]*(?:-[a-z0-9]+)*)")


def in_python(text: str) -> str:
    """Return a text with arguments in place of flags, but for commands in backticks."""
    parts = text.split("`")
    parts[::2] = [_FLAG.sub(_argument, part) for part in parts[::2]]
    return "`".join(parts)


def _argument(flag: re.Match) -> str:
    """``max_seq_length`` for ``--max-seq-length``, ``double_quant=False`` for ``--no-…``."""
    name = flag[2].replace("-", "_")
    return f"{name}=False" if flag[1] else name


class PackError(click.ClickException):
    """Wrong use or bad input, in a message of one line: where, what is wrong, and what to do.

    The command line prints the message with its flags (``--max-seq-length``); ``str(error)`` has
    the Python arguments instead (``max_seq_length``). To quote the error in another message, use
    ``error.message``, or ``error.text`` without its place.

    Args:
        text: What is wrong on one line, in terms of the command line, with commands in backticks.
        code: The kind of error; it is stable, so that callers and tests can rely on it.
        flag: The setting that the error is about, as in Python (``max_seq_length``); by default the
            flag at the start of the message.
        where: The file or row to put before the text.
    """

    exit_code = 2

    def __init__(
        self, text: str, code: Code = "invalid", flag: str | None = None, where: object = ""
    ) -> None:
        message = text
        if where:
            message = f"{where}: {text}"
        super().__init__(message)
        self.code: Code = code
        self.text = text
        self.where = str(where)
        leading = _FLAG.match(message)
        self.flag = flag or (leading[2].replace("-", "_") if leading else None)

    def __str__(self) -> str:
        return in_python(self.message)

    def to_json(self) -> dict[str, Any]:
        """Return what `--json` prints in place of a report."""
        return {"error": {"code": self.code, "flag": self.flag, "message": self.message}}

    def show(self, file: IO[Any] | None = None) -> None:
        """Print the error on one line, without the control characters of files."""
        with suppress(OSError):  # of a terminal that is closed
            echo(f"packs: {printable(self.message)}", file=file, err=file is None)


class Interrupted(PackError):
    """A signal ended a command; the command line exits with 128 + its number, 130 after Ctrl-C."""

    def __init__(self, message: str, number: int = signal.SIGINT) -> None:
        super().__init__(message, "interrupted")
        self.exit_code = 128 + number


class RunStopped(PackError):
    """A run ended early with a checkpoint; the message names the command that continues.

    Attributes:
        reason: why it ended.
        checkpoint: the folder of the checkpoint.
        pack: the folder that the run writes when it is done.
        exit_code: of the command line.
        command: the command line that continues; None unless `continue_with` was called.
    """

    def __init__(
        self,
        reason: str,
        checkpoint: Path,
        pack: Path,
        code: Code = "interrupted",
        exit_code: int = 2,
    ) -> None:
        self._saved = f"{reason}. Checkpoint saved to {checkpoint}."
        super().__init__(f"{self._saved} Continue with --resume.", code)
        self.exit_code = exit_code
        self.reason = reason
        self.checkpoint = checkpoint
        self.pack = pack
        self.command: str | None = None

    def continue_with(self, command: str) -> None:
        self.command = command
        self.message = f"{self._saved} Continue with `{command}`."

    def __str__(self) -> str:
        return f"{self._saved} Continue with out={str(self.pack)!r}, resume=True."


def older_version(place: object, remedy: str = "") -> PackError:
    """Return the error for a file of an older version; ``remedy`` says what to do."""
    fault = "was written by an older version of mlx-packs, which this one does not read."
    return PackError(f"{fault} {remedy}".rstrip(), "unsupported", where=place)


class BaseChanged(PackError):
    """The files of a base that is in use changed, or cannot be read any more."""

    def __init__(self, message: str) -> None:
        super().__init__(message, "unreadable", "model")


class ReadFailed(BaseChanged):
    """A read failed while MLX computed, whose results are lost."""


@contextmanager
def read_errors() -> Iterator[None]:
    """Turn a failed read of MLX into a `ReadFailed`."""
    try:
        yield
    except RuntimeError as error:
        if "[read]" not in str(error):
            raise
        raise ReadFailed(
            "--model: the weights of the base cannot be read any more. Put the base back."
        ) from None


class Float16Overflow(PackError):
    """Numbers are out of the range of float16; a run falls back to bfloat16.

    Args:
        fault: where they are, and what is wrong, before the words "in float16".
        saved: whether there is a checkpoint to continue from.
    """

    def __init__(self, fault: str, saved: bool = False) -> None:
        fault = f"{fault} in float16"
        super().__init__(f"{fault}. Pass --compute-dtype bfloat16.", "diverged", "compute_dtype")
        self.fault = fault
        self.saved = saved


CRASHED = 70  # the exit code of a program that a defect ends
# Errors of Python that mean a bug in the program if one of its own lines raises them.
_DEFECTS = (AssertionError, AttributeError, LookupError, NameError, ZeroDivisionError)
_SHOWN = 300  # characters of a library's message
_OUT_OF_MEMORY = re.compile("malloc|memory|resource limit", re.IGNORECASE)


def as_pack_error(error: BaseException) -> PackError | None:
    """Return what ended a command as an error that a user can correct; None if it is a defect."""
    if isinstance(error, PackError):
        return error

    if isinstance(error, (click.Abort, KeyboardInterrupt)):
        number = getattr(error, "number", signal.SIGINT)  # as of `signals.Signalled`
        reason = "interrupted"
        if number != signal.SIGINT:
            reason += f" ({error})"
        return Interrupted(reason, number)

    if isinstance(error, OSError):  # a disk that fills up, a folder without read permission
        full = error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EROFS)
        message = f"{error.filename or 'input or output'}: {error.strerror or error}"
        return PackError(message, "unwritable" if full else "unreadable")

    if not is_out_of_memory(error):
        return None
    reason = " ".join(str(error).split())[:120]
    return PackError(
        f"memory is exhausted ({reason}). Pass a smaller --batch-size or --max-seq-length, or "
        "train with --grad-checkpoint.",
        "memory",
    )


def is_out_of_memory(error: BaseException) -> bool:
    """Return whether Python or MLX (Metal, CUDA or host) raised an error for lack of memory."""
    of_mlx = isinstance(error, RuntimeError) and _OUT_OF_MEMORY.search(str(error))
    return bool(of_mlx) or isinstance(error, MemoryError)


@contextmanager
def library_errors(to_error: Callable[[str], PackError]) -> Iterator[None]:
    """Turn what a library raises about a file from elsewhere into an error that names the file.

    A defect of this program keeps its traceback.

    Args:
        to_error: the error for a reason: the library's message, without a full stop.
    """
    try:
        yield
    except PackError:
        raise
    except BaseException as error:
        # a panic of a library in Rust is no Exception
        is_fault = isinstance(error, Exception) or type(error).__name__ == "PanicException"
        if not is_fault or _is_defect(error):
            raise
        raise to_error(reason_of(error)) from error


@contextmanager
def file_errors(
    place: object, remedy: str = "", code: Code = "unreadable", flag: str | None = None
) -> Iterator[None]:
    """Turn the fault of a file into an error that begins with its place, and ends with a remedy."""
    try:
        yield
    except OSError as error:
        raise PackError(f"cannot be read ({error.strerror}).", code, flag, where=place) from None
    except ValueError as error:
        fault = str(error).rstrip(".")
        raise PackError(f"{fault}. {remedy}".rstrip(), code, flag, where=place) from None


@contextmanager
def errors_of(setting: str) -> Iterator[None]:
    """Begin errors of a file with the flag of the setting that names it."""
    try:
        yield
    except PackError as error:
        raise PackError(f"{flag_of(setting)} {error.message}", error.code, setting) from error


def _is_defect(error: BaseException) -> bool:
    """Return whether a line of this program raised an error that means a bug in it."""
    frame = error.__traceback__
    while frame is not None and frame.tb_next is not None:
        frame = frame.tb_next

    package = __name__.partition(".")[0]
    is_own = frame is not None and frame.tb_frame.f_globals.get("__name__", "").startswith(package)
    return is_own and isinstance(error, _DEFECTS)


def reason_of(error: BaseException) -> str:
    """Return a library's error message in one line, without a full stop at its end."""
    if isinstance(error, RecursionError):
        return "it is nested too deep"
    if isinstance(error, UnboundLocalError):  # mlx-lm's, of AWQ and GPTQ without their tensors
        return "none of its tensors is quantized"

    text = " ".join(str(error).split())
    if isinstance(error, KeyError):
        text = f"there is no {text}"
    text = text or type(error).__name__
    if len(text) > _SHOWN:
        text = text[:_SHOWN] + " …"
    return text.rstrip(".")


@lru_cache(maxsize=1024)
def warn_once(text: str, *values: object) -> None:
    """Log a warning, if this process has not logged it before."""
    logging.getLogger("mlx_packs").warning(text, *values)


def flag_of(setting: str) -> str:
    """Return the flag of a setting: ``max_seq_length`` is ``--max-seq-length``."""
    return "--" + setting.replace("_", "-")


def any_of(choices: Sequence[str]) -> str:
    """Return choices in words: ``a, b or c``."""
    if len(choices) == 1:
        return choices[0]
    return f"{', '.join(choices[:-1])} or {choices[-1]}"


def did_you_mean(name: str, valid: list[str]) -> str:
    """Return a sentence that names the nearest valid spelling, or lists the valid ones."""
    import difflib

    if near := difflib.get_close_matches(name, valid, n=1):
        return f"Did you mean '{near[0]}'?"
    return f"Valid: {', '.join(sorted(valid))}."


def pip_install(extra: str) -> str:
    """Return the command that adds an extra to this installation."""
    clone = Path(__file__).parents[1]
    if (clone / "pyproject.toml").is_file():
        return f"pip install -e '{clone}[{extra}]'"
    return f"pip install 'mlx-packs[{extra}]{_source()}'"


def _source() -> str:
    """Return " @ URL" as pip recorded it (PEP 610); empty if it was the package index."""
    import json
    from importlib import metadata

    try:
        recorded = metadata.distribution("mlx-packs").read_text("direct_url.json")
    except metadata.PackageNotFoundError:  # a copied folder
        recorded = None
    if recorded is None:
        return ""

    facts = json.loads(recorded)
    vcs = facts.get("vcs_info", {}).get("vcs")
    return f" @ {vcs}+{facts['url']}" if vcs else f" @ {facts['url']}"
