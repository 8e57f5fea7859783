"""Image files, decoded by Pillow; this module runs in a sandbox.

The size of an image is checked before it is decoded, but not what decoding costs: a progressive
JPEG may have thousands of scans. A fault is a ValueError whose text continues "image a.png: …".
"""

import io
import re
import warnings
from contextlib import suppress
from typing import Any

MOST_SIDE = 16_384  # pixels
MOST_PIXELS = 1 << 24  # which can be decoded, turned and made opaque within 256 MB
_KINDS = ("JPEG", "PNG", "WEBP", "BMP", "GIF", "TIFF")
_OTHER_KINDS = {  # by the first bytes of a file
    b"version https://git-lfs": "a Git LFS pointer. Run `git lfs pull` in its folder",
    rb"....ftyp(avif|avis)": "AVIF",
    rb"....ftyp(hei|hev|mif1|msf1)": "HEIC",
    b"%PDF": "a PDF",
    rb"\s*(<\?xml|<svg)": "an SVG or other XML",
    rb"\s*<(!doctype|html)": "a web page, as a failed download leaves it",
}
_DEEP_MODES = ("I", "I;16", "I;16B", "I;16L", "I;16N")
_MODES = ("1", "L", "LA", "P", "PA", "RGB", "RGBA", "RGBX", "RGBa", "YCbCr")


def decode(content: bytes) -> tuple[list[int], bytes]:
    """Return width and height of an image file, and its pixels as `as_rgb` has them."""
    from PIL import Image

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            image = _opened(content)
            width, height = image.size
            if image.format == "JPEG" and width * height > MOST_PIXELS:
                image.draft("RGB", (width // 2, height // 2))  # decodes it at half the size
            image = as_rgb(image)
        except Image.DecompressionBombError:
            raise _too_many_pixels("has") from None
    return list(image.size), image.tobytes()


def _opened(content: bytes) -> Any:
    """Return a PIL image of which only the header was read."""
    # Pillow itself imports these two only after it has tried all others
    from PIL import Image, TiffImagePlugin, WebPImagePlugin  # noqa: F401

    if not content:
        raise ValueError("has 0 bytes. Copy or download it again.")
    with suppress(Image.UnidentifiedImageError):
        return Image.open(io.BytesIO(content), formats=_KINDS)

    allowed = "must be JPEG, PNG, WebP, BMP, GIF or TIFF, but is"
    for signature, name in _OTHER_KINDS.items():
        if re.match(signature, content[:64], re.DOTALL | re.IGNORECASE):
            raise ValueError(f"{allowed} {name}.")
    raise ValueError(f"{allowed} none of them, or truncated or damaged. Copy or download it again.")


def as_rgb(image: Any, in_place: bool = True) -> Any:
    """Check a PIL image, decode it, and return it as RGB, upright, and on white.

    ``in_place`` turns the image itself, which needs less memory.
    """
    _check_size(image)
    # a photo may have a small one of itself behind it
    if getattr(image, "is_animated", False) and image.format != "MPO":
        raise ValueError("has several frames. Save one of them as an image.")
    _check_mode(image)

    image.load()
    _check_size(image)  # a frame may be larger than its header says
    return _opaque(_upright(image, in_place))


def _check_size(image: Any) -> None:
    width, height = image.size
    if max(width, height) > MOST_SIDE:
        raise ValueError(
            f"is {width:,} x {height:,} pixels, but a side may have at most {MOST_SIDE:,}. Make it "
            "smaller."
        )
    if width * height > MOST_PIXELS:
        raise _too_many_pixels(f"is {width:,} x {height:,} pixels, which is")


def _too_many_pixels(verb: str) -> ValueError:
    return ValueError(
        f"{verb} more than {MOST_PIXELS // 1_000_000} million pixels. Make it smaller."
    )


def _check_mode(image: Any) -> None:
    """Raise an error for numbers that are not of 8 bits, and for colors that are not RGB."""
    raw = str(getattr(image, "tile", ""))  # how its file has the numbers, until they are decoded
    is_deep = image.format in ("PNG", "TIFF") and ";16" in raw
    if is_deep or image.mode in _DEEP_MODES:
        raise ValueError("has more than 8 bits per channel. Save it with 8.")
    if image.mode == "F":
        raise ValueError("has floating-point numbers. Save it with 8 bits per channel.")
    if image.mode not in _MODES:
        raise ValueError(f"is {image.mode}. Convert it to RGB.")


def _upright(image: Any, in_place: bool) -> Any:
    """Return the image as its EXIF data turn it; damaged ones turn nothing."""
    from PIL import ImageOps

    try:
        turned = ImageOps.exif_transpose(image, in_place=in_place)
    except (SyntaxError, ValueError, TypeError, KeyError, OSError):
        return image
    return image if in_place else turned


def _opaque(image: Any) -> Any:
    from PIL import Image

    if not image.has_transparency_data:
        return image if image.mode == "RGB" else image.convert("RGB")

    colors = image if image.mode == "RGBA" else image.convert("RGBA")
    white = Image.new("RGBA", colors.size, "white")
    white.alpha_composite(colors)
    return white.convert("RGB")
