"""Pictures: an image as a row or a message names it, read, checked, and as RGB.

A file is known by its first bytes, and its size is checked before any pixel is decoded. A fault is
a ValueError of one line that names the image.
"""

import base64
import hashlib
import importlib
import io
import re
import time
import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import unquote

from ..errors import PackError, library_errors
from ..reading import open_regular

MOST_SIDE = 16_384  # pixels
MOST_PIXELS = 64_000_000
MOST_BYTES = 256 << 20  # of a file: 64 million pixels of four bytes each have a little less
MOST_URL_BYTES = 20_000_000
URL_SECONDS = 30
THUMBNAIL_URL = "data:image/jpeg;base64,"
_THUMBNAIL = 160  # pixels of its longer side
_MOST_THUMBNAILS = 4
_SHOWN = 120  # characters of a path
_KINDS = {  # the first bytes of a file, the plug-in of pillow that reads it, and its name there
    b"\xff\xd8\xff": ("Jpeg", "JPEG"),
    b"\x89PNG\r\n\x1a\n": ("Png", "PNG"),
    b"RIFF....WEBP": ("WebP", "WEBP"),
    b"BM": ("Bmp", "BMP"),
    b"GIF8": ("Gif", "GIF"),
    rb"II[*+]\0|MM\0[*+]": ("Tiff", "TIFF"),
}
_OTHER_KINDS = {
    b"version https://git-lfs": "a Git LFS pointer. Run `git lfs pull` in its folder",
    rb"....ftyp(avif|avis)": "AVIF",
    rb"....ftyp(hei|hev|mif1|msf1)": "HEIC",
    b"%PDF": "a PDF",
    rb"\s*(<\?xml|<svg)": "an SVG or other XML",
    rb"\s*<(!doctype|html)": "a web page, as a failed download leaves it",
}
_DEEP_MODES = ("I", "I;16", "I;16B", "I;16L", "I;16N")
_MODES = ("1", "L", "LA", "P", "PA", "RGB", "RGBA", "RGBX", "RGBa", "YCbCr")


@dataclass(frozen=True)
class ImageSource:
    """An image as a row or a message names it, not read yet.

    Args:
        value: the text of a path or of a file, data or HTTP URL; a mapping with ``bytes`` or
            ``path``, as the ``Image`` feature of the Hub's data sets gives; bytes; or a PIL image.
        folder: what a path is relative to; None for the current folder.
    """

    value: Any
    folder: Path | None = None


@dataclass(frozen=True)
class Picture:
    """An image that was read and checked.

    Args:
        key: 32 hex digits, of the hash of the file; without a file, of size, mode and pixels.
        image: a PIL image, RGB, upright, on white where it was transparent.
    """

    key: str
    image: Any

    @property
    def width(self) -> int:
        """Pixels of a row."""
        return self.image.width

    @property
    def height(self) -> int:
        """Rows of pixels."""
        return self.image.height


def open_picture(source: ImageSource, allow_urls: bool = False) -> Picture:
    """Return an image, read and checked.

    Args:
        source: the image.
        allow_urls: whether an HTTP URL is fetched: at most 20 MB, within 30 seconds.

    Raises:
        ValueError: It is missing, damaged, of another kind, too large, or on the network. The text
            is one line that names the image, what is wrong, and what to do.
        PackError: Pillow is not installed.
    """
    _check_pillow()
    try:
        content = _content(source.value, source.folder, allow_urls)
        with _decoding():
            opened = content
            if isinstance(content, bytes):
                opened = _opened(content)
            image = _as_rgb(opened)
    except PackError as error:
        raise ValueError(f"image {_name_of(source.value)}: {error.message}") from None

    if not isinstance(content, bytes):
        content = f"{image.width} {image.height} {image.mode} ".encode() + image.tobytes()
    return Picture(hashlib.sha256(content).hexdigest()[:32], image)


def _check_pillow() -> None:
    try:
        import PIL.Image  # noqa: F401
    except ImportError:
        raise PackError(
            "examples with images need pillow. Run `pip install 'mlx-packs[vision]'`.", "dependency"
        ) from None


def _name_of(value: Any) -> str:
    """Return what errors call an image."""
    if isinstance(value, Mapping):
        path = value.get("path")
        value = path if isinstance(path, str) else value.get("bytes")

    if isinstance(value, (str, Path)):
        text = str(value)
        if text[:5].lower() == "data:":
            return "of a data URL"
        if _is_http(text):
            text = text.partition("?")[0]  # behind it there may be a secret
        if len(text) > _SHOWN:
            text = text[:_SHOWN] + "…"
        return text

    if isinstance(value, (bytes, bytearray, memoryview)):
        return f"of {len(value):,} bytes"
    return f"of the type {type(value).__name__}"


def _is_http(text: str) -> bool:
    return re.match("https?:", text, re.IGNORECASE) is not None


def _content(value: Any, folder: Path | None, allow_urls: bool) -> Any:
    """Return the bytes of an image file, or a PIL image as it is."""
    from PIL import Image

    if isinstance(value, Mapping):
        value = _of_mapping(value)

    if isinstance(value, Image.Image):
        return value
    if isinstance(value, (bytes, bytearray, memoryview)):
        return bytes(value)
    if not isinstance(value, (str, Path)):
        raise PackError("must be a path, a URL, bytes, or a PIL image.")

    text = str(value)
    if text[:5].lower() == "data:":
        return _of_data_url(text)
    if _is_http(text):
        if not allow_urls:
            raise PackError(
                "is on the network, from where nothing is fetched by default. Pass --allow-urls, "
                "or download it."
            )
        return _fetched(text)

    return _read(text, folder)


def _of_mapping(value: Mapping) -> Any:
    """Bytes come before a path, which may be one of another machine."""
    content = value.get("bytes")
    if content is not None:
        is_stored = isinstance(content, str) and content.startswith("data:")
        if not is_stored and not isinstance(content, (bytes, bytearray, memoryview)):
            raise PackError(f"'bytes' must be bytes, but is a {type(content).__name__}.")
        return content

    path = value.get("path")
    if not isinstance(path, str):
        raise PackError("has neither 'bytes' nor a 'path'. Give one of them.")
    return path


def _of_data_url(url: str) -> bytes:
    kind, comma, payload = url[5:].partition(",")
    if not comma or not kind.lower().rstrip().endswith(";base64"):
        raise PackError("must be written as data:image/png;base64,…")

    try:
        return base64.b64decode(re.sub(r"\s", "", unquote(payload)), validate=True)
    except ValueError:
        raise PackError("is not valid base64. Encode the file again.") from None


def _fetched(url: str) -> bytes:
    """Return what a server answers, as it comes: a compressed answer may unpack to anything."""
    from huggingface_hub.utils import get_session

    content = bytearray()
    end = time.monotonic() + URL_SECONDS
    request = {"headers": {"Accept-Encoding": "identity"}, "timeout": URL_SECONDS}

    with library_errors(
        lambda reason: PackError(f"cannot be fetched ({reason}). Try again, or download it.")
    ):
        with get_session().stream("GET", url, **request) as response:
            if response.status_code != 200:
                raise PackError(
                    f"cannot be fetched (status {response.status_code}). Correct the URL."
                )

            for chunk in response.iter_raw():
                content += chunk
                if len(content) > MOST_URL_BYTES:
                    raise PackError(
                        f"has more than {MOST_URL_BYTES // 1_000_000} MB, the most that is "
                        "fetched. Download it."
                    )
                if time.monotonic() > end:
                    raise PackError(f"takes more than {URL_SECONDS} s to fetch. Download it.")

    return bytes(content)


def _read(text: str, folder: Path | None) -> bytes:
    path = Path(folder or "") / _path_of(text)
    try:
        with open_regular(path, MOST_BYTES) as file:
            return file.read()

    except PackError as error:
        raise PackError(error.message.removeprefix(f"{path}: ")) from None
    except (FileNotFoundError, NotADirectoryError):
        place = f" in {folder or 'the current folder'}"
        if Path(_path_of(text)).is_absolute():
            place = ""
        raise PackError(f"there is no such file{place}. Correct the path.") from None
    except OSError as error:
        raise PackError(f"cannot be read ({error.strerror}).") from None
    except ValueError:  # a zero byte
        raise PackError("is no path.") from None


def _path_of(text: str) -> str:
    if text[:5].lower() == "file:":
        path = re.match(r"(//(localhost)?)?(/[^/].*)", text[5:], re.DOTALL)
        if path is None:
            raise PackError("must name a whole path, as file:///folder/image.png does.")
        return unquote(path[3])

    if scheme := re.match(r"[A-Za-z][\w+.-]+://", text):
        raise PackError(f"is a URL of {scheme[0]}, which is not read. Download it.")
    if not text.strip():
        raise PackError("is an empty text. Name a file.")
    return text


@contextmanager
def _decoding() -> Iterator[None]:
    """Turn what pillow raises into an error, and leave out what it warns of."""
    from PIL import Image

    with (
        warnings.catch_warnings(),
        library_errors(
            lambda reason: PackError(
                f"is truncated or damaged ({reason}). Copy or download it again."
            )
        ),
    ):
        warnings.simplefilter("ignore")
        try:
            yield
        except Image.DecompressionBombError:
            raise _too_many_pixels("has") from None


def _opened(content: bytes) -> Any:
    """Return a PIL image of which only the header was read; `Image.open` would check its size."""
    from PIL import Image

    if not content:
        raise PackError("has 0 bytes. Copy or download it again.")

    start = content[:64]
    for signature, (plugin, name) in _KINDS.items():
        if re.match(signature, start, re.DOTALL):
            importlib.import_module(f"PIL.{plugin}ImagePlugin")
            return Image.OPEN[name][0](io.BytesIO(content), "")

    allowed = "JPEG, PNG, WebP, BMP, GIF or TIFF"
    for signature, name in _OTHER_KINDS.items():
        if re.match(signature, start, re.DOTALL | re.IGNORECASE):
            raise PackError(f"must be {allowed}, but is {name}.")
    raise PackError(f"must be {allowed}, but is none of them.")


def _as_rgb(image: Any) -> Any:
    """Check a PIL image, decode it, and return it upright and without transparency."""
    from PIL import Image

    _check_size(image)
    # a photo may have a small one of itself behind it
    if getattr(image, "is_animated", False) and image.format != "MPO":
        raise PackError("has several frames. Save one of them as an image.")
    _check_mode(image)

    image.load()
    _check_size(image)  # a frame may be larger than its header says
    upright = _upright(image)

    if not upright.has_transparency_data:
        return upright.convert("RGB")
    colors = upright.convert("RGBA")
    white = Image.new("RGBA", colors.size, "white")
    return Image.alpha_composite(white, colors).convert("RGB")


def _check_size(image: Any) -> None:
    width, height = image.size
    if max(width, height) > MOST_SIDE:
        raise PackError(
            f"is {width:,} x {height:,} pixels, but a side may have at most {MOST_SIDE:,}. Make it "
            "smaller."
        )
    if width * height > MOST_PIXELS:
        raise _too_many_pixels(f"is {width:,} x {height:,} pixels, which is")


def thumbnails(sources: Sequence[ImageSource], allow_urls: bool = False) -> tuple[str, ...]:
    """Return the first images as small JPEGs, data URLs that a page shows."""
    urls = []
    for source in sources[:_MOST_THUMBNAILS]:
        image = open_picture(source, allow_urls).image.copy()
        image.thumbnail((_THUMBNAIL, _THUMBNAIL))

        file = io.BytesIO()
        image.save(file, "JPEG", quality=80)
        urls.append(THUMBNAIL_URL + base64.b64encode(file.getvalue()).decode())
    return tuple(urls)


def _too_many_pixels(verb: str) -> PackError:
    return PackError(
        f"{verb} more than {MOST_PIXELS // 1_000_000} million pixels. Make it smaller."
    )


def _check_mode(image: Any) -> None:
    """Raise a PackError for numbers that are not of 8 bits, and for colors that are not RGB."""
    raw = str(getattr(image, "tile", ""))  # how its file has the numbers, until they are decoded
    is_deep = image.format in ("PNG", "TIFF") and ";16" in raw
    if is_deep or image.mode in _DEEP_MODES:
        raise PackError("has more than 8 bits per channel. Save it with 8.")
    if image.mode == "F":
        raise PackError("has floating-point numbers. Save it with 8 bits per channel.")
    if image.mode not in _MODES:
        raise PackError(f"is {image.mode}. Convert it to RGB.")


def _upright(image: Any) -> Any:
    """Return the image as its EXIF data turn it; damaged ones turn nothing."""
    from PIL import ImageOps

    try:
        return ImageOps.exif_transpose(image)
    except (SyntaxError, ValueError, TypeError, KeyError, OSError):
        return image
