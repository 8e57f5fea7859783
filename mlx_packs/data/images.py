"""Images of conversations: parts of a content, columns of a row, and their places in texts.

A message that has images has them as ``images``, and its ``content`` is a text with `IMAGE_MARK`
in the place of each. An image is None where only its place is known: a column has it.
"""

import base64
import hashlib
import io
import json
import re
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from ..bases.turns import IMAGE_MARK
from ..vision.pictures import ImageSource
from .row_format import Row

IMAGE_COLUMNS = ("image", "images")
# Families whose images have fewer tokens if --max-pixels makes them smaller.
FEWER_BY_MAX_PIXELS = ("qwen2_vl", "qwen2_5_vl", "qwen3_vl", "mistral3")
_MARKER = "<image>"  # the place of an image in data for LLaVA, LLaMA-Factory and ms-swift
_PLACES = re.compile(f"{IMAGE_MARK}|{_MARKER}")
_TEXTS = ("text", "input_text")  # types of parts, as OpenAI's two interfaces have them
_KEYS = {  # keys of a part by its type, one of which has the image
    "image_url": ("image_url",),
    "input_image": ("image_url",),
    "image": ("image", "url", "path", "image_url"),
}
_SHORT = 1000  # bytes of a value that is no image

Images = list[ImageSource | None]


def content_of(content: Any, folder: Path | None) -> tuple[str | None, Images]:
    """Return the text of a content with a mark for each image, and the images.

    A fault is a ValueError. Paths are relative to ``folder``.
    """
    if content is None or isinstance(content, str):
        return content, []
    if not isinstance(content, list):
        raise ValueError("the 'content' of a message must be a text.")

    texts = []
    images: Images = []
    for part in content:
        kind = _type_of(part)
        if kind in _KEYS:
            images.append(_image_of(part, folder))
            texts.append(IMAGE_MARK)
        elif kind in _TEXTS and isinstance(part.get("text"), str):
            texts.append(part["text"])
        else:
            raise ValueError(
                "the 'content' of a message must be a text, or parts of type 'text', 'image' or "
                "'image_url'."
            )

    text = "".join(texts)
    check_marks(text, images)
    return text, images


def _type_of(part: Any) -> str:
    """Return the type of a part; an empty text without one."""
    kind = part.get("type") if isinstance(part, Mapping) else ""
    return kind if isinstance(kind, str) else ""


def _image_of(part: Mapping, folder: Path | None) -> ImageSource | None:
    """Without an image, a part of type ``image`` is the place of one."""
    given = [key for key in _KEYS[part["type"]] if part.get(key) is not None]
    if len(given) > 1:
        raise ValueError(f"a part has both '{given[0]}' and '{given[1]}'. Remove one of them.")
    if not given and part["type"] == "image":
        return None

    key = next(iter(given), "image_url")
    value = part.get(key)
    if key == "image_url" and isinstance(value, Mapping):
        value = value.get("url")
    if value is None:
        raise ValueError(f"a part of type '{part['type']}' must have an 'image_url'.")
    return ImageSource(value, folder)


def check_marks(text: str, images: Collection) -> None:
    """Raise a ValueError unless a text has a mark for each image, and no other."""
    if text.count(IMAGE_MARK) != len(images):
        raise ValueError(
            "the text of a message with images has the character U+FFFC, which stands for an image "
            "here. Remove it."
        )


def with_own_images(message: dict[str, Any], images: Images) -> dict[str, Any]:
    """Return a message with the images of its parts."""
    if message.pop("images", None):
        raise ValueError(
            "'images' of a message are not read. Write them as parts of its content, or into the "
            "column 'images' of the row."
        )
    if not images:
        return message
    if message["role"] == "assistant":
        raise ValueError(
            "an answer has an image, but only messages of user, system and tool may have images."
        )
    return {**message, "images": images}


def with_column_images(
    messages: list[dict[str, Any]], column: str | None, images: Any, folder: Path | None
) -> list[dict[str, Any]]:
    """Return messages with the images of a row's column; without one ``column`` is None.

    A fault is a ValueError. Paths are relative to ``folder``.
    """
    if column is None:
        has_images = any("images" in message for message in messages)
        return placed(messages, [], "columns") if has_images else messages

    values = images if isinstance(images, list) else [images]
    if any(each is None for each in values):
        raise ValueError(f"'{column}' has a null. Leave it out.")
    return placed(messages, [ImageSource(each, folder) for each in values], f"'{column}'")


def placed(
    messages: Sequence[dict[str, Any]], sources: Sequence[ImageSource], where: str
) -> list[dict[str, Any]]:
    """Return messages with the images of ``where`` in the places for them.

    Without any place, and without other images, they come before the first message of the user. A
    ValueError says that there are more places than images, or fewer.
    """
    messages = list(messages)
    asked = [i for i, message in enumerate(messages) if message["role"] != "assistant"]

    places = 0
    for i in asked:
        places += messages[i].get("images", []).count(None) + messages[i]["content"].count(_MARKER)

    has_others = any("images" in message for message in messages)
    if sources and not places and not has_others and asked:
        users = [i for i in asked if messages[i]["role"] == "user"]
        first = (users or asked)[0]
        messages[first] = {
            **messages[first],
            "content": _MARKER * len(sources) + messages[first]["content"],
        }
    elif places != len(sources):
        raise ValueError(
            f"images in {where}: {len(sources)}, places for them in the messages: {places} "
            "(<image> in a text that is no answer, or a part of type 'image'). Give each image one "
            "place."
        )

    remaining = iter(sources)
    for i in asked:
        messages[i] = _filled(messages[i], remaining)
    return messages


def _filled(message: dict[str, Any], sources: Iterator[ImageSource]) -> dict[str, Any]:
    """Return a message whose places have the next of the images."""
    content = message["content"]
    of_parts = message.get("images", [])
    if not of_parts and _MARKER not in content:
        return message

    check_marks(content, of_parts)
    known = iter(of_parts)
    images = []
    for place in _PLACES.finditer(content):
        image = next(known) if place[0] == IMAGE_MARK else None
        images.append(image or next(sources))

    return {**message, "content": content.replace(_MARKER, IMAGE_MARK), "images": images}


def plain_text(content: Any) -> str:
    """Return the text of a content as a row has it, without its images and without any check."""
    if isinstance(content, str):
        return content
    if not isinstance(content, list):
        return ""

    texts = [part.get("text") for part in content if isinstance(part, Mapping)]
    return "".join(text for text in texts if isinstance(text, str))


def without_marks(message: Mapping) -> str:
    """Return the text of a message as people write it."""
    content = message.get("content") or ""
    if message.get("images"):
        return content.replace(IMAGE_MARK, "")
    return content


def images_key(row: Row) -> str:
    """Return a hash of the images that a row names, none of which is read; empty without any.

    It is cheap, and the same image under two names has two.
    """
    named = [row.value.get(column) for column in IMAGE_COLUMNS]
    lists = [column for column in row.value.values() if isinstance(column, list)]
    messages = [item for items in lists for item in items if isinstance(item, Mapping)]
    contents = [message.get("content") for message in messages]
    parts = [part for content in contents if isinstance(content, list) for part in content]
    named += [part.get(key) for part in parts for key in _KEYS.get(_type_of(part), ())]

    named = [each for each in named if each and not isinstance(each, float)]
    if not named:
        return ""
    return hashlib.sha256(json.dumps(named, default=hashed_text).encode()).hexdigest()[:16]


def hashed_text(value: Any) -> str:
    """Return a value that JSON lacks as a short text, which is the same in each process."""
    from ..vision.pictures import open_picture

    if isinstance(value, bytes) and len(value) > _SHORT:
        return hashlib.sha256(value).hexdigest()
    if not _is_pil(value):
        return str(value)
    try:
        return open_picture(ImageSource(value)).key
    except ValueError:  # a row that cannot be used
        return f"{value.mode} {value.size}"


def stored_text(value: Any) -> str:
    """Return a value that JSON lacks as text: bytes and PIL images as data URLs."""
    for kind in ("PNG", "TIFF"):  # the latter has all modes
        with suppress(OSError):  # a mode that a PNG lacks, or a truncated image
            if _is_pil(value):
                file = io.BytesIO()
                value.save(file, kind)
                value = file.getvalue()

    if isinstance(value, bytes):
        return f"data:application/octet-stream;base64,{base64.b64encode(value).decode()}"
    return str(value)


def _is_pil(value: Any) -> bool:
    return type(value).__module__.startswith("PIL.")
