"""Tasks and methods that other installed packages add."""

import json
import os
import subprocess
import sys
import zipfile
from collections.abc import Mapping
from contextlib import ExitStack, contextmanager
from pathlib import Path

import pytest

from mlx_packs import TrainConfig, plugins
from mlx_packs.adapters.trainable import find_method
from mlx_packs.config.choices import TASKS, Table
from tests.helpers.documents import ROOT
from tests.helpers.errors import raises
from tests.helpers.rows import CHATS, write_rows

EXAMPLE = ROOT / "examples" / "task_plugin"
BUILD = "import sys; from hatchling.build import build_wheel; print(build_wheel(sys.argv[1]))"


def write_package(
    site: Path, name: str, entry_points: str, modules: Mapping[str, str] | None = None
) -> None:
    """Write an installed package of these modules; ``entry_points`` has groups and lines."""
    info = site / f"{name.replace('-', '_')}-0.1.dist-info"
    info.mkdir(parents=True, exist_ok=True)
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: 0.1\n")
    (info / "entry_points.txt").write_text(entry_points)
    for module, text in (modules or {}).items():
        (site / f"{module}.py").write_text(text)


SHORT = "--iters 2 --batch-size 2 --test-batches 1 --val-batches 0 --matmul-path dense".split()
SHOWN = {".py": "python", ".toml": "toml", ".yaml": "yaml"}
FACTS = """
from mlx_packs.config.choices import MethodFacts, TaskFacts
TASK = TaskFacts("{module}:Task", "decoder", settings_of="lm")
METHOD = MethodFacts("{module}:Method")
"""
CONFIG = """
from dataclasses import dataclass
from mlx_packs.config.choices import TaskFacts
TASK = TaskFacts("faulty:Task", "decoder", config="faulty:Config")
"""
# What a faulty package has as a module, and what the error names.
FAULTS = {
    "raises": ("1 / 0", "ZeroDivision"),
    "exits": ("raise SystemExit(3)", "SystemExit"),
    "no-facts": ("TASK = METHOD = 'x:Y'", "Facts"),
    "no-class": (FACTS.format(module="faulty"), "Task"),
    "no-settings": (f"{CONFIG}Config = dict", "no dataclass"),
    "lacks": (
        "from mlx_packs.tasks.task import Task as Own\n"
        + FACTS.format(module="faulty")
        + "class Task(Own):\n    def encode(self, base, phases, splits): ...\n"
        "class Method:\n    def check(self, base, path): ...\n",
        "bind, evaluation, sampled, summary",
    ),
}


@pytest.fixture(scope="module")
def focal(tmp_path_factory):
    """A folder in which the example is installed: its wheel, built without a network."""
    site = tmp_path_factory.mktemp("site")
    command = [sys.executable, "-c", BUILD, str(site)]
    built = subprocess.run(command, cwd=EXAMPLE, check=True, capture_output=True, text=True)
    with zipfile.ZipFile(site / built.stdout.split()[-1]) as wheel:
        wheel.extractall(site)
    return site


@contextmanager
def installed(site):
    """The packages of a folder are installed in this process."""
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(site))
        plugins.installed.cache_clear()
        try:
            yield
        finally:
            plugins.installed.cache_clear()
            for name, module in [*sys.modules.items()]:
                if Path(site) in Path(getattr(module, "__file__", None) or "").parents:
                    del sys.modules[name]


@pytest.fixture
def here():
    """A function that makes packages of a folder installed for the length of a test."""
    with ExitStack() as stack:
        yield lambda site: stack.enter_context(installed(site))


@pytest.fixture
def data(tmp_path):
    return write_rows(tmp_path / "data", train=CHATS, valid=CHATS[:1])


def test_the_example_trains_resumes_and_needs_its_package(
    focal, small_folder, tmp_path, data, run, rejected
):
    recipe = EXAMPLE / "recipe.yaml"
    out = tmp_path / "focal"
    args = ("train", "-c", recipe, "--model", small_folder, "--data", data, "--out", out, *SHORT)
    with installed(focal):
        code, _, err = run(*args)
    assert code == 0, err
    recorded = json.loads((tmp_path / "focal-run" / "config.json").read_text())
    assert recorded["recipe"]["task_config"] == {"gamma": 1.5}
    assert recorded["recipe"]["learning_rate"] == 2e-4  # its own default

    assert run("inspect", out)[0] == 0  # its pack needs no package
    longer = (*args, "--resume", "--iters", 3)
    without = rejected(*longer).message
    assert f"{recipe}: task: must be one of" in without and "'focal'" in without
    with installed(focal):
        code, _, err = run(*longer)
    assert code == 0, err


def test_the_page_shows_the_example_as_it_is():
    page = (ROOT / "docs" / "extend.md").read_text(encoding="utf-8")
    files = [f for f in EXAMPLE.rglob("*") if f.suffix in SHOWN]
    assert len(files) == 4
    for file in files:
        assert f"```{SHOWN[file.suffix]}\n{file.read_text(encoding='utf-8')}```" in page, file


def test_its_settings_have_types_and_defaults_and_are_checked_by_its_class(focal, here):
    here(focal)
    for wrong, code, shown in (
        ({"gama": 1}, "unknown", "gamma"),
        ({"gamma": "high"}, "invalid", "a number"),
        ({"gamma": 9}, "invalid", "[0, 5]"),
    ):
        with raises(code, "task_config", shown):
            TrainConfig(task="focal", task_config=wrong)
    config = TrainConfig(task="focal", task_config={"gamma": "1e-1"})
    assert config.task_settings.gamma == 0.1
    assert TrainConfig(task="focal").task_settings.gamma == 2.0
    assert TrainConfig(task="focal", loss_on="all", packing=True)  # settings of lm
    with raises("conflict", "beta", "dpo"):
        TrainConfig(task="focal", beta=0.3)
    with raises("conflict", "task_config", "lm"):
        TrainConfig(task_config={"gamma": 1})


def test_help_and_errors_name_it(focal, run, rejected):
    with installed(focal):
        assert "focal (focal-task 0.1.0)" in " ".join(run("train", "-h")[1].split())
        assert "focal" in rejected("train", "--task", "fokal").message
    assert "focal" not in rejected("train", "--task", "fokal").message


def write_faulty(site, text: str) -> None:
    """Write a package that adds a task ``broken`` and a method ``bad``."""
    entries = "[mlx_packs.tasks]\nbroken = faulty:TASK\n[mlx_packs.methods]\nbad = faulty:METHOD\n"
    write_package(site, "acme-faulty", entries, {"faulty": text})


@pytest.mark.parametrize("fault", FAULTS)
def test_a_faulty_task_or_method_is_one_line(fault, tmp_path, data, rejected, here):
    text, shown = FAULTS[fault]
    write_faulty(tmp_path, text)
    here(tmp_path)
    line = rejected("train", "--task", "broken", "--data", data, *SHORT).message
    assert "--task broken" in line and "acme-faulty 0.1" in line and shown in line
    assert "pip uninstall acme-faulty" in line
    with raises("dependency", "method", "bad", "acme-faulty 0.1", "pip uninstall"):
        find_method(TrainConfig(method="bad").method)


def test_a_setting_without_a_default_must_be_given(tmp_path, here):
    write_faulty(tmp_path, f"{CONFIG}@dataclass\nclass Config:\n    size: int\n    least: int")
    here(tmp_path)
    with raises("invalid", "task_config", "task_config.least: must be given"):
        TrainConfig(task="broken", task_config={"size": 1})


def test_a_faulty_package_that_is_not_asked_for_is_not_imported(trained, tmp_path, run, here):
    write_faulty(tmp_path, FAULTS["no-facts"][0])
    write_package(tmp_path, "acme-damaged", "[mlx_packs.tasks\nno equals sign")
    write_package(tmp_path, "acme-taken", "[mlx_packs.tasks]\ndpo = faulty:TASK\n")
    write_package(tmp_path, "acme-too", "[mlx_packs.methods]\npissa = faulty:METHOD\n")
    here(tmp_path)
    for words in (("plan", "--method", "pissa"), ("inspect", trained / "o"), ("train", "-h")):
        code, out, err = run(*words)
        assert code == 0 and "faulty" not in sys.modules, err
    assert "broken (acme-faulty 0.1)" in " ".join(out.split())


def test_taken_names_are_one_line(tmp_path, data, rejected, here):
    modules = {"own": FACTS.format(module="own")}
    for setting, name in (("task", "dpo"), ("method", "lora")):
        site = tmp_path / setting
        write_package(site, "acme", f"[mlx_packs.{setting}s]\n{name} = own:TASK\n", modules)
        with installed(site):
            line = rejected("train", f"--{setting}", name, "--data", data, *SHORT).message
        assert f"--{setting} {name}" in line and "pip uninstall acme" in line

    for package in ("acme-one", "acme-two"):
        write_package(tmp_path, package, "[mlx_packs.tasks]\nsame = own:TASK\n")
    here(tmp_path)
    with raises("dependency", "task", "acme-one", "acme-two"):
        TrainConfig(task="same")


def test_a_method_is_made_of_its_class(tmp_path, here):
    text = FACTS.format(module="acme_method")
    text += "from mlx_packs.adapters.attach import LoRA\nclass Method(LoRA): ...\n"
    entries = "[mlx_packs.methods]\nacme = acme_method:METHOD\n"
    write_package(tmp_path, "acme-method", entries, {"acme_method": text})
    here(tmp_path)
    assert TrainConfig(method="acme").method == "acme"
    assert type(find_method("acme")).__name__ == "Method"


def test_names_that_are_built_in_look_at_no_package(monkeypatch):
    monkeypatch.setattr(Table, "installed", "mlx_packs.plugins:no_such_function")
    assert "dpo" in TASKS and TASKS["dpo"] is TASKS.get("dpo")
    assert TASKS.get(TrainConfig().task).architecture == "decoder"


@pytest.mark.slow
def test_a_reader_turns_a_file_into_a_base(tmp_path, run, rejected, here):
    text = """
from pathlib import Path
from mlx_packs.bases.files import tiny_checkpoint
from mlx_packs.bases.readers import Reader
READER = Reader("acme", lambda file: file.suffix == ".acme", "acme_reader:folder", (".acme",))
def folder(file):
    return tiny_checkpoint()
"""
    site, file = tmp_path / "site", tmp_path / "model.acme"
    file.write_bytes(b"acme")
    write_package(site, "acme-broken", "[mlx_packs.readers]\nbroken = no_such_module:READER\n")
    assert "must be a checkpoint folder" in rejected("plan", "--model", file).message
    words = [sys.executable, "-m", "mlx_packs", "plan", "--model", str(file)]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT), str(site)])}
    # a process shows the warning
    result = subprocess.run(words, env=environment, capture_output=True, text=True)
    assert result.returncode == 2 and "acme-broken 0.1" in result.stderr
    assert "must be a checkpoint folder" in result.stderr.splitlines()[-1]

    entries = "[mlx_packs.readers]\nacme = acme_reader:READER\n"
    write_package(site, "acme-reader", entries, {"acme_reader": text})
    here(site)
    code, out, err = run("plan", "--model", file)
    assert code == 0 and "base" in out, err
    assert "no such file" in rejected("plan", "--model", tmp_path / "none.acme").message
