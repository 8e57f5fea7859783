"""Pictures: an image as a row or a message names it, read, checked, and as RGB.

A file is known by its first bytes, and its size is checked before any pixel is decoded. A fault is
a ValueError of one line that names the image.
"""

import base64
import hashlib
import re
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import unquote

from ..errors import PackError, library_errors, pip_install
from ..reading import open_regular
from ..sandbox.images import as_rgb
from ..sandbox.process import IMAGES, Fault, LimitExceeded

MOST_BYTES = 128 << 20  # of a file: 16 million pixels of four bytes each have half of it
MOST_URL_BYTES = 20_000_000
URL_SECONDS = 30
_SHOWN = 120  # characters of a path


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
    """An image that was read and checked."""

    key: str  # 32 hex digits, of the hash of the file; without a file, of size, mode and pixels
    image: Any  # a PIL image, RGB, upright, on white where it was transparent


def open_picture(source: ImageSource, allow_urls: bool = False) -> Picture:
    """Return an image, read and checked; a fault of it is a ValueError of one line.

    ``allow_urls`` lets an HTTP URL be fetched: at most 20 MB, within 30 seconds.
    """
    _check_pillow()
    try:
        content = _content(source.value, source.folder, allow_urls)
        if isinstance(content, bytes):
            image = _decoded(content)
        else:
            with library_errors(_damaged):  # a program has decoded it before
                image = as_rgb(content, in_place=False)
            content = f"{image.width} {image.height} {image.mode} ".encode() + image.tobytes()
    except (PackError, ValueError) as error:
        reason = error.message if isinstance(error, PackError) else str(error)
        raise ValueError(f"image {_name_of(source.value)}: {reason}") from None

    return Picture(hashlib.sha256(content).hexdigest()[:32], image)


def _decoded(content: bytes) -> Any:
    """Return the image of a file, which the sandbox decodes."""
    from PIL import Image

    try:
        size, pixels = IMAGES.call("decode", content)
    except LimitExceeded as error:
        raise PackError(f"{error} to decode. Save it again, or make it smaller.") from None
    except Fault as error:
        if error.kind == "ValueError" and str(error).endswith("."):
            raise ValueError(str(error)) from None
        raise _damaged(str(error).rstrip(".")) from None
    return Image.frombytes("RGB", tuple(size), pixels)


def _damaged(reason: str) -> PackError:
    return PackError(f"is truncated or damaged ({reason}). Copy or download it again.")


def _check_pillow() -> None:
    try:
        import PIL.Image  # noqa: F401
    except ImportError:
        raise PackError(
            f"examples with images need pillow. Run `{pip_install('vision')}`.", "dependency"
        ) from None


def _name_of(value: Any) -> str:
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
        raise ValueError("must be a path, a URL, bytes, or a PIL image.")

    text = str(value)
    if text[:5].lower() == "data:":
        return _of_data_url(text)
    if _is_http(text):
        if not allow_urls:
            raise ValueError(
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
            raise ValueError(f"'bytes' must be bytes, but is a {type(content).__name__}.")
        return content

    path = value.get("path")
    if not isinstance(path, str):
        raise ValueError("has neither 'bytes' nor a 'path'. Give one of them.")
    return path


def _of_data_url(url: str) -> bytes:
    kind, comma, payload = url[5:].partition(",")
    if not comma or not kind.lower().rstrip().endswith(";base64"):
        raise ValueError("must be written as data:image/png;base64,…")

    try:
        return base64.b64decode(re.sub(r"\s", "", unquote(payload)), validate=True)
    except ValueError:
        raise ValueError("is not valid base64. Encode the file again.") from None


def _fetched(url: str) -> bytes:
    """Return what a server answers, as it comes: a compressed answer may unpack to anything."""
    from huggingface_hub.utils import get_session

    content = bytearray()
    end = time.monotonic() + URL_SECONDS
    request = {"headers": {"Accept-Encoding": "identity"}, "timeout": URL_SECONDS}

    def failed(reason: str) -> PackError:
        return PackError(f"cannot be fetched ({reason}). Correct the URL, or download it.")

    with library_errors(failed), get_session().stream("GET", url, **request) as response:
        if response.status_code != 200:
            raise failed(f"status {response.status_code}")

        for chunk in response.iter_raw():
            content += chunk
            if len(content) > MOST_URL_BYTES:
                most = MOST_URL_BYTES // 1_000_000
                raise PackError(f"has more than {most} MB, the most that is fetched. Download it.")
            if time.monotonic() > end:
                raise PackError(f"takes more than {URL_SECONDS} s to fetch. Download it.")

    return bytes(content)


def _read(text: str, folder: Path | None) -> bytes:
    path = Path(folder or "") / _path_of(text)
    try:
        with open_regular(path, MOST_BYTES) as file:
            return file.read()

    except PackError as error:
        raise ValueError(error.text) from None
    except (FileNotFoundError, NotADirectoryError):
        place = f" in {folder or 'the current folder'}"
        if Path(_path_of(text)).is_absolute():
            place = ""
        raise ValueError(f"there is no such file{place}. Correct the path.") from None
    except OSError as error:
        raise ValueError(f"cannot be read ({error.strerror}).") from None
    except ValueError:  # a zero byte
        raise ValueError("is no path.") from None


def _path_of(text: str) -> str:
    if text[:5].lower() == "file:":
        path = re.match(r"(//(localhost)?)?(/[^/].*)", text[5:], re.DOTALL)
        if path is None:
            raise ValueError("must name a whole path, as file:///folder/image.png does.")
        return unquote(path[3])

    if scheme := re.match(r"[A-Za-z][\w+.-]+://", text):
        raise ValueError(f"is a URL of {scheme[0]}, which is not read. Download it.")
    if not text.strip():
        raise ValueError("is an empty text. Name a file.")
    return text
