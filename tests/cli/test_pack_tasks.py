"""Commands with a pack that is for something else: one line, which names the pack and what to use."""

import csv
import io
import json
import shutil
import sys
from types import SimpleNamespace
from unittest.mock import Mock

import pytest

from mlx_packs.adapters.spec import SCORE_WEIGHT
from mlx_packs.errors import PackError
from mlx_packs.packs.making import untrained_pack
from mlx_packs.packs.pack import Pack
from mlx_packs.reading import sealed
from mlx_packs.runtime import mx
from mlx_packs.serving.registry import PackRegistry
from tests.helpers.errors import check, raises
from tests.helpers.packs import random_pack
from tests.helpers.rows import write_rows

LABELS = {"problem_type": "single_label_classification", "labels": ["a", "b"], "temperature": 1.0}
# Of each kind of pack: the rows of its head, other parts of its manifest.
KINDS = {
    "lm": (0, {"objective": {"task": "lm"}}),
    "embedding": (0, {"objective": {"task": "embedding"}}),
    "rerank": (1, {"objective": {"task": "rerank", "head": "score"}}),
    "rerank-lm": (0, {"objective": {"task": "rerank", "head": "lm"}}),
    "classify": (2, {"classifier": {**LABELS, "head": "score", "input": "text"}}),
    "reward": (1, {}),
}
TEXTLESS = ("embedding", "rerank", "classify", "reward")
USES = {
    "embedding": ("an embedder", "/v1/embeddings"),
    "rerank": ("a reranker", "/v1/rerank"),
    "classify": ("a classifier", "packs classify"),
    "reward": ("a reward model", "base.rewards()"),
    "lm": ("a pack that generates text", "packs generate"),
}


@pytest.fixture(scope="module")
def packs(shared_tiny, tmp_path_factory) -> dict[str, Pack]:
    """A pack of each kind for the bundled base."""
    folder = tmp_path_factory.mktemp("packs")
    plain = random_pack(shared_tiny, rank=1, targets=("q_proj",))

    saved = {}
    for kind, (rows, facts) in KINDS.items():
        head = {}
        if rows:
            head = {SCORE_WEIGHT: mx.ones((rows, shared_tiny.config["hidden_size"]))}
        pack = untrained_pack(shared_tiny, plain.specs, plain.tensors, head, **facts)
        saved[kind] = pack.save(folder / kind)
    return saved


@pytest.mark.parametrize("kind", TEXTLESS)
def test_commands_that_generate_reject_packs_without_text(packs, tmp_path, run, kind):
    write_rows(tmp_path, d=[{"text": "a b c"}] * 4)
    pack = packs[kind].path
    commands = {
        "generate": ["--pack", pack, "--prompt", "a"],
        "chat": ["--pack", pack],
        "eval-batch": [pack, "--data", tmp_path / "d.jsonl"],
        "eval-tasks": [pack, "--tasks", "x"],
        "serve": ["--pack", pack, "--task", "lm", "--port", "0"],
    }
    if kind == "classify":  # which answers /v1/classify
        del commands["serve"]

    for command, arguments in commands.items():
        code, out, err = run(command, *arguments)
        assert (code, len(err.splitlines()[-1:])) == (2, 1), (command, out, err)
        check(run.error, "unsupported", None, str(pack), *USES[kind])


@pytest.mark.parametrize("kind", [kind for kind in KINDS if kind != "classify"])
def test_classify_rejects_packs_of_other_tasks(packs, run, monkeypatch, kind):
    stdin = SimpleNamespace(buffer=io.BytesIO(b'"a"\n'), isatty=lambda: False)
    monkeypatch.setattr(sys, "stdin", stdin)
    assert run("classify", "--pack", packs[kind].path)[0] == 2
    described, instead = USES[kind.removesuffix("-lm")]
    check(run.error, "unsupported", None, "not a classifier", described, instead)


SERVED = {  # what a server of a task takes, besides packs of text
    "lm": ("rerank-lm", "classify"),
    "embedding": ("embedding",),
    "rerank": ("rerank", "rerank-lm"),
}


@pytest.mark.parametrize("task", SERVED)
def test_servers_take_packs_that_a_request_can_use(packs, task, monkeypatch):
    registry = PackRegistry(Mock(), task)
    monkeypatch.setattr(registry, "_load", Mock())
    taken = []
    for kind, pack in packs.items():
        try:
            registry.add(kind, pack)
            taken.append(kind)
        except PackError as error:
            check(error, "unsupported", None, *USES[kind.removesuffix("-lm")])
    assert taken == [kind for kind in KINDS if kind == "lm" or kind in SERVED[task]]


def test_python_rejects_them_too(packs, shared_tiny):
    for kind in TEXTLESS:
        with raises("unsupported", None, *USES[kind]):
            shared_tiny.generate("a", packs[kind])
        with raises("unsupported", None, *USES[kind]):
            shared_tiny.generate_batch(["a"], packs[kind])
    for kind in ("embedding", "rerank"):
        with shared_tiny.applied(packs[kind]), raises("unsupported", None, *USES[kind]):
            shared_tiny.generate("a")
    with shared_tiny.applied(packs["embedding"]), raises("unsupported", None, "not a reranker"):
        shared_tiny.rerank("a", ["b"])
    with raises("unsupported", None, "not a reward model", *USES["rerank"]):
        shared_tiny.rewards([{"prompt": "a", "completion": "b"}], packs["rerank"])
    with raises("unsupported", None, "reward model"):
        shared_tiny.attach(packs["reward"])


def test_a_classifier_by_the_names_of_labels_is_to_be_trained_again(packs, tmp_path, run):
    folder = tmp_path / "old"
    shutil.copytree(packs["classify"].path, folder)
    manifest = packs["classify"].manifest
    old = {**manifest, "classifier": {**manifest["classifier"], "head": "lm"}}
    (folder / "pack.json").write_text(json.dumps(sealed(old)))
    assert run("inspect", folder)[0] == 2
    check(run.error, "unreadable", None, "classifier.head")


def test_a_reranker_with_the_lm_head_still_generates(packs, run):
    arguments = ["--pack", packs["rerank-lm"].path, "--prompt", "a", "--max-tokens", "1"]
    assert run("generate", *arguments)[0] == 0


def test_chat_keeps_its_pack_when_another_one_is_rejected(packs, run, monkeypatch):
    lines = io.StringIO(f"/pack {packs['embedding'].path}\na\n")
    monkeypatch.setattr(sys, "stdin", lines)
    code, out, err = run("chat", "--pack", packs["lm"].path, "--max-tokens", "1")
    assert code == 0 and "an embedder" in err and "(/" not in out


def test_what_other_commands_say_of_each_kind(packs, run, tmp_path):
    for kind, pack in packs.items():
        code, _, _ = run("export", pack.path, "--to", "mlx-lm", "--out", tmp_path / f"out-{kind}")
        assert code == (2 if kind in ("rerank", "classify", "reward") else 0), kind
    for kind in ("rerank", "classify", "reward"):
        for command in (
            ["combine", f"{packs['lm'].path}=1", f"{packs[kind].path}=1", "--out", tmp_path / "c"],
            ["merge", packs[kind].path, "--out", tmp_path / "merged", "--rows", "2"],
        ):
            assert run(*command)[0] == 2 and run.error.code == "unsupported", command


def test_classify_reads_and_writes_tables(packs, run, tmp_path):
    data, out = tmp_path / "in.csv", tmp_path / "out.csv"
    data.write_text('id,text,label\n1,"hello, you",gold\n2,"a ""b""",gold\n')
    code, text, err = run("classify", packs["classify"].path, "--data", data, "--out", out)
    assert code == 0 and "2 rows" in text, err

    with out.open(newline="") as file:
        rows = list(csv.DictReader(file))
    assert [(row["id"], row["text"], row["label"]) for row in rows] == [
        ("1", "hello, you", "gold"),
        ("2", 'a "b"', "gold"),
    ]
    assert all(row["predicted_label"] in LABELS["labels"] for row in rows)
    assert all(0 < float(row["probability"]) <= 1 for row in rows)

    lines = tmp_path / "lines.txt"
    lines.write_text('hello, you\n\n"a \\"b\\""\n12345\nnull\n')
    classify = ("classify", "--pack", packs["classify"].path, "--data", lines)
    code, text, _ = run(*classify)
    labels = [json.loads(line)["label"] for line in text.splitlines()]
    assert code == 0 and labels[:2] == [row["predicted_label"] for row in rows]
    assert len(labels) == 4

    lines.write_text('{"text": \n')
    assert run(*classify)[0] == 2
    check(run.error, "unreadable", None, "lines.txt:1")


def test_classify_writes_nothing_if_a_row_or_a_file_is_wrong(packs, run, tmp_path):
    data, pack = tmp_path / "in.csv", packs["classify"].path
    data.write_text("id,words\n1,a\n")
    for out, code, flag in (
        ("out.csv", "data", None),
        ("out.txt", "unsupported", "out"),
        ("in.csv", "conflict", "out"),
        ("none/out.csv", "unwritable", "out"),
    ):
        assert run("classify", pack, "--data", data, "--out", tmp_path / out)[0] == 2
        check(run.error, code, flag, "in.csv:2" if flag is None else out)
    assert [file.name for file in tmp_path.iterdir()] == ["in.csv"]
