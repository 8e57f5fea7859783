"""Commands on rows with images: what they show, count and compute."""

import json
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import pytest

from mlx_packs import evaluate, evaluate_batch, train_pack
from mlx_packs.bases.families import VISION_FAMILIES
from mlx_packs.bases.tokenizer import readable_text
from mlx_packs.config.schema import DataConfig, LoRAConfig, TrainConfig
from mlx_packs.data.encoding import EncodingOptions, encode
from mlx_packs.data.preferences import encode_preferences
from mlx_packs.data.rows import Row, load_rows
from mlx_packs.memory.row_shapes import row_shapes
from mlx_packs.packs.base import load_base
from mlx_packs.tasks.task import try_lines
from mlx_packs.vision.tokenizer import tokenizer_of
from tests.helpers.errors import raises
from tests.helpers.rows import CHATS, chat, write_rows
from tests.helpers.runs import Lines
from tests.vision.inputs import picture, write_image_rows

pytestmark = pytest.mark.interop

FAMILIES = ["qwen3_vl", "smolvlm"]
LABEL = "[image of "


@pytest.mark.parametrize("family", FAMILIES)
def test_a_tokenizer_counts_images_without_the_model(family, folder_of, here):
    write_image_rows(here / "d", train=3, valid=1)
    splits = load_rows(DataConfig(data=str(here / "d")))
    rows, columns = splits.rows["train"], DataConfig()
    base = load_base(folder_of(family))
    tokenizer, _ = tokenizer_of(str(folder_of(family)), False)

    computed = encode(rows, base.tokenizer, columns)
    counted = encode(rows, tokenizer, columns)
    assert counted.lengths.tolist() == computed.lengths.tolist()
    assert counted.targets == computed.targets
    assert tokenizer._images.computed == 0
    shown = readable_text(tokenizer, counted[0].tokens)
    assert shown == readable_text(base.tokenizer, computed[0].tokens)
    assert LABEL in shown

    train = TrainConfig(max_seq_length=4096)
    shapes = row_shapes(str(folder_of(family)), DataConfig(data="d"), train, LoRAConfig())
    assert shapes.longest == computed.lengths.max()


@pytest.mark.parametrize("family", FAMILIES)
def test_show_mask_and_data_name_images(family, folder_of, here, run):
    write_image_rows(here / "d", images=2, train=3, valid=1)
    options = ("--model", folder_of(family), "--data", "d", "--show-mask", "--json")
    shown = json.loads(run("train", *options)[1])["examples"]
    assert len(shown) == 3
    assert shown[0]["spans"][0]["text"].count(LABEL) == 2

    _, out, _ = run("data", "d", "--model", folder_of(family))
    assert out.count(LABEL) == 4  # of two samples
    assert not (here / "cache" / "images").exists()


def trained(base, data, out, progress=False, **changes):
    """A run of one step."""
    train = {"iters": 1, "matmul_path": "dense", **changes}
    return train_pack(base, data, {"rank": 2}, train, out, progress=progress)


def encoded(tokenizer, rows: list, limit: int, **columns):
    rows = [Row(f"f:{i}", row, Path("d")) for i, row in enumerate(rows)]
    return encode(rows, tokenizer, DataConfig(**columns), EncodingOptions(max_seq_length=limit))


def test_no_image_of_a_long_row_is_cut(folder_of, here):
    folder = write_image_rows(here / "d", images=2, train=1, valid=0)
    row = json.loads((folder / "train.jsonl").read_text())
    first = {
        "messages": [*chat("One <image>", "A")["messages"], *chat("Two <image>", "B")["messages"]]
    }
    short = {"image": row["images"][0], **chat("What?", "B")}
    rows = [{**first, "images": row["images"]}, chat("None", "A" * 100), short]
    tokenizer, _ = tokenizer_of(str(folder_of("qwen3_vl")), False)
    whole = encoded(tokenizer, rows, 4096)
    last = int(np.flatnonzero(whole[0].tokens < 0)[-1]) + 1  # the length up to the last image

    cut = encoded(tokenizer, [rows[0]], last)
    assert (cut.lengths.tolist(), cut.cut) == ([last], 1)
    for limit in (last - 1, last - 20):
        with raises("data", "max_seq_length", "f:0", "2 images", "--max-pixels") as caught:
            encoded(tokenizer, rows, limit)
        assert caught.value.reason == "images beyond --max-seq-length"

    examples = encoded(tokenizer, rows, last - 1, on_bad_row="skip")
    assert [i for i, _ in examples.bad.errors] == [0]
    assert [example.where for example in examples] == ["f:1", "f:2"]
    with raises("data", "max_seq_length", "no example fits", "f:0") as caught:
        encoded(tokenizer, rows[:1], last - 1, on_bad_row="skip")
    assert "--on-" not in caught.value.message


@pytest.mark.parametrize("family", VISION_FAMILIES)
def test_a_long_row_names_max_pixels_if_that_makes_it_shorter(family, folder_of, here):
    picture(0, 224, 224).save(here / "a.png")
    row = {"image": str(here / "a.png"), "prompt": "What?", "completion": "A"}
    tokenizer, _ = tokenizer_of(str(folder_of(family)), False)

    limits = (0, 56 * 56)
    large, small = (encoded(tokenizer, [row], 4096, max_pixels=n).lengths[0] for n in limits)
    with raises("data", "max_seq_length", "Raise --max-seq-length", "--on-bad-row") as caught:
        encoded(tokenizer, [row], 8, max_pixels=0)
    assert ("--max-pixels" in caught.value.message) == (small < large)


def test_both_completions_of_a_long_prompt_are_left_out(folder_of, here):
    folder = write_image_rows(here / "d", images=2, train=2, valid=0)
    lines = (folder / "train.jsonl").read_text().splitlines()
    images = [json.loads(line)["images"] for line in lines]
    asked = {"chosen": "Blue", "rejected": "Red, I think"}
    rows = [
        {"prompt": "What?", "images": images[0][:1], **asked},
        {"prompt": "What?" * 9 + "<image><image>", "images": images[1], **asked},
    ]
    tokenizer, _ = tokenizer_of(str(folder_of("qwen3_vl")), False)
    rows = [Row(f"f:{i}", row, folder) for i, row in enumerate(rows)]
    lengths = encode_preferences(rows, tokenizer, DataConfig(), EncodingOptions()).row_lengths

    options = EncodingOptions(max_seq_length=int(lengths[0].max()))
    with raises("data", "max_seq_length", "f:1"):
        encode_preferences(rows, tokenizer, DataConfig(), options)
    left = encode_preferences(rows, tokenizer, DataConfig(on_bad_row="skip"), options)
    assert (len(left), left.dropped, [i for i, _ in left.bad.errors]) == (2, 0, [1])


def test_data_reports_rows_whose_images_do_not_fit(folder_of, here, run):
    folder = write_image_rows(here / "d", train=5, valid=2)
    picture(100, 224, 224).save(folder / "large.png")
    large = {"image": "large.png", **chat("Which?" * 5 + "<image>", "This.")}
    with (folder / "train.jsonl").open("a") as file:
        file.write(json.dumps(large) + "\n")

    options = ("--model", folder_of("qwen3_vl"), "--max-seq-length", "80")
    code, out, _ = run("data", "d", *options, "--json")
    assert (code, json.loads(out)["splits"]["train"]["images_beyond"]) == (0, 1)
    assert "1 have images beyond 80" in run("data", "d", *options)[1]


def test_an_evaluation_shows_its_images_and_releases_the_tower(folder_of, here, run):
    write_image_rows(here / "d", valid=3)
    base = load_base(folder_of("qwen3_vl"))
    bars = Bars()
    evaluate(base, None, "d/valid.jsonl", metric="exact", progress=bars)
    assert [(bar.done, bar.total) for bar in bars.encoding] == [(3, 3)]
    assert base.tokenizer._images._tower is None

    lines = Lines()
    evaluate_batch(base, [], "d/valid.jsonl", batch_sizes=[1], max_tokens=2, progress=lines)
    assert "images 3, 16 tokens each on average: 3 from earlier runs" in lines.lines
    assert base.tokenizer._images._tower is None

    write_rows(here / "text", train=CHATS, valid=CHATS[:1])
    trained(base, "text", "o")
    code, out, err = run("eval", "o", "--model", folder_of("qwen3_vl"), "--data", "d/valid.jsonl")
    assert code == 0, err
    assert "images  3, 16 tokens each on average: 3 from earlier runs" in err


def test_a_pack_and_its_base_say_that_they_take_images(folder_of, here, run):
    write_image_rows(here / "d", train=3, valid=2)
    write_rows(here / "text", train=CHATS, valid=CHATS[:1])
    base = load_base(folder_of("qwen3_vl"))
    takes = "images  the base takes images: --image FILE of packs generate and packs chat\n"
    for data, counted in (("d", True), ("text", False)):
        assert ("images" in trained(base, data, f"p-{data}").report) == counted
        out = run("inspect", f"p-{data}")[1]
        assert takes in out and (" examples with 5 images · " in out) == counted
        card = (here / f"p-{data}" / "README.md").read_text()
        assert (" --image FILE " in card) == counted

    assert takes in run("inspect", folder_of("qwen3_vl"))[1]
    assert takes not in run("inspect", "tiny")[1]


def test_the_command_to_try_has_an_image():
    report = {"pack": "packs/p", "pack_mb": 1.0, "images": {"count": 7}}
    assert try_lines(report, "Which?")[1:] == [
        "packs generate packs/p --image FILE --prompt 'Which?'",
        "packs chat packs/p",
    ]


@pytest.mark.parametrize("task", ["lm", "dpo"])
def test_the_bar_counts_examples(task, folder_of, here):
    rows = {"train": 4, "valid": 2}
    if task == "dpo":
        sides = {"chosen": "Red, I think.", "rejected": "No."}
        rows["row"] = lambda number: {"prompt": f"What is {number}?", **sides}
    write_image_rows(here / "d", **rows)

    bars = Bars()
    few = {"batch_size": 2, "max_seq_length": 128}
    trained(folder_of("qwen3_vl"), "d", "o", bars, task=task, **few)
    steps = 12 if task == "dpo" else 6
    assert [(bar.done, bar.total) for bar in bars.encoding] == [(steps, steps)]


def test_no_classifier_reads_images(folder_of, here):
    def row(number):
        return {**chat("Which color is it?"), "label": number % 2}

    write_image_rows(here / "d", row=row, train=4, valid=2)
    with raises("unsupported", "task", "train.jsonl:1"):
        trained(folder_of("qwen3_vl"), "d", "o", task="classify")


class Bars(Lines):
    """Keeps the bars of encoding."""

    def __init__(self) -> None:
        super().__init__()
        self.encoding = []

    @contextmanager
    def task(self, label, *args, **named):
        with super().task(label, *args, **named) as bar:
            if label == "data":
                self.encoding.append(bar)
            yield bar
