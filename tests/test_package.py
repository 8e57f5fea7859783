"""The package as it is installed: import time, import order, what the wheel carries, the README."""

import ast
import inspect
import json
import os
import re
import shutil
import subprocess
import sys
import zipfile
from email import message_from_bytes
from email.message import Message
from pathlib import Path

import numpy as np
import pytest

import mlx_packs
from mlx_packs import runtime
from mlx_packs.reading import sha256
from mlx_packs.runtime import mx
from tests.helpers.interpreter import run_python

ROOT = Path(__file__).parents[1]
PACKAGE = ROOT / "mlx_packs"


def train_in_process(options: str, folder: Path, **environment: str) -> dict:
    """What `python -m mlx_packs.train --json` reports, run in a folder."""
    result = subprocess.run(
        [sys.executable, "-m", "mlx_packs.train", "--json", *options.split()],
        cwd=folder,
        env={**os.environ, **environment},
        capture_output=True,
        text=True,
        check=False,
    )
    assert result.returncode == 0, result.stderr
    return json.loads(result.stdout)


def test_imports_load_nothing_heavy():
    """The package loads nothing; commands and packs load neither MLX nor transformers.

    That advises at its import where there is no torch, unless it is asked not to.
    """
    run_python(
        "import os, sys; os.environ.pop('TRANSFORMERS_NO_ADVISORY_WARNINGS', None); "
        "import mlx_packs; assert os.environ['TRANSFORMERS_NO_ADVISORY_WARNINGS'] == '1'; "
        "heavy = {'mlx.core', 'mlx_lm', 'transformers', 'numpy', 'rich'}; "
        "assert not heavy & set(sys.modules), heavy & set(sys.modules); "
        "import mlx_packs.cli.inspect, mlx_packs.packs.pack, mlx_packs.training.run_page; "
        "heavy.remove('rich'); "
        "assert not heavy & set(sys.modules), heavy & set(sys.modules)"
    )


@pytest.mark.parametrize("preset", [None, "0"])
def test_watchdog_variable_is_set_before_mlx_and_keeps_a_users_value(preset):
    """`find_spec` of a finder that finds nothing sees the environment when MLX is asked for."""
    code = f"""
import os, sys
os.environ.pop("AGX_RELAX_CDM_CTXSTORE_TIMEOUT", None)
if {preset!r}: os.environ["AGX_RELAX_CDM_CTXSTORE_TIMEOUT"] = {preset!r}
class Finder:
    @staticmethod
    def find_spec(name, path=None, target=None):
        if name == "mlx.core": print(os.environ.get("AGX_RELAX_CDM_CTXSTORE_TIMEOUT"))
sys.meta_path.insert(0, Finder)
import mlx_packs.nn.quantized
"""
    assert run_python(code) == (preset or "1")


def test_public_names_resolve_and_evaluate_is_a_function():
    run_python(
        "import mlx_packs as mp; [getattr(mp, n) for n in mp.__all__]; assert len(mp.__all__) > 20; "
        "assert set(dir(mp)) == {*mp.__all__, '__version__'}; "
        "import mlx_packs.train; assert callable(mp.evaluate) and callable(mp.train_pack); "
        "assert (mp.data.tiny_path() / 'train.jsonl').is_file()"
    )


def test_public_names_and_methods_are_documented():
    publics = {name: getattr(mlx_packs, name) for name in mlx_packs.__all__}
    undocumented = [name for name, public in publics.items() if not inspect.getdoc(public)]
    for public in filter(inspect.isclass, publics.values()):
        undocumented += [
            f"{public.__name__}.{name}"
            for name, member in vars(public).items()
            if name[0] != "_" and callable(member) and not inspect.getdoc(member)
        ]
    assert not undocumented


def test_every_line_of_the_stub_is_read():
    stub = ast.parse((PACKAGE / "__init__.pyi").read_text())
    names = {a.name for node in stub.body if isinstance(node, ast.ImportFrom) for a in node.names}
    assert names == set(mlx_packs.__all__)


@pytest.mark.skipif(sys.platform != "linux", reason="the BLAS is Accelerate here")
def test_real_blas_is_bound_and_can_be_turned_off():
    assert runtime.BLAS.bound and "openblas" in runtime.BLAS.name
    random = np.random.default_rng(0)
    for m, k, n in ((1, 7, 5), (33, 65, 129), (128, 256, 512)):
        a, b = (random.standard_normal(s).astype(np.float32) for s in ((m, k), (n, k)))
        for x, y in ((a, b), (b, a)):
            product = mx.array(x) @ mx.array(y).T
            np.testing.assert_allclose(np.array(product), x @ y.T, rtol=0, atol=1e-4)
    code = "from mlx_packs import runtime; print(runtime.BLAS.bound, runtime.BLAS.name)"
    assert run_python(code, MLX_PACKS_BLAS="off") == "False reference"
    assert run_python(code, MLX_PACKS_BLAS="/nowhere/lib.so").startswith("False")


@pytest.mark.slow
@pytest.mark.parametrize("stream", ["default_stream(mx.cpu)", "generation_stream"])
def test_a_process_ends_well_while_mlx_computes(stream):
    code = f"""
from mlx_packs.runtime import mx
from mlx.core import default_stream
from mlx_lm.generate import generation_stream
with mx.stream({stream}):
    a = b = mx.random.normal((1000, 1000))
    for _ in range(8):
        b = b @ a * 0.01
    mx.async_eval(b)
"""
    run_python(code)


@pytest.mark.slow
@pytest.mark.skipif(shutil.which("g++") is None, reason="MLX compiles with g++ on CPUs")
def test_steps_are_the_same_compiled_and_uncompiled():
    # with an empty PATH, which would be quick, MLX finds no g++ and compiles nothing
    code = """
from mlx_packs.runtime import mx
from tests.helpers.steps import examples_of, largest_difference, make_batch, update
batches = [make_batch(examples_of((9, 17, 5, 30)), range(4), 4, 64)] * 3
mx.disable_compile(); plain, *steppers = update(batches, 1)
mx.enable_compile(); compiled, stepper = update(batches, 1)
steppers.append(stepper)
print(largest_difference(plain, compiled), *(stepper.traces for stepper in steppers))
"""
    difference, *traces = run_python(code).split()
    assert float(difference) < 1e-6 and traces == ["0", "1"]


def readme_commands() -> list[str]:
    """The commands of the README that set up an environment, without their comments."""
    lines = (ROOT / "README.md").read_text().splitlines()
    return [line.partition("   #")[0] for line in lines if line.startswith("python3 -m venv")]


def test_readme_has_two_commands_and_ci_runs_the_second():
    train, tests = readme_commands()
    assert train.endswith("packs train") and tests.endswith("python -m pytest -n 2")
    assert "grep -m1 'python -m pytest' README.md" in (ROOT / ".ci" / "run").read_text()
    first = next(
        line for line in (ROOT / "README.md").read_text().splitlines() if "python -m pytest" in line
    )
    assert first.startswith(tests)


def metadata_of(tree: Path, out: Path) -> Message:
    """METADATA of the wheel that would be built from a tree."""
    code = "import sys; from hatchling.build import prepare_metadata_for_build_wheel as f; f(sys.argv[1])"
    out.mkdir(exist_ok=True)
    subprocess.run([sys.executable, "-c", code, out], cwd=tree, check=True)
    return message_from_bytes(next(out.glob("*.dist-info/METADATA")).read_bytes())


def test_metadata_names_the_version_and_one_repository_and_links_are_absolute(tmp_path):
    metadata = metadata_of(ROOT, tmp_path)
    assert metadata["Version"] == mlx_packs.__version__
    assert metadata["Author"] == "mlx-packs contributors"
    urls = dict(line.split(", ") for line in metadata.get_all("Project-URL"))
    assert all(url.startswith(urls["Repository"]) for url in urls.values())
    named = re.findall(
        r"github(?:usercontent)?\.com/([\w-]+/[\w-]+)", (ROOT / "pyproject.toml").read_text()
    )
    assert len(named) >= 6 and {f"https://github.com/{name}" for name in named} == {
        urls["Repository"]
    }

    text = re.sub(r"```.*?```|`[^`\n]*`", "", metadata.get_payload(), flags=re.S)
    link = r'\]\(\s*<?([^)>\s]+)|(?:href|src|srcset)\s*=\s*["\']([^"\']+)'
    links = [markdown or html for markdown, html in re.findall(link, text)]
    own = [link.partition(f"/v{mlx_packs.__version__}/")[2] for link in links]
    assert len(links) >= 5 and all(re.match("https?://|mailto:", link) for link in links)
    assert any(own) and not {p for p in own if not (ROOT / p.partition("#")[0]).exists()}


def copy_of_the_tree(to: Path, mode: int, modified: int) -> Path:
    """A copy of what git knows, or would add, with other permissions and times."""
    listed = subprocess.run(
        ["git", "ls-files", "-co", "--exclude-standard"], cwd=ROOT, capture_output=True, check=True
    )
    for name in listed.stdout.decode().splitlines()[:: 1 if mode & 0o077 else -1]:
        if (source := ROOT / name).is_file():
            (to / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(source, to / name)
            (to / name).chmod(mode | (source.stat().st_mode & 0o100))
            os.utime(to / name, (modified, modified))
    return to


@pytest.fixture(scope="module")
def built(tmp_path_factory) -> list[dict[str, Path]]:
    """The sdist, and the wheel that was built from it, of two copies of the tree, by name."""
    if not (ROOT / ".git").exists():
        pytest.skip("needs a checkout")
    folder = tmp_path_factory.mktemp("built")
    builds = []

    for name, umask, mode, year, zone in (
        ("first", 0o077, 0o600, 9, "Asia/Tokyo"),
        ("second folder", 0o002, 0o664, 40, "America/Lima"),
    ):
        tree = copy_of_the_tree(folder / name / "tree", mode, year * 31_536_000)
        subprocess.run(
            [sys.executable, "-m", "build", "--no-isolation", "--outdir", folder / name, tree],
            env={**os.environ, "TZ": zone, "PYTHONHASHSEED": str(year)},
            umask=umask,
            check=True,
            capture_output=True,
        )
        builds.append({p.name: p for p in (folder / name).iterdir() if p.is_file()})

    return builds


@pytest.mark.slow
def test_wheel_and_sdist_are_the_same_bytes_from_two_copies_of_the_tree(built):
    first, second = ({name: sha256(file) for name, file in each.items()} for each in built)
    assert len(first) == 2 and first == second


@pytest.mark.interop
@pytest.mark.nightly(seconds=40)  # pip installs all dependencies
@pytest.mark.skipif(not (ROOT / ".git").exists(), reason="needs a checkout")
def test_wheel_in_an_empty_environment_runs_the_first_command(tmp_path):
    build = [sys.executable, "-m", "build", "--no-isolation", "--wheel", "--outdir", tmp_path, ROOT]
    subprocess.run(build, check=True, capture_output=True)

    environment, empty = tmp_path / "environment", tmp_path / "empty"
    empty.mkdir()
    clean = {key: os.environ[key] for key in ("PATH", "HOME") if key in os.environ}
    subprocess.run([sys.executable, "-m", "venv", environment], check=True)
    pip = [environment / "bin" / "pip", "install", "-q", "-c", ROOT / "constraints.txt"]
    subprocess.run([*pip, *tmp_path.glob("*.whl")], env=clean, check=True)

    command = readme_commands()[0].rpartition("&&")[2].split()
    assert Path(command[0]).name == "packs"
    short = "--iters 2 --batch-size 1 --test-batches 1 --val-batches 0 --max-seq-length 64"
    subprocess.run(
        [environment / "bin" / "packs", *command[1:], *short.split(), "--matmul-path", "dense"],
        cwd=empty,
        env={**clean, "MLX_PACKS_CACHE": "off"},
        check=True,
        capture_output=True,
    )

    assert (empty / "packs" / "tiny" / "pack.json").is_file()


@pytest.mark.slow
def test_wheel_and_wheel_from_sdist_carry_the_same_files_and_train(built, tmp_path):
    build = [sys.executable, "-m", "build", "--no-isolation", "--outdir"]
    subprocess.run([*build, tmp_path, "--wheel", ROOT], check=True, capture_output=True)
    (of_tree,) = tmp_path.glob("*.whl")
    of_sdist = built[0][of_tree.name]
    names, expected = (set(zipfile.ZipFile(wheel).namelist()) for wheel in (of_tree, of_sdist))
    assert names == expected

    for needed in ("base/model.safetensors", "base/config.json", "data/train.jsonl", "recipe.yaml"):
        assert f"mlx_packs/tiny/{needed}" in names
    assert {name for name in names if name.startswith("mlx_packs/report/templates/")}
    pages = {name.partition(".data/data/share/man/man1/")[2] for name in names} - {""}
    assert pages == {file.name for file in (ROOT / "docs/man/man1").iterdir()} and len(pages) > 20
    assert "mlx_packs/serving/page.html" in names

    sources = sorted((ROOT / "kernels").glob("*/*.*"))
    assert len(sources) >= 9 and {s.suffix for s in sources} == {".metal", ".cu", ".md"}
    for source in sources:
        assert f"mlx_packs/_kernels/{source.relative_to(ROOT / 'kernels').as_posix()}" in names

    installed = tmp_path / "installed"
    pip = [sys.executable, "-m", "pip", "install", "-q", "--no-deps", "--target"]
    subprocess.run([*pip, installed, of_sdist], check=True, capture_output=True)
    read = (  # of every kernel, in an empty folder
        "import json, mlx_packs; from mlx_packs.ops._backend import source; from "
        "mlx_packs.ops.diagnostics import OPS; print(json.dumps([mlx_packs.__file__, {op.OP + '.' "
        "+ suffix: source(op.OP, suffix) for op in OPS for suffix in ('metal', 'cu')}]))"
    )
    (tmp_path / "empty").mkdir()
    result = subprocess.run(
        [sys.executable, "-c", read],
        cwd=tmp_path / "empty",
        check=True,
        capture_output=True,
        text=True,
        env={**os.environ, "PYTHONPATH": str(installed), "PYTHONSAFEPATH": "1"},
    )
    file, texts = json.loads(result.stdout)
    assert file.startswith(str(installed))
    for name, text in texts.items():
        assert text == (ROOT / "kernels" / name.split(".")[0] / name).read_text()

    options = "--iters 1 --batch-size 1 --test-batches 1 --val-batches 0 --max-seq-length 64"
    report = train_in_process(f"{options} --matmul-path dense", tmp_path, PYTHONPATH=str(installed))
    assert (tmp_path / report["run"] / "report.html").is_file()


@pytest.mark.nightly(seconds=120)  # the run that the README shows
def test_default_run_answers_nine_of_ten_held_out_reminders(tmp_path):
    report = train_in_process("", tmp_path)
    answers = report["answers"]
    assert (answers["metric"], answers["rows"]) == ("exact", 100)
    assert answers["before"]["share"] < 0.01 and answers["after"]["share"] >= 0.9
    assert len(report["samples"]) == 3
    assert report["ppl_after"] < 0.1 * report["ppl_before"]
    assert report["pack"] == "packs/tiny" and (tmp_path / "packs/tiny/pack.json").is_file()
