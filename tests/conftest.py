"""Fixtures: the embedded base, small models of several families, small data sets.

In `.ci/run` (MLX_PACKS_NO_SKIP=1) a skipped test is a failure.
"""

import copy
import gc
import os
import shutil
import signal
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import mlx_lm.utils
import pytest
from huggingface_hub import constants
from mlx.utils import tree_flatten
from mlx_lm.tokenizer_utils import TokenizerWrapper

from mlx_packs import macos, runtime, train_pack
from mlx_packs.bases import loading
from mlx_packs.bases.files import TINY, resolve_checkpoint
from mlx_packs.bases.supported import MIXTURES_SINCE, version_of_mlx_lm
from mlx_packs.cli.main import main
from mlx_packs.errors import PackError
from mlx_packs.evaluation import perplexity
from mlx_packs.ops import _backend, dispatch
from mlx_packs.packs import base as packs_base
from mlx_packs.packs.base import Base, load_base
from mlx_packs.runtime import mx
from mlx_packs.tasks import tokens as token_tasks
from mlx_packs.tasks.sample_prompt import SamplePrompt
from mlx_packs.terminal import printable
from mlx_packs.training.observers import OBSERVERS
from tests.helpers import bases, seconds, tenth
from tests.helpers.browser import launched, watched_pages
from tests.helpers.emulation import Emulated, emulation
from tests.helpers.encoders import write_encoder
from tests.helpers.local_hub import LocalHub, local_hub
from tests.helpers.rows import CHATS, write_rows
from tests.helpers.runs import LORA, TRAIN
from tests.helpers.variants import slow_except

CAFFEINATE = """#!/bin/sh
for part in "$@"; do printf "%s\\n" "$part"; done >> {folder}/caffeinate.log
echo $$ > {folder}/caffeinate.pid
exec sleep 60
"""


@dataclass
class Mac:
    """A folder with stand-ins for programs, and what they were asked."""

    folder: Path

    def asked(self, name: str) -> list[str]:
        """Return the arguments that a program was started with, those of all times."""
        log = self.folder / f"{name}.log"
        return log.read_text().splitlines() if log.is_file() else []


_COMPLETE = SamplePrompt.complete
os.environ["MLX_PACKS_CACHE"] = "off"  # nothing is left in the home of who runs the tests

# A shell ignores Ctrl-C for what it starts in the background, and the processes of tests inherit that.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)
for number in (signal.SIGTERM, signal.SIGHUP):
    if signal.getsignal(number) is signal.SIG_IGN:
        signal.signal(number, signal.SIG_DFL)

# Mixtures cannot be trained there; test_families.py checks that they are rejected.
collect_ignore = ["nn/test_experts.py"] if version_of_mlx_lm() < MIXTURES_SINCE else []


def pytest_addoption(parser):
    tenth.add_option(parser)


def pytest_configure(config):
    seconds.record(config)


def pytest_collection_modifyitems(config, items):
    tenth.deselect(config, items)
    # first, since they take long: at the end one process would run them and the other wait
    items.sort(key=lambda item: ("test_tutorial" not in item.nodeid, "/studio/" not in item.nodeid))


def pytest_collection_finish():
    """Let garbage collections, which runs ask for, pass over modules and collected tests."""
    gc.collect()
    gc.freeze()


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item, call):
    report = yield
    if report.skipped and os.environ.get("MLX_PACKS_NO_SKIP") and not hasattr(report, "wasxfail"):
        report.outcome = "failed"
        report.longrepr = f"unexpected skip: {report.longrepr}"
    return report


@pytest.fixture
def tiny() -> Base:
    """The embedded base, freshly loaded."""
    return load_base("tiny")


@pytest.fixture(scope="session")
def shared_tiny() -> Base:
    """The embedded base, loaded once; tests leave it as it was."""
    return load_base("tiny")


@pytest.fixture(scope="session")
def small_tiny() -> Base:
    """The first two blocks of the embedded base, for texts; tests leave it as it was."""
    return bases.first_blocks(2)


@pytest.fixture(scope="session")
def dense_tiny() -> Base:
    """The embedded base with dense weights, loaded once; tests leave it as it was."""
    return bases.dense_tiny()


@pytest.fixture(scope="session")
def tokenizer() -> TokenizerWrapper:
    """The tokenizer of the embedded base."""
    return load_base("tiny").tokenizer


@pytest.fixture(scope="session")
def encoder(tmp_path_factory) -> Path:
    """The folder of a small encoder; tests only read it."""
    return write_encoder(tmp_path_factory.mktemp("encoder") / "mini")


@pytest.fixture(scope="session")
def trained(tmp_path_factory) -> Path:
    """A folder with rows ``d``, a pack ``o`` and its run ``o-run``; tests only read it."""
    folder = tmp_path_factory.mktemp("trained")
    write_rows(folder / "d", train=CHATS, valid=CHATS[:2])
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        train_pack("tiny", "d", LORA, TRAIN, "o")
    return folder


@pytest.fixture
def trained_copy(trained, here) -> Path:
    """A copy of `trained`, which is the current folder."""
    return shutil.copytree(trained, here, dirs_exist_ok=True)


@pytest.fixture
def here(tmp_path, monkeypatch) -> Path:
    """An empty folder, which is the current one."""
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.fixture
def hub(here, monkeypatch) -> Iterator[LocalHub]:
    """A local substitute for the Hub, with its own caches."""
    with local_hub() as found:
        monkeypatch.setattr(constants, "ENDPOINT", found.url)
        template = found.url + "/{repo_id}/resolve/{revision}/{filename}"
        monkeypatch.setattr(constants, "HUGGINGFACE_CO_URL_TEMPLATE", template)
        monkeypatch.setattr(constants, "HF_HUB_DISABLE_XET", True)
        monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
        monkeypatch.setattr(constants, "HF_ASSETS_CACHE", str(here / "hf" / "assets"))
        monkeypatch.setattr(constants, "HF_HUB_CACHE", str(here / "hf" / "hub"))
        yield found


@pytest.fixture
def mac(tmp_path, monkeypatch) -> Mac:
    """A Mac, by a stand-in for the program that keeps it awake."""
    folder = tmp_path / "mac"
    folder.mkdir()
    program = folder / "caffeinate"
    program.write_text(CAFFEINATE.format(folder=folder))
    program.chmod(0o755)
    monkeypatch.setenv("PATH", f"{folder}{os.pathsep}{os.environ['PATH']}")
    monkeypatch.setenv("HOME", str(folder / "home"))
    monkeypatch.setattr(macos, "is_macos", lambda: True)
    monkeypatch.setattr(macos, "sysctl", lambda _: 1)
    return Mac(folder)


def with_model(args: list[str]) -> list[str]:
    flags = {arg.partition("=")[0] for arg in args}
    has_own = args[:1] == ["train"] and "--data" in flags
    named = {"--model", "--resume", "-c", "--config"} & flags
    return [*args, "--model", "tiny"] if has_own and not named else args


@pytest.fixture
def run(monkeypatch, capsys):
    """Run `packs ARGS` as a program; its exit code, stdout and stderr.

    `packs train` on examples of a test trains the bundled model, where no other is named.
    ``run.error`` is the PackError that the last call ended with, None without one.
    """

    def go(*args) -> tuple[int, str, str]:
        go.error = None
        with pytest.raises(SystemExit) as exit:
            main(with_model([*map(str, args)]))
        out, err = capsys.readouterr()
        return int(exit.value.code or 0), out, err

    show = PackError.show

    def remember(error, file=None):
        go.error = error
        show(error, file)

    monkeypatch.setattr(PackError, "show", remember)
    return go


@pytest.fixture
def rejected(run):
    """Run `packs ARGS`, which prints nothing but one line about its error; the error."""

    def go(*args) -> PackError:
        code, out, err = run(*args)
        assert (code, out) == (2, ""), err
        lines = [line for line in err.splitlines() if not line.startswith(("pull ", "left "))]
        assert lines == [f"packs: {printable(run.error.message)}"]
        return run.error

    return go


@pytest.fixture(scope="module")
def browser() -> Iterator:
    """Chromium or Chrome of this machine."""
    with launched() as browser:
        yield browser


@pytest.fixture
def expect(browser):
    """Check what a page shows, and wait for it."""
    from playwright.sync_api import expect

    return expect


@pytest.fixture
def new_page(browser) -> Iterator:
    """Open pages of which nothing may fail, or be asked of others."""
    with watched_pages(browser) as new_page:
        yield new_page


@pytest.fixture
def nothing_is_loaded(monkeypatch) -> None:
    """Loading weights raises."""

    def load(*_, **__):
        raise AssertionError("weights were loaded")

    for place in ("mlx_packs.training.prepare.load_base", "mlx_packs.bases.loading.load_model_of"):
        monkeypatch.setattr(place, load)


@pytest.fixture
def nothing_ahead() -> Iterator[None]:
    """MLX allocates nothing ahead of what it computes, whatever else the machine does."""
    limit = mx.set_memory_limit(0)
    yield
    mx.set_memory_limit(limit)


@pytest.fixture(params=slow_except(["metal", "cuda"], "metal"))
def emulated(request) -> Iterator[Emulated]:
    """A forced backend whose kernels run in the emulator; some must have run, each that was built.

    None may fall back to its reference, or compute in half precision.
    """
    with emulation(request.param) as built, dispatch.backend(request.param):
        yield Emulated(request.param, built)
        assert not _backend.record()["fallbacks"]
        assert built and all(kernel.reports for kernel in built)
        for kernel in built:
            assert sum(r.half_operations + r.bfloat_operations for r in kernel.reports) == 0


@pytest.fixture(params=slow_except(["metal", "cuda"], "metal"))
def nothing_launched(request) -> Iterator[Emulated]:
    """A forced backend as `emulated`, of which no kernel may run."""
    with emulation(request.param) as built, dispatch.backend(request.param):
        yield Emulated(request.param, built)
        assert not _backend.record()["fallbacks"]
        assert not built


@pytest.fixture(scope="session", autouse=True)
def _no_sample_text() -> Iterator[None]:
    """Runs complete no sample prompt, which takes as long as their steps."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(SamplePrompt, "complete", lambda *_: "")
        yield


@pytest.fixture(scope="session", autouse=True)
def _no_waiting_for_disks() -> Iterator[None]:
    """Files of tests outlive no power cut: a run would wait for its disk some twenty times."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(os, "fsync", lambda _: None)
        yield


@pytest.fixture(scope="session", autouse=True)
def _tokenizer_read_once() -> Iterator[None]:
    """Embedded bases have copies of one tokenizer: to read it takes four times as long."""
    load = mlx_lm.utils.load_tokenizer
    folder = resolve_checkpoint(TINY)
    read = {}

    def read_or_copied(path, options=None, eos_token_ids=None):
        if path != folder:
            return load(path, options, eos_token_ids=eos_token_ids)

        asked = repr((options, eos_token_ids))
        if asked not in read:
            read[asked] = load(path, options, eos_token_ids=eos_token_ids)
        return copy.deepcopy(read[asked])

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(mlx_lm.utils, "load_tokenizer", read_or_copied)
        yield


@pytest.fixture(scope="session", autouse=True)
def _embedded_base_loaded_once() -> Iterator[None]:
    """Embedded bases are copies of one, with its arrays: to read it takes four times as long."""
    load, load_model = packs_base.load_base_model, loading.load_model_of
    loaded = {}

    def load_or_copied(name=TINY, quantize="none", trust_remote_code=False, **options):
        is_watched = loading.load_model_of is not load_model
        if (name, quantize) != (TINY, "none") or options != defaults or is_watched:
            return load(name, quantize, trust_remote_code, **options)
        device = runtime.on_cpu()
        if device not in loaded:
            loaded[device] = load(name, **options)
        return bases.copied(loaded[device])

    defaults = {"double_quant": True, "keep": (), "compute_dtype": "auto", "lazy": False}
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(packs_base, "load_base_model", load_or_copied)
        yield


@pytest.fixture(scope="session", autouse=True)
def _trees_checked_once() -> Iterator[None]:
    """Runs measure once for equal modules whether these compute trees, which takes as long as steps.

    It is asked again where the answer is no; tests/objectives/test_shared_prefix.py tests it.
    """
    is_exact = set()
    why_not_shared = token_tasks.why_not_shared

    def remembered(model, head, vocab_size):
        modules = [(n, type(m), getattr(m, "recompute", None)) for n, m in model.named_modules()]
        trained = [(n, t.shape, t.dtype) for n, t in tree_flatten(model.trainable_parameters())]
        asked = repr((modules, trained, head is None, vocab_size))
        if asked in is_exact:
            return None

        reason = why_not_shared(model, head, vocab_size)
        if reason is None:
            is_exact.add(asked)
        return reason

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(token_tasks, "why_not_shared", remembered)
        patch.setattr(perplexity, "why_not_shared", remembered)
        yield


@pytest.fixture(autouse=True)
def _no_page(request, monkeypatch) -> None:
    """Runs that a test starts write no report.html, unless it is marked ``page``."""
    if request.node.get_closest_marker("page") is None:
        monkeypatch.delitem(OBSERVERS, "page", raising=False)


@pytest.fixture
def sample_text(monkeypatch):
    """Runs complete their sample prompt, as for a user."""
    monkeypatch.setattr(SamplePrompt, "complete", _COMPLETE)


@pytest.fixture(autouse=True)
def _seeded():
    mx.random.seed(7)
