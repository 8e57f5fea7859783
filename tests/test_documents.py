"""The documentation: links lead somewhere, commands exist and run, generated pages are complete."""

import dataclasses
import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import click
import pytest

import mlx_packs
from docs.reference.pages import PAGES
from mlx_packs import train_pack
from mlx_packs.cli.main import packs
from mlx_packs.cli.options import SETTINGS
from mlx_packs.cli.recipe import recipe_of
from mlx_packs.config.recipe import check_named
from mlx_packs.tasks import causal_lm
from tests.helpers import documents
from tests.helpers.documents import DOCUMENTS, GUIDES, ROOT
from tests.helpers.rows import CHATS, write_rows
from tests.helpers.runs import LORA, TRAIN
from tests.helpers.variants import nightly_except

# Models, packs and adapters that a machine without network does not have; commands that need a
# network, a Mac or a person, or measure for minutes.
ELSEWHERE = re.compile(
    r"mlx-community/|Qwen/Qwen3-|--data pairs/ --query|all-MiniLM|some-bf16-checkpoint|base-affine|base-mxfp4|tickets-mxfp4|someones-lora|llama3_8b"
    r"|--launch-agent|--fim-rate"
    r"|packs/(pairs|charts|short)\b|--hosts|--model ollama:|--model (M|BASE)\b|\b(me|owner)/|^from openai |^import tinker\b|^report packs/three$|^(bench|chat|doctor|eval-tasks|init|learn|pull|push|serve|studio)\b"
)
SUBSTITUTED = "mlx-community/Qwen3-4B-Instruct-2507-4bit"  # by the bundled model
# Its commands need a real model; tests/test_tutorial.py runs them.
TUTORIAL = "docs/tutorial.md"
# Pages that name files of the repository.
OF_MAINTAINERS = ("decisions", "kernels", "performance", "systems")
# The slow suite runs the commands of these pages; the commands of other pages are nightly.
OFTEN = (
    "README.md",
    *(f"docs/{name}.md" for name in ("data", "evaluate", "index", "merge", "runs")),
)
# What makes a command short, unless it says otherwise.
QUICK = {
    "train": {
        "--iters": "2",
        "--batch-size": "2",
        "--max-seq-length": "64",
        "--matmul-path": "dense",
        "--val-batches": "1",
        "--test-batches": "1",
        "--metric": "none",
    },
    "eval-batch": {"--batch-size": "1,2", "--max-tokens": "8", "--rounds": "1"},
    "combine": {"--rows": "4"},
    "merge": {"--rows": "4"},
}


def commands(document: str) -> list[list[str]]:
    blocks = documents.read(document).blocks("bash")
    return [args for _, block in blocks for args in documents.commands(block)]


def test_relative_links_lead_to_a_file_and_a_heading():
    text = "[a](merge.md#written-formats) [b](merge.md#nothing) ![c](../x.svg) [d](https://x.y)"
    example = documents.broken_links(documents.parse("docs/x.md", text))
    assert example == ["merge.md#nothing", "../x.svg"]

    broken = {page: documents.broken_links(documents.read(page)) for page in DOCUMENTS}
    assert not {page: links for page, links in broken.items() if links}


def test_commands_and_their_flags_exist():
    root = click.Context(packs, **packs.context_settings)
    for document in GUIDES:
        for name, *args in commands(document):
            command = packs.get_command(root, name)
            assert command, (document, name)
            with command.make_context(f"packs {name}", args, root) as context:
                if name == "train" and not context.params["configs"]:
                    given = {k: v for k, v in context.params.items() if k in SETTINGS}
                    flags = {k: v for k, v in given.items() if v is not None}
                    check_named(recipe_of(flags))  # checks values, too


def test_files_that_a_document_names_exist():
    missing = []
    for page in ("runbook.md", *(f"docs/{name}.md" for name in OF_MAINTAINERS)):
        text = (ROOT / page).read_text(encoding="utf-8")
        for path in re.findall(r"(?<![\w./])(\.?(?:[\w-]+/)+[\w-]+\.py)\b", text):
            if not (ROOT / path).exists() and not (ROOT / "mlx_packs" / path).exists():
                missing.append((page, path))
    assert not missing


def test_own_variables_of_the_environment_are_documented():
    text = (ROOT / "docs" / "environment.md").read_text("utf-8")
    sources = [path.read_text("utf-8") for path in (ROOT / "mlx_packs").rglob("*.py")]
    read = {name for source in sources for name in re.findall(r'= "(MLX_PACKS_[A-Z]+)"', source)}
    assert len(read) > 2
    assert not {name for name in read if f"`{name}`" not in text}


def test_python_page_has_every_public_name():
    text = (ROOT / "docs" / "python.md").read_text("utf-8")
    names = re.findall(r"\[`(\w+)`\]\(reference/python\.md#(\w+)\)(?: ·|$)", text, re.M)
    assert sorted(name for name, _ in names) == sorted(mlx_packs.__all__)
    assert not [name for name, anchor in names if anchor != name.lower()]


def test_the_reference_is_the_text_of_the_program():
    for name, generate in PAGES.items():
        stored = (ROOT / "docs" / "reference" / name).read_text("utf-8")
        assert stored.split("\n", 1)[1].strip() == generate().strip(), (
            "run python docs/reference/pages.py"
        )


def test_every_page_is_in_the_nav():
    nav = (ROOT / "mkdocs.yml").read_text("utf-8").split("\nnav:\n")[1]
    names = re.findall(r'(?m)^ *- (?:"[^"]+"|[^:\n]+): (\S+\.md)$', nav)
    listed = [f"docs/{name}" if (ROOT / "docs" / name).is_file() else name for name in names]
    pages = {page for page in DOCUMENTS if page.startswith("docs/")}
    assert len(listed) == len(set(listed)) and pages <= set(listed)
    assert not [page for page in listed if not (ROOT / page).is_file()]


def test_diagrams_are_those_of_their_script(tmp_path):
    images = ROOT / "docs" / "images"
    shutil.copy(images / "diagrams.py", tmp_path)
    subprocess.run([sys.executable, tmp_path / "diagrams.py"], check=True)
    for name in ("pack.svg", "run.svg", "batches.svg", "tasks.svg"):
        assert (tmp_path / name).read_text("utf-8") == (images / name).read_text("utf-8")


def test_pictures_are_listed_and_small():
    images = ROOT / "docs" / "images"
    sizes = {p.name: p.stat().st_size for p in images.iterdir() if p.suffix in (".svg", ".png")}
    listed = re.findall(r"`([\w-]+\.(?:svg|png))`", (images / "README.md").read_text("utf-8"))
    assert sorted(listed) == sorted(sizes)
    assert max(sizes.values()) < 150_000 and sum(sizes.values()) < 2_000_000


def test_pictures_of_pages_exist():
    missing = []
    for page in DOCUMENTS:
        text = (ROOT / page).read_text("utf-8")
        for path in re.findall(r'<(?:img|source) [^>]*?(?:src|srcset)="([^":]+)"', text):
            if not (ROOT / page).parent.joinpath(path).exists():
                missing.append((page, path))
    assert not missing


def few_batches(text: str) -> str:
    """A recipe in YAML, or Python, with two batches for each phase, or two trials of a sweep."""
    text = text.replace("batch_sizes=", "max_tokens=8, rounds=1, batch_sizes=")
    return re.sub(r'\b(iters|trials)("?): \d+', r"\1\2: 2", text)


@pytest.fixture(scope="module")
def material(tmp_path_factory) -> Path:
    """A folder with what commands name: data, and three small packs with their runs."""
    folder = tmp_path_factory.mktemp("material")
    for name in ("tickets", "data"):
        write_rows(folder / name, train=CHATS * 5, valid=CHATS[:2], test=CHATS[2:])
    write_rows(folder / "code", train=[{"text": "def f(x):\n    return x + 1\n" * 9}] * 8)
    write_rows(folder / "shards", **{f"part-{n}": CHATS for n in range(3)})
    pair = {"prompt": "Say red.", "chosen": "red.", "rejected": "blue."}
    write_rows(folder / "prefs", train=[pair] * 20, valid=[pair] * 2, test=[pair] * 2)
    labelled = [{"text": f"the {word} car", "label": word} for word in ("red", "blue")]
    write_rows(folder / "intents", train=labelled * 10, valid=labelled, test=labelled)
    (folder / "texts.csv").write_text("text\nthe red car\na blue one\n")
    write_rows(folder / "prompts", train=[{"prompt": "Say red.", "completion": "red."}] * 20)

    (folder / "rewards.py").write_text(
        "def short(completions, **_):\n    return [-len(text) / 100 for text in completions]\n"
    )
    (folder / "qa.csv").write_text("question,answer\n" + "Where is it?,Under the mat.\n" * 30)

    shutil.copytree(ROOT / "examples", folder / "examples")
    recipe = folder / "examples" / "two_phases.yaml"
    recipe.write_text(few_batches(recipe.read_text()))

    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        for seed, name in enumerate(("tickets", "law", "letters")):
            train = dataclasses.replace(TRAIN, seed=seed)
            train_pack("tiny", "tickets", LORA, train, f"packs/{name}")
    return folder


def shortened(args: list[str]) -> list[str]:
    """The arguments of a command that is short; a run's result replaces an earlier one."""
    for flag, value in (("--iters", "2"), ("--epochs", "0.2")):
        if flag in args:
            args[args.index(flag) + 1] = value

    quick = {} if "-c" in args else dict(QUICK.get(args[0], {}))
    if "--epochs" in args:
        quick.pop("--iters", None)
    if "--task" in args:
        quick.pop("--metric", None)  # a metric needs completions
    if "--offload-base" in args:
        quick.pop("--matmul-path", None)  # it keeps no dense weights

    added = [word for flag, value in quick.items() if flag not in args for word in (flag, value)]
    if args[0] == "train":
        added.append("--overwrite")
    return [*args, *added]


def runs_here(document: str) -> bool:
    """Whether a document has commands or Python that need no other machine and no real model."""
    if document == TUTORIAL:
        return False
    texts = [shlex.join(args).replace(SUBSTITUTED, "tiny") for args in commands(document)]
    texts.append(python_of(document))
    return not all(not text or ELSEWHERE.search(text) for text in texts)


def python_of(document: str) -> str:
    """The Python of a page, with the bundled model."""
    blocks = documents.read(document).blocks("python")
    return "\n".join(text for _, text in blocks).replace(SUBSTITUTED, "tiny")


# Even short commands load a model each, and train, merge or evaluate.
@pytest.mark.parametrize("document", nightly_except(filter(runs_here, GUIDES), *OFTEN, seconds=4))
def test_commands_and_python_run_on_the_tiny_base(document, material, here, run, monkeypatch):
    monkeypatch.setattr(causal_lm, "MOST_QUESTIONS", 2)
    shutil.copytree(material, here, dirs_exist_ok=True)
    python = python_of(document)
    names: dict = {}

    for language, block in documents.read(document).blocks("bash", "yaml", "python"):
        if language == "yaml":
            (here / f"{Path(document).stem}.yaml").write_text(few_batches(block))
        elif language == "python":
            if file := re.match(r"# (\w+\.py)\n", block):
                (here / file[1]).write_text(block)
            if not ELSEWHERE.search(python):  # later blocks use names of earlier ones
                block = few_batches(block.replace(SUBSTITUTED, "tiny"))
                exec(compile(block, document, "exec"), names)
        else:
            check_commands(block, run)


def check_commands(block: str, run) -> None:
    """Run the commands of a block that can run here; a gate may fail on packs of two updates."""
    for args in documents.commands(block):
        args = ["tiny" if word == SUBSTITUTED else word for word in args]
        if not ELSEWHERE.search(shlex.join(args)):
            code, _, error = run(*shortened(args))
            assert code == 0 or (code == 1 and run.error is None), (args, error)
