"""Tasks and methods that other installed packages add."""

import json
import os
import subprocess
import sys
import zipfile
from collections.abc import Mapping
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import replace
from pathlib import Path

import pytest

from mlx_packs import TrainConfig, plugins, train_pack
from mlx_packs.adapters.trainable import find_method
from mlx_packs.config.choices import TASKS, Table
from tests.helpers.documents import ROOT
from tests.helpers.errors import raises
from tests.helpers.rows import CHATS, write_rows
from tests.helpers.runs import LORA, TRAIN

_BUILD = "import sys; from hatchling.build import build_wheel; print(build_wheel(sys.argv[1]))"


def install(source: Path, site: Path) -> None:
    """Build the wheel of a source folder, and unpack it into ``site``, without a network."""
    site.mkdir(exist_ok=True)
    command = [sys.executable, "-c", _BUILD, str(site)]
    built = subprocess.run(command, cwd=source, check=True, capture_output=True, text=True)
    wheel = site / built.stdout.split()[-1]
    with zipfile.ZipFile(wheel) as file:
        file.extractall(site)
    wheel.unlink()


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
import sys
from mlx_packs.adapters.trainable import find_method
from mlx_packs.config.choices import MethodFacts, TaskFacts
print("imported", __name__, file=sys.stderr)
TASK = TaskFacts("{module}:Task", "decoder", settings_of="lm")
METHOD = MethodFacts("{module}:Method")
"""
SAYS = "import sys\nprint('imported', __name__, file=sys.stderr)\n"
# What a faulty package has as a module, and what the error names.
FAULTS = {
    "raises": (f"{SAYS}1 / 0", "ZeroDivision"),
    "exits": (f"{SAYS}sys.exit(3)", "SystemExit"),
    "no-facts": ("TASK = METHOD = 'x:Y'", "Facts"),
    "no-class": (FACTS.format(module="faulty"), "Task"),
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
    """A folder in which the example is installed."""
    site = tmp_path_factory.mktemp("site")
    install(ROOT / "examples" / "task_plugin", site)
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
def packs(run, tmp_path, monkeypatch):
    """Run ``packs ARGS`` in this process, with the packages of a site as long as it runs."""
    monkeypatch.chdir(tmp_path)

    def go(*args, site=None) -> subprocess.CompletedProcess:
        with installed(site) if site else nullcontext():
            return subprocess.CompletedProcess(args, *run(*args))

    return go


@pytest.fixture
def data(tmp_path):
    return write_rows(tmp_path / "data", train=CHATS, valid=CHATS[:1])


def rejected(result) -> str:
    """The one line of a rejected command."""
    lines = [line for line in result.stderr.splitlines() if not line.startswith("imported")]
    assert result.returncode == 2 and len(lines) == 1 and not result.stdout, result
    return lines[0]


def test_the_example_trains_resumes_and_needs_its_package(
    focal, small_folder, tmp_path, data, packs
):
    recipe = ROOT / "examples" / "task_plugin" / "recipe.yaml"
    out = tmp_path / "focal"
    args = ("train", "-c", recipe, "--model", small_folder, "--data", data, "--out", out, *SHORT)
    result = packs(*args, site=focal)
    assert result.returncode == 0, result.stderr
    recorded = json.loads((tmp_path / "focal-run" / "config.json").read_text())
    assert recorded["recipe"]["task_config"] == {"gamma": 1.5}
    assert recorded["recipe"]["learning_rate"] == 2e-4  # its own default

    assert packs("inspect", out).returncode == 0  # its pack needs no package
    longer = (*args, "--resume", "--iters", 3)
    without = rejected(packs(*longer))
    assert f"{recipe}: task: must be one of" in without and "'focal'" in without
    with_it = packs(*longer, site=focal)
    assert with_it.returncode == 0, with_it.stderr


def test_the_page_shows_the_example_as_it_is():
    page = (ROOT / "docs" / "extend.md").read_text(encoding="utf-8")
    files = [f for f in (ROOT / "examples" / "task_plugin").rglob("*") if f.suffix in SHOWN]
    assert len(files) == 4
    for file in files:
        assert f"```{SHOWN[file.suffix]}\n{file.read_text(encoding='utf-8')}```" in page, file


@pytest.mark.slow
def test_its_loss_is_the_one_that_is_trained(focal, here, small, tmp_path, data):
    here(focal)
    losses = {}
    for name, task in {"lm": {}, "0": {"gamma": 0}, "5": {"gamma": 5}}.items():
        if task:
            task = {"task": "focal", "task_config": task}
        train = replace(TRAIN, iters=1, val_batches=0, test_batches=1, **task)
        run = train_pack(small, data, LORA, train, tmp_path / name)
        (losses[name],) = [line["loss"] for line in run.curve if "loss" in line]
    assert losses["0"] == pytest.approx(losses["lm"], rel=1e-5)
    assert losses["5"] < 0.9995 * losses["0"]


CONFIGS = """
from dataclasses import dataclass
from mlx_packs.config.choices import TaskFacts
TASK = TaskFacts("acme:Task", "decoder", config="acme:Config")
"""


@pytest.mark.parametrize(
    ("config", "code", "shown"),
    [
        ("Config = dict", "dependency", "no dataclass"),
        ("@dataclass\nclass Config:\n    size: 'Unknown' = 1", "dependency", "size"),
        (
            "@dataclass\nclass Config:\n    size: int\n    least: int",
            "invalid",
            "task_config.least: must be given",
        ),
        ("", "dependency", "Config"),
    ],
)
def test_a_faulty_class_of_settings_names_its_package(config, code, shown, tmp_path, here):
    entries = "[mlx_packs.tasks]\nacme = acme:TASK\n"
    write_package(tmp_path, "acme-faulty", entries, {"acme": CONFIGS + config})
    here(tmp_path)
    with raises(code, "task" if code == "dependency" else "task_config", shown):
        TrainConfig(task="acme", task_config={"size": 1})


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


def test_help_and_errors_name_it(focal, packs):
    assert "focal (focal-task 0.1.0)" in " ".join(packs("train", "-h", site=focal).stdout.split())
    assert "focal" in rejected(packs("train", "--task", "fokal", site=focal))
    assert "focal" not in rejected(packs("train", "--task", "fokal"))


def write_faulty(site, text: str) -> None:
    """Write a package that adds a task ``broken`` and a method ``bad``."""
    entries = "[mlx_packs.tasks]\nbroken = faulty:TASK\n[mlx_packs.methods]\nbad = faulty:METHOD\n"
    write_package(site, "acme-faulty", entries, {"faulty": text})


@pytest.mark.parametrize("fault", FAULTS)
def test_a_faulty_task_is_one_line(fault, tmp_path, data, packs):
    text, shown = FAULTS[fault]
    write_faulty(tmp_path / "site", text)
    words = ("train", "--task", "broken", "--data", data, *SHORT)
    line = rejected(packs(*words, site=tmp_path / "site"))
    assert "--task broken" in line and "acme-faulty 0.1" in line and shown in line
    assert "pip uninstall acme-faulty" in line


@pytest.mark.parametrize("fault", ["no-facts", "lacks"])
def test_a_faulty_method_names_its_package(fault, tmp_path, here):
    write_faulty(tmp_path, FAULTS[fault][0])
    here(tmp_path)
    with raises("dependency", "method", "bad", "acme-faulty 0.1", "pip uninstall"):
        find_method(TrainConfig(method="bad").method)


def test_a_faulty_package_that_is_not_asked_for_is_not_imported(trained, tmp_path, packs):
    site = tmp_path / "site"
    write_faulty(site, FAULTS["raises"][0])
    write_package(site, "acme-damaged", "[mlx_packs.tasks\nno equals sign")
    write_package(site, "acme-taken", "[mlx_packs.tasks]\ndpo = faulty:TASK\n")
    write_package(site, "acme-too", "[mlx_packs.methods]\npissa = faulty:METHOD\n")

    for words in (("train", "-h"), ("plan", "--method", "pissa"), ("inspect", trained / "o")):
        result = packs(*words, site=site)
        assert result.returncode == 0 and "imported" not in result.stderr, result

    assert "broken (acme-faulty 0.1)" in " ".join(packs("train", "-h", site=site).stdout.split())


@pytest.mark.parametrize(
    ("setting", "name", "group"), [("task", "dpo", "tasks"), ("method", "lora", "methods")]
)
def test_a_taken_name_is_one_line(setting, name, group, tmp_path, data, packs):
    modules = {"own": FACTS.format(module="own")}
    write_package(tmp_path, "acme-taken", f"[mlx_packs.{group}]\n{name} = own:TASK\n", modules)
    line = rejected(packs("train", f"--{setting}", name, "--data", data, *SHORT, site=tmp_path))
    assert f"--{setting} {name}" in line and "pip uninstall acme-taken" in line


def test_two_packages_with_one_name_are_both_named(tmp_path, here):
    for name in ("acme-one", "acme-two"):
        write_package(tmp_path, name, "[mlx_packs.tasks]\nsame = own:TASK\n")
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
def test_a_reader_turns_a_file_into_a_base(tmp_path, packs):
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
    assert "must be a checkpoint folder" in rejected(packs("plan", "--model", file))
    words = [sys.executable, "-m", "mlx_packs", "plan", "--model", str(file)]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT), str(site)])}
    # a process shows the warning
    result = subprocess.run(words, env=environment, capture_output=True, text=True)
    assert result.returncode == 2 and "acme-broken 0.1" in result.stderr
    assert "must be a checkpoint folder" in result.stderr.splitlines()[-1]

    entries = "[mlx_packs.readers]\nacme = acme_reader:READER\n"
    write_package(site, "acme-reader", entries, {"acme_reader": text})
    result = packs("plan", "--model", file, site=site)
    assert result.returncode == 0 and "base" in result.stdout, result
    missing = packs("plan", "--model", tmp_path / "none.acme", site=site)
    assert "no such file" in rejected(missing)
