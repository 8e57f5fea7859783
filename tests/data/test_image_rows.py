"""Rows with images: every form of them, their places in texts, rows that are wrong or copied."""

import csv
import io
import json
from pathlib import Path

import pytest

from mlx_packs.bases.turns import IMAGE_MARK, image_sources
from mlx_packs.config.schema import DataConfig
from mlx_packs.data.chat_formats import completion_row
from mlx_packs.data.encoding import EncodingOptions, encode
from mlx_packs.data.formats import COMPLETION, TOKEN_FORMATS, Row, format_of
from mlx_packs.data.images import stored_text
from mlx_packs.data.in_memory import source_of
from mlx_packs.data.messages import turns_of
from mlx_packs.data.overview import write_splits
from mlx_packs.data.preferences import both_completions, encode_preferences
from mlx_packs.data.prompts import encode_prompts
from mlx_packs.data.rows import Splits, read_rows
from mlx_packs.data.sources import as_rows
from mlx_packs.vision.pictures import ImageSource, open_picture
from tests.helpers.errors import raises
from tests.helpers.rows import chat

COLUMNS, SKIP = DataConfig(), DataConfig(on_bad_row="skip")
ANSWER = {"role": "assistant", "content": "A cat."}
M = IMAGE_MARK


def parts(*parts) -> dict:
    """A message of the user; a text stands for a part of it."""
    return {
        "role": "user",
        "content": [{"type": "text", "text": p} if isinstance(p, str) else p for p in parts],
    }


def place(**image) -> dict:
    return {"type": "image", **image}


def url(path: str) -> dict:
    return {"type": "image_url", "image_url": {"url": path}}


def asked(*messages, **columns) -> dict:
    return {"messages": [*messages, ANSWER], **columns}


def user(text: str) -> dict:
    return {"role": "user", "content": text}


def read(row: dict, folder: Path | None = None) -> list[dict]:
    """The messages of a row of a conversation."""
    row = Row("f:1", row, folder)
    return format_of(row, COLUMNS, TOKEN_FORMATS).read(row, COLUMNS).messages


def shown(messages: list[dict]) -> tuple[list[str], list]:
    """The text of each message, and all images."""
    for message in messages:
        images = message.get("images", [])
        assert message["content"].count(M) == len(images)
    return [message["content"] for message in messages], [s.value for s in image_sources(messages)]


HUB = {"bytes": b"...", "path": None}
ONE = [
    asked(parts(place(path="a.png"), "What?")),
    asked(user("What?"), image="a.png"),
    asked(user("What?"), images=["a.png"], image=float("nan")),
    asked(user("<image>What?"), image=["a.png"], images=[]),
    {"prompt": [user("<image>What?")], "completion": [ANSWER], "images": ["a.png"]},
    {"prompt": [parts(url("a.png"), "What?")], "completion": [parts(url("a.png"), "What?"), ANSWER]},
    {"instruction": "<image>What?", "input": "", "output": "A cat.", "image": "a.png"},
]  # fmt: skip


@pytest.mark.parametrize("row", ONE)
def test_every_form_of_a_row_with_an_image(row):
    before = json.dumps(row)
    assert shown(read(row)) == ([f"{M}What?", "A cat."], ["a.png"])
    assert json.dumps(row) == before


def test_every_form_of_the_documentation_is_read():
    page = (Path(__file__).parents[2] / "docs" / "images.md").read_text(encoding="utf-8")
    block = page.partition("## Rows with images")[2].partition("```json\n")[2].partition("```")[0]
    rows = [json.loads(line) for line in block.splitlines()]
    assert len(rows) == 10
    for value in rows:
        row = Row("f:1", value)
        if "chosen" in value:
            row = both_completions([row], COLUMNS)[0]
        elif value.keys() == {"prompt", "image"}:
            row = completion_row(row, COLUMNS, value["prompt"])
        texts, images = shown(read(row.value))
        assert (texts[0], images) == (f"{M}Which animal?", ["cats/1.png"])


@pytest.mark.parametrize("value", [HUB, b"...", "data:image/png;base64,AAAA", {"path": "a.png"}])
def test_an_image_of_a_column_may_be_anything_that_is_opened(value):
    for columns in ({"image": value}, {"image": [value]}, {"images": value}, {"images": [value]}):
        assert shown(read(asked(user("What?"), **columns)))[1] == [value]
    assert shown(read(asked(parts(place(image=value), "What?"))))[1] == [value]


def test_images_take_the_places_in_their_order_or_come_first():
    images = ["a.png", "b.png", "c.png"]
    row = asked(user("<image> or <image>?"), ANSWER, parts("And ", place(), "?"), images=images)
    texts = [f"{M} or {M}?", "A cat.", f"And {M}?", "A cat."]
    assert shown(read(row)) == (texts, images)
    row["messages"][2] = parts("And ", url("own.png"), "<image>?")
    assert shown(read(row))[1] == ["a.png", "b.png", "own.png", "c.png"]

    system = {"role": "system", "content": "Be short."}  # without places: before the first question
    row = asked(system, user("What?"), ANSWER, user("And?"), images=["a.png", "b.png"])
    texts = ["Be short.", f"{M}{M}What?", "A cat.", "And?", "A cat."]
    assert shown(read(row)) == (texts, ["a.png", "b.png"])
    row = asked({**parts(url("a.png")), "role": "system"}, user("What?"))
    assert shown(read(row))[1] == ["a.png"]


def test_rows_without_images_stay_as_they_are():
    for text in ("Use <image> in XML.", f"A {M} b", "What?"):
        (question, answer) = read(asked(user(text), image=None, images=[]))
        assert question == user(text) and answer == ANSWER
    assert read(asked(parts("What", "?"))) == [user("What?"), ANSWER]
    assert read(asked({**user("What?"), "images": []})) == [user("What?"), ANSWER]
    row = asked(user("What?"), image="a.png")
    row["messages"][-1] = {"role": "assistant", "content": "Write <img>."}
    assert shown(read(row))[0] == [f"{M}What?", "Write <img>."]


BAD = {
    "more places than images": asked(user("<image> or <image>?"), image="a.png"),
    "fewer places than images": asked(user("<image>?"), images=["a.png", "b.png"]),
    "a place without any image": asked(parts(place(), "What?")),
    "a marker beside other images": asked(parts(url("a.png"), "<image>?")),
    "a column beside other images": asked(parts(url("a.png"), "What?"), image="b.png"),
    "an image in an answer": {"messages": [user("What?"), {**parts(url("a.png")), "role": "assistant"}]},
    "images of a message": asked({**user("What?"), "images": ["a.png"]}),
    "no message for it": {"messages": [ANSWER], "image": "a.png"},
    "both columns": asked(user("What?"), image="a.png", images=["b.png"]),
    "a null among images": asked(user("What?"), images=["a.png", None]),
    "a mark in a text": asked(user(f"A {M}?"), image="a.png"),
    "a mark in a part": asked(parts(f"A {M}?", url("a.png"))),
    "two images in a part": asked(parts(place(image="a.png", url="b.png"))),
    "a part without a URL": asked(parts({"type": "image_url", "image_url": {}})),
    "a part of another type": asked(parts({"type": "input_audio", "input_audio": {}})),
    "a file of OpenAI": asked(parts({"type": "input_image", "file_id": "file-1"})),
}  # fmt: skip


@pytest.mark.parametrize("name", BAD)
def test_a_wrong_row_is_one_line_with_its_place(tmp_path, tokenizer, name):
    file = tmp_path / "train.jsonl"
    rows = [chat("Say hi.", "Hi."), BAD[name], chat("Say yes.", "Yes.")]
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    with raises("data", None, f"{file}:2: ") as caught:
        encode(read_rows(file), tokenizer, COLUMNS)
    assert "\n" not in caught.value.message and caught.value.reason in ("image", "wrong type")
    if "places than images" in name:
        assert ": 1, places" in caught.value.message or ": 2, places" in caught.value.message

    examples = encode(read_rows(file), tokenizer, SKIP)
    assert [i for i, _ in examples.bad.errors] == [1] and len(examples) == 2


def test_a_base_without_a_vision_tower_rejects_images(tokenizer):
    column = {"prompt": "What?", "completion": "A cat.", "image": "a.png"}
    part = asked({"role": "user", "content": [{"type": "image", "image": "a.png"}]})
    for row in (column, part):
        with raises("unsupported", "model", "the base takes no images", "remove their column"):
            encode([Row("f:1", row)], tokenizer, DataConfig())


def test_both_completions_of_a_preference_have_the_images_of_its_prompt():
    forms = [
        {"prompt": [parts(url("a.png"), "What?")], "chosen": "A cat.", "rejected": "A dog."},
        {side: [user("<image>What?"), {"role": "assistant", "content": text}] for side, text in [("chosen", "A cat."), ("rejected", "A dog.")]} | {"image": "a.png"},
    ]  # fmt: skip
    for form in forms:
        sides = both_completions([Row("f:1", form, Path("/d"))], COLUMNS)
        for side, answer in zip(sides, ("A cat.", "A dog."), strict=True):
            messages = COMPLETION.read(side, COLUMNS).messages
            assert shown(messages) == ([f"{M}What?", answer], ["a.png"])
            assert image_sources(messages)[0].folder == Path("/d")


def test_preferences_and_prompts_name_the_row(tokenizer):
    bad = [
        Row("f:7", {"prompt": "<image><image>?", "chosen": "A.", "rejected": "B.", "image": "a"})
    ]
    for encoded in (
        lambda: encode_preferences(bad, tokenizer, COLUMNS, EncodingOptions()),
        lambda: encode_prompts(bad, tokenizer, COLUMNS, 100),
    ):
        with raises("data", None, "f:7: ") as caught:
            encoded()
        assert caught.value.reason == "image"


@pytest.mark.interop
def test_paths_are_relative_to_the_file_of_the_row(tmp_path):
    import pyarrow as arrow
    import pyarrow.parquet as parquet

    row = {"prompt": "What?", "completion": "A cat.", "image": "a.png"}
    files = {name: tmp_path / f"rows.{name}" for name in ("jsonl", "json", "csv", "parquet")}
    files["jsonl"].write_text(json.dumps(row))
    files["json"].write_text(json.dumps([row]))
    with files["csv"].open("w", newline="") as file:
        csv.writer(file).writerows([row, row.values()])
    parquet.write_table(arrow.Table.from_pylist([row]), files["parquet"])

    for file in files.values():
        (line,) = read_rows(file)
        assert line.folder == tmp_path and line.with_value({}).folder == tmp_path
        assert COMPLETION.read(line, COLUMNS).images == [ImageSource("a.png", tmp_path)]

    (line,) = source_of([row]).splits["train"]
    assert line.folder is None and turns_of([parts(url("a.png"))])[0].message["images"] == [
        ImageSource("a.png")
    ]


@pytest.mark.interop
def test_rows_of_a_table_are_padded_with_nulls(tmp_path):
    import pyarrow as arrow
    import pyarrow.parquet as parquet

    answer = {**ANSWER, "content": [{"type": "text", "text": "A cat."}]}
    seen = [parts(place(text=None), {"type": "text", "text": "What?"}), answer]
    text = [parts("Hi?"), answer]
    rows = [{"messages": seen, "images": [HUB]}, {"messages": text, "images": None}]
    parquet.write_table(arrow.Table.from_pylist(rows), tmp_path / "train.parquet")
    first, second = read_rows(tmp_path / "train.parquet")
    assert shown(read(first.value)) == ([f"{M}What?", "A cat."], [HUB])
    assert read(second.value) == [user("Hi?"), ANSWER]


def drawn(mode: str = "RGB"):
    return pytest.importorskip("PIL.Image").new("RGB", (6, 4), "red").convert(mode)


def png() -> bytes:
    file = io.BytesIO()
    drawn().save(file, "PNG")
    return file.getvalue()


def test_images_of_a_stream_are_read_from_its_copy():
    images = [drawn(), {"bytes": png(), "path": "a.png"}, drawn("CMYK")]
    copies = [json.loads(json.dumps(image, default=stored_text)) for image in images]
    sources = [image_sources(read(asked(user("What?"), image=image)))[0] for image in copies]
    assert all(open_picture(source).image.width == 6 for source in sources[:2])
    with pytest.raises(ValueError, match="CMYK"):
        open_picture(sources[2])


@pytest.mark.parametrize("row", [ONE[3], ONE[0]], ids=["column", "part"])
def test_rows_with_images_are_not_written_elsewhere(row, tmp_path):
    splits = {"train": as_rows([Row("f:1", row)]), "valid": as_rows([])}
    splits |= {"test": as_rows([Row("f:9", chat("Say hi.", "Hi."))])}
    own = Splits(splits, "f", format_of(Row("f:1", row), COLUMNS))
    with raises("unsupported", "out", "--out", "f:1"):
        write_splits(own, COLUMNS, tmp_path / "out", False)
    assert not (tmp_path / "out").exists()


def test_the_fingerprint_of_rows_with_pil_images_is_of_their_pixels():
    rows = [[asked(user("What?"), image=image)] for image in (drawn(), drawn(), drawn("L"))]
    hashes = [source_of(each).splits["train"].fingerprint() for each in rows]
    assert hashes[0] == hashes[1] != hashes[2]
    broken = pytest.importorskip("PIL.Image").open(io.BytesIO(png()[:60]))
    assert source_of([{"image": broken}]).splits["train"].fingerprint()


def test_system_and_tool_messages_may_have_images():
    row = asked({**parts(url("a.png")), "role": "system"}, user("What?"))
    assert shown(read(row))[1] == ["a.png"]
    calls = [{"type": "function", "function": {"name": "look", "arguments": {}}}]
    call = {"role": "assistant", "content": "", "tool_calls": calls}
    row = asked(user("What?"), call, {**parts("Seen: ", url("a.png")), "role": "tool"})
    assert shown(read(row)) == (["What?", "", f"Seen: {M}", "A cat."], ["a.png"])
