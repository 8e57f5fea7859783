"""Images as rows name them: what is read, and what is rejected in one line that names the image."""

import base64
import hashlib
import http.server
import io
import os
import struct
import sys
import threading
import warnings
import zlib
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

from mlx_packs.errors import PackError
from mlx_packs.vision import pictures
from mlx_packs.vision.pictures import ImageSource, open_picture

Image = pytest.importorskip("PIL.Image")
ImageDraw = pytest.importorskip("PIL.ImageDraw")


def drawn(mode: str = "RGB", size: tuple[int, int] = (24, 16)):
    """A red picture whose left half is blue."""
    image = Image.new("RGB", size, "red")
    ImageDraw.Draw(image).rectangle([0, 0, size[0] // 2 - 1, size[1]], fill="blue")
    return image.convert(mode)


def stored(image=None, kind: str = "PNG", **options) -> bytes:
    file = io.BytesIO()
    (image or drawn()).save(file, kind, **options)
    return file.getvalue()


def written(folder: Path, content: bytes, name: str = "a.png") -> ImageSource:
    (folder / name).write_bytes(content)
    return ImageSource(name, folder)


def png(width: int, height: int) -> bytes:
    """A PNG of no pixels with a header that says what it likes."""
    header = struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0)
    chunks = [(b"IHDR", header), (b"IDAT", zlib.compress(b"")), (b"IEND", b"")]
    parts = [
        struct.pack(">I", len(c)) + k + c + struct.pack(">I", zlib.crc32(k + c)) for k, c in chunks
    ]
    return b"\x89PNG\r\n\x1a\n" + b"".join(parts)


PREVIEW = {"save_all": True, "append_images": [drawn(size=(4, 4))]}
GOOD = [
    *(stored(kind=kind) for kind in ("JPEG", "PNG", "WEBP", "BMP", "GIF", "TIFF")),
    *(stored(kind=kind, save_all=True) for kind in ("GIF", "TIFF", "PNG", "WEBP")),  # one frame
    stored(kind="MPO", **PREVIEW),  # a photo with a preview behind it
    stored(kind="JPEG", exif=b"Exif\0\0MM\0*\xff\xff\xff\xff"),  # damaged
    *(stored(drawn(mode)) for mode in ("P", "RGBA")),
]
GREY = [stored(drawn(mode)) for mode in ("1", "L", "LA")]


@pytest.mark.parametrize("content", GOOD + GREY, ids=range(len(GOOD + GREY)))
def test_every_kind_and_mode_is_read_as_rgb(tmp_path, content):
    (tmp_path / "images").mkdir()
    (tmp_path / "images" / "a.any").write_bytes(content)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        picture = open_picture(ImageSource("images/a.any", tmp_path))
    assert picture.image.mode == "RGB" and picture.image.size == (24, 16)
    assert picture.key == hashlib.sha256(content).hexdigest()[:32]
    if content in GOOD:
        assert np.median(np.abs(np.int16(picture.image) - np.int16(drawn()))) <= 2


def test_one_image_has_one_key_however_it_is_named(tmp_path, monkeypatch):
    content = stored()
    file = tmp_path / "with space.png"
    file.write_bytes(content)
    monkeypatch.chdir(tmp_path)
    url = "data:image/png;base64," + base64.b64encode(content).decode()
    values = [
        *(str(file), file, file.name, f"file://{file}", f"FILE://localhost{file}"),
        *(file.as_uri(), content, bytearray(content), url, url.replace("+", "%2B")),
        {"bytes": content, "path": "of/another/machine.png"},
        *({"bytes": None, "path": str(file)}, {"path": file.name}),
    ]
    pictures_of = [open_picture(ImageSource(value)) for value in values]
    assert {each.key for each in pictures_of} == {hashlib.sha256(content).hexdigest()[:32]}
    assert open_picture(ImageSource(url.replace(",", ",\n "))).key == pictures_of[0].key


def test_the_key_of_a_pil_image_is_of_its_pixels():
    keys = [open_picture(ImageSource(drawn(mode))).key for mode in ("RGB", "RGBA", "L")]
    assert keys[0] == keys[1] != keys[2]
    assert open_picture(ImageSource(drawn(size=(16, 24)))).key != keys[0]
    palettes = [drawn().quantize(2), Image.new("P", (24, 16))]
    palettes[1].putdata(palettes[0].get_flattened_data())
    palettes[1].putpalette([1, 2, 3, 4, 5, 6])
    assert len({open_picture(ImageSource(each)).key for each in palettes}) == 2


def test_transparency_is_white(tmp_path):
    clear = Image.new("RGBA", (4, 2), (0, 0, 0, 0))
    clear.putpixel((0, 0), (255, 0, 0, 255))
    for image in (clear, clear.quantize(2)):
        shown = open_picture(written(tmp_path, stored(image))).image
        assert shown.getpixel((3, 1)) == (255, 255, 255)
    grey = Image.new("L", (4, 2), 7)
    shown = open_picture(written(tmp_path, stored(grey, transparency=7))).image
    assert shown.getpixel((0, 0)) == (255, 255, 255)


def test_images_are_turned_as_their_exif_says(tmp_path):
    exif = Image.Exif()
    exif[0x0112] = 6  # a quarter to the right
    shown = open_picture(written(tmp_path, stored(kind="JPEG", exif=exif, quality=95))).image
    assert shown.size == (16, 24)
    red, _, blue = shown.getpixel((8, 2))
    assert blue > 200 > 60 > red


FRAMES = {"save_all": True, "append_images": [drawn("L").convert("RGB")]}
BAD = {
    "empty": (b"", "0 bytes"),
    "text": (b"Not an image at all.", "JPEG, PNG, WebP, BMP, GIF or TIFF"),
    "lfs": (b"version https://git-lfs.github.com/spec/v1\noid sha256:0", "git lfs pull"),
    "heic": (b"\0\0\0\x18ftypheic\0\0\0\0", "HEIC"),
    "svg": (b'<svg xmlns="http://www.w3.org/2000/svg"/>', "SVG"),
    "web page": (b"\n<!DOCTYPE html><html></html>", "web page"),
    "truncated png": (stored(drawn(size=(300, 300)))[:200], "truncated or damaged"),
    "truncated jpeg": (stored(kind="JPEG")[:-200], "truncated or damaged"),
    "cmyk": (stored(drawn("CMYK"), "JPEG"), "CMYK. Convert it to RGB"),
    "16 bit": (stored(Image.new("I;16", (4, 4))), "more than 8 bits per channel"),
    "float": (stored(Image.new("F", (4, 4)), "TIFF"), "floating-point"),
    "animated gif": (stored(kind="GIF", **FRAMES), "several frames"),
    "wide": (png(20_000, 1), "20,000 x 1 pixels, but a side may have at most 16,384"),
    "large": (png(10_000, 10_000), "10,000 x 10,000 pixels, which is more than 16 million"),
    "bomb": (png(16_384, 16_384), "more than 16 million pixels"),
    "bomb of a gif": (
        b"GIF89a" + struct.pack("<HHBBB", 1, 1, 0, 0, 0) + b"," + struct.pack("<HHHHB", 0, 0, 65_535, 65_535, 0) + b"\2\1\0\0;",
        "pixels",
    ),
}  # fmt: skip


def fault(source: ImageSource, **options) -> str:
    """The text of the error, which is one line and leaves nothing else."""
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        with pytest.raises(ValueError) as caught:
            open_picture(source, **options)
    text = str(caught.value)
    assert text.startswith("image ") and "\n" not in text and not text.endswith(". ")
    assert "decompression bomb" not in text.lower()
    return text


@pytest.mark.parametrize("name", BAD)
def test_a_bad_image_is_one_line(tmp_path, name):
    content, part = BAD[name]
    assert part in (text := fault(written(tmp_path, content, "bad.png")))
    assert text.startswith("image bad.png: ")
    assert fault(ImageSource(content)).startswith(f"image of {len(content):,} bytes: ")


def test_a_file_of_many_bytes_is_not_read(tmp_path, monkeypatch):
    monkeypatch.setattr(pictures, "MOST_BYTES", 10)
    assert "at most 10 are read" in fault(written(tmp_path, stored()))


def test_a_path_without_a_regular_file_is_an_error(tmp_path):
    folder = ImageSource("images", tmp_path)
    assert f"image images: there is no such file in {tmp_path}." in fault(folder)
    assert "image /no/where.png: there is no such file. " in fault(ImageSource("/no/where.png"))
    (tmp_path / "images").mkdir()
    assert "image images: is a folder." in fault(folder)
    os.mkfifo(tmp_path / "pipe.png")
    assert "image pipe.png: is a named pipe." in fault(ImageSource("pipe.png", tmp_path))
    written(tmp_path, stored())
    assert "there is no such file" in fault(ImageSource("a.png/b.png", tmp_path))
    for text in ("", "x" * 5000, "a\0b", "s3://bucket/a.png", "file://images/a.png", "file:a.png"):
        assert len(fault(ImageSource(text, tmp_path))) < 300


@pytest.mark.parametrize(
    ("url", "part"),
    [
        ("data:image/png;base64,iVBORw0KG", "not valid base64"),
        ("data:image/png;base64,é", "not valid base64"),
        ("data:image/png,abc", "data:image/png;base64,"),
        ("data:image/png;base64", "data:image/png;base64,"),
        ("data:image/png;base64,", "0 bytes"),
    ],
)
def test_a_bad_data_url_is_one_line(url, part):
    text = fault(ImageSource(url))
    assert part in text and text.startswith("image of a data URL: ") and len(text) < 200


@pytest.mark.parametrize(
    "value", [None, 5, [1], {}, {"bytes": None, "path": None}, {"bytes": "iVBO"}, {"path": 5}]
)
def test_a_value_that_is_no_image_is_an_error(value):
    fault(ImageSource(value))


def test_a_bad_pil_image_is_an_error():
    assert "CMYK" in fault(ImageSource(drawn("CMYK")))
    assert "16,384" in fault(ImageSource(Image.new("1", (20_000, 1))))
    assert "several frames" in fault(ImageSource(Image.open(io.BytesIO(BAD["animated gif"][0]))))
    assert "truncated" in fault(ImageSource(Image.open(io.BytesIO(BAD["truncated png"][0]))))


def test_without_pillow_the_error_names_the_extra(monkeypatch):
    for name in ("PIL.Image", "PIL"):
        monkeypatch.setitem(sys.modules, name, None)
    with pytest.raises(PackError) as caught:
        open_picture(ImageSource("a.png"))
    assert caught.value.code == "dependency" and "[vision]'" in caught.value.message


@pytest.fixture
def server(monkeypatch):
    """The URL of a server of this process, and what it answers."""
    answers = {"/a.png": (200, stored()), "/gone.png": (404, b""), "/large.png": (200, bytes(3000))}

    class Handler(http.server.BaseHTTPRequestHandler):
        def do_GET(self):
            status, content = answers[self.path.partition("?")[0]]
            self.send_response(status)
            self.end_headers()
            self.wfile.write(content)

        def log_message(self, *_):
            pass

    for name in ("http_proxy", "HTTP_PROXY", "all_proxy", "ALL_PROXY"):
        monkeypatch.delenv(name, raising=False)
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield f"http://127.0.0.1:{server.server_port}"
    server.shutdown()
    server.server_close()


def test_a_url_is_fetched_only_with_allow_urls(server, monkeypatch):
    source = ImageSource(f"{server}/a.png?token=secret")
    text = fault(source)
    assert "--allow-urls" in text and f"image {server}/a.png: " in text and "secret" not in text

    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", False)
    assert open_picture(source, allow_urls=True).key == hashlib.sha256(stored()).hexdigest()[:32]
    in_hub_dict = ImageSource({"path": f"{server}/a.png"})
    assert open_picture(in_hub_dict, allow_urls=True).image.width == 24
    assert "404" in fault(ImageSource(f"{server}/gone.png"), allow_urls=True)

    monkeypatch.setattr(pictures, "MOST_URL_BYTES", 2000)
    assert "the most that is fetched" in fault(ImageSource(f"{server}/large.png"), allow_urls=True)
    clock = SimpleNamespace(monotonic=iter([0, 31]).__next__)
    monkeypatch.setattr(pictures, "time", clock)
    assert "takes more than 30 s" in fault(ImageSource(f"{server}/a.png"), allow_urls=True)


def test_a_url_that_nobody_answers_is_one_line(monkeypatch):
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", False)
    for url in ("http://127.0.0.1:9/a.png", "http://", "https://a b/c", "http://[/a.png"):
        with pytest.raises(ValueError, match="^image http.*: cannot be fetched") as caught:
            open_picture(ImageSource(url), allow_urls=True)
        assert "\n" not in str(caught.value)
