"""Images of requests: which are read, and their features in the memory of the server.

Files are read and decoded by threads of requests. Features are computed between two steps by the
thread that computes texts.
"""

import re
import time
from concurrent.futures import TimeoutError as Late
from typing import Any

from ..bases.turns import NO_IMAGES
from ..errors import PackError
from ..vision.pictures import ImageSource, open_picture
from .generation import Generator
from .protocol import ChatBody

MOST_IMAGES = 64  # of one request
_MOST_BYTES = 1 << 30  # of features in memory when a request begins


class RequestImages:
    """Reads the images of requests.

    Args:
        generator: of a base that may take none.
        max_pixels: as `ImageLimits`.
        allow_urls: whether HTTP URLs are fetched; no path is ever read.
    """

    def __init__(self, generator: Generator, max_pixels: int, allow_urls: bool) -> None:
        self._generator = generator
        self._allow_urls = allow_urls
        self._images: Any = getattr(generator.base.tokenizer, "_images", None)
        if self._images is not None:
            self._images.limit(max_pixels, allow_urls)
            self._images.keep_in_memory()

    def of_chat(self, body: ChatBody, deadline: float) -> list[Any]:
        """Return the images of a body in their order; a fault of one is a PackError.

        They exist as long as the caller, or a prompt that is computed, holds them.
        """
        sources = {
            f"messages.{i}.content.{j}": source
            for i, message in enumerate(body.messages)
            for j, source in message.images.items()
        }
        if not sources:
            return []

        if self._images is None:
            raise PackError(
                f"messages: {self._generator.base.name}: {NO_IMAGES}", "unsupported", "messages"
            )
        if len(sources) > MOST_IMAGES:
            raise PackError(
                f"messages: have {len(sources)} images, but {MOST_IMAGES} is the most. Send fewer.",
                flag="messages",
            )

        if self._images.nbytes > _MOST_BYTES:
            raise PackError("The images that wait take too much memory. Try again later.", "busy")

        return [self._read(place, source, deadline) for place, source in sources.items()]

    def _read(self, place: str, source: ImageSource, deadline: float) -> Any:
        self._check(place, source.value)
        try:
            picture = open_picture(source, self._allow_urls)
            future = self._generator.call(lambda: self._images.add(picture))
            return future.result(max(0.0, deadline - time.monotonic()))
        except ValueError as error:
            raise PackError(f"{place}: {error}", "data", place) from None
        except Late:
            future.cancel()
            raise PackError("The request took too long.", "timeout") from None

    def _check(self, place: str, url: str) -> None:
        """Raise a PackError for what a client may not let this machine read."""
        if url[:5].lower() == "data:":
            return
        if self._allow_urls and re.match("https?://", url, re.IGNORECASE):
            return

        remedy = "Send the image itself, or start the server with --allow-urls for HTTP URLs."
        if self._allow_urls:
            remedy = "Send the image itself, or its HTTP URL."
        raise PackError(
            f"{place}: an image must be a data: URL, as data:image/png;base64,…. {remedy}",
            "data",
            place,
        )
