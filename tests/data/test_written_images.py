"""Rows with images that are copied, hashed or shown."""

import io
import json
from pathlib import Path

import pytest

from mlx_packs.config.schema import DataConfig
from mlx_packs.data.formats import TOKEN_FORMATS, format_of
from mlx_packs.data.images import stored_text
from mlx_packs.data.in_memory import source_of
from mlx_packs.data.overview import write_splits
from mlx_packs.data.row_format import Row
from mlx_packs.data.rows import Splits
from mlx_packs.data.sources import as_rows
from mlx_packs.vision.pictures import ImageSource, open_picture
from tests.helpers.errors import raises
from tests.helpers.rows import chat

COLUMNS = DataConfig()
TEXT = {"type": "text", "text": "What?"}


def asked(content, **columns) -> dict:
    answer = {"role": "assistant", "content": "A cat."}
    return {"messages": [{"role": "user", "content": content}, answer], **columns}


def sources_of(row: Row) -> list[ImageSource]:
    return format_of(row, COLUMNS, TOKEN_FORMATS).read(row, COLUMNS).images


def drawn(mode: str = "RGB"):
    return pytest.importorskip("PIL.Image").new("RGB", (6, 4), "red").convert(mode)


def png(folder: Path | None = None) -> bytes:
    file = io.BytesIO()
    drawn().save(file, "PNG")
    if folder is not None:
        (folder / "a.png").write_bytes(file.getvalue())
    return file.getvalue()


def url(text: str) -> dict:
    return {"type": "image_url", "image_url": {"url": text}}


def test_images_of_a_stream_are_read_from_its_copy():
    images = [drawn(), {"bytes": png(), "path": "a.png"}, drawn("CMYK")]
    copies = [json.loads(json.dumps(image, default=stored_text)) for image in images]
    sources = [sources_of(Row("f:1", asked("What?", image=image)))[0] for image in copies]
    assert all(open_picture(source).image.width == 6 for source in sources[:2])
    with pytest.raises(ValueError, match="CMYK"):
        open_picture(sources[2])


@pytest.mark.parametrize(
    "row", [asked("What?", image="a.png"), asked([url("a.png"), TEXT])], ids=["column", "part"]
)
def test_rows_with_images_are_not_written_elsewhere(row, tmp_path):
    splits = {"train": as_rows([Row("f:1", row)]), "valid": as_rows([])}
    splits |= {"test": as_rows([Row("f:9", chat("Say hi.", "Hi."))])}
    own = Splits(splits, "f", format_of(Row("f:1", row), COLUMNS))
    with raises("unsupported", "out", "--out", "f:1"):
        write_splits(own, COLUMNS, tmp_path / "out", False)
    assert not (tmp_path / "out").exists()


def test_the_fingerprint_of_rows_with_pil_images_is_of_their_pixels():
    hashes = []
    for image in (drawn(), drawn(), drawn("L")):
        rows = source_of([asked("What?", image=image)]).splits["train"]
        hashes.append(rows.fingerprint())
    assert hashes[0] == hashes[1] != hashes[2]
    broken = pytest.importorskip("PIL.Image").open(io.BytesIO(png()[:60]))
    assert source_of([{"image": broken}]).splits["train"].fingerprint()
