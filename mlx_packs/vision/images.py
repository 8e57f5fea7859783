"""The images of a base model: what each is in a text, in tokens, and in a batch.

A token of an image is a number below zero that names one feature, so whatever treats tokens alike
(packing, common prefixes, truncation) treats images alike. `for_step` gives the features of a
batch to the model, and numbers their tokens by rows of these.
"""

import bisect
import math
import threading
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from weakref import WeakValueDictionary

import numpy as np

from .. import runtime
from ..bases.families import VISION_FAMILIES, image_token_of, mrope_sections
from ..bases.files import text_config
from ..errors import PackError
from ..nn.images import FIRST_IMAGE, ImageInputs, ImageRules, ShownImages, names_images
from ..runtime import mx
from .pictures import ImageSource, Picture, open_picture
from .store import IMAGES, read_features, tower_facts, write_features
from .tower import Features, Tower

_FEW_ROWS = 64  # features of a batch are padded to one of few numbers if steps are compiled
_NUMBERS = (1 << 31) - 1 + FIRST_IMAGE  # of features: a token is an int32
_IN_MEMORY = 512 << 20  # bytes of the features that `Images.keep_in_memory` keeps

Span = tuple[int, int]


@dataclass(frozen=True, eq=False)
class Image:
    """An image that texts have been encoded with. Its tokens have a meaning while it exists."""

    key: str
    owner: "Images"
    pixels: int  # the limit that it was read with, as `Images.max_pixels`
    text: str
    count: int  # features
    start: int  # the number of its first feature among all features of the process
    shifts: np.ndarray | None  # as in `Features`
    features: Features | None = None  # None if they are on disk

    @property
    def nbytes(self) -> int:
        """Bytes of the features that the image itself has."""
        if self.features is None:
            return 0
        return self.features.nbytes

    @property
    def label(self) -> str:
        """The image as people read it in a text."""
        return f"[image of {self.count} tokens]"

    @property
    def tokens(self) -> np.ndarray:
        """The tokens of the image, int32 [count]."""
        return (FIRST_IMAGE - np.arange(self.start, self.start + self.count)).astype(np.int32)


class _Table:
    """The images of this process that still exist, by their features."""

    def __init__(self) -> None:
        self._images: WeakValueDictionary[int, Image] = WeakValueDictionary()  # in order
        self._starts: list[int] = []  # in order; images that are gone included
        self._lock = threading.Lock()
        self._end = 0

    def add(self, count: int, make: Callable[[int], Image]) -> Image:
        """Return an image that is made from the first of N numbers that no image has had."""
        with self._lock:
            if self._end + count > _NUMBERS:
                raise PackError(
                    "this process has encoded images with 2 billion features, and has no numbers "
                    "for more. Start it again.",
                    "conflict",
                )
            if len(self._starts) > len(self._images):
                self._starts = list(self._images)
            self._starts.append(self._end)
            image = self._images[self._end] = make(self._end)
            self._end += count
            return image

    def of(self, token: int) -> Image:
        with self._lock:
            place = bisect.bisect_right(self._starts, FIRST_IMAGE - token) - 1
            return self._images[self._starts[place]]

    def all(self) -> list[Image]:
        """Return the images in the order of their numbers."""
        with self._lock:
            return list(self._images.values())


_TABLE = _Table()


@dataclass(eq=False)
class Images:
    """The images of one base model, and its vision tower while it is needed.

    Without a ``model`` images are counted and named, but their features are not computed.
    """

    path: Path
    config: Mapping[str, Any]
    model: Any = None
    max_pixels: int = 1_003_520  # of an image, which is made smaller; 0 leaves all as they are
    allow_urls: bool = False  # whether images are fetched from the network
    computed: int = 0  # images whose features were computed since `start_count`

    def __post_init__(self) -> None:
        self.family = VISION_FAMILIES[self.config["model_type"]]
        self.token = image_token_of(self.config)
        self._known: OrderedDict[tuple[str, int], Image] = OrderedDict()
        self._used: dict[tuple[str, int], Image] = {}  # since `start_count`
        self._most_bytes: int | None = None  # of known images; None where features are stored
        self._lock = threading.Lock()
        self._facts: dict[int, dict[str, Any]] = {}  # `tower_facts` by limit of pixels
        self._tower: Tower | None = None

        self._rules = image_rules(self.config)
        self._inputs = None
        if self.model is not None:
            self._inputs = ImageInputs(self.model, self._place_prompt, self._rules)

    @property
    def is_read_at_once(self) -> bool:
        """Whether a prompt with images is read in one part, and from its beginning."""
        return self._rules.sections is not None or self._rules.sees != "none"

    @property
    def why_no_trees(self) -> str | None:
        """Why rows that begin alike are not computed as trees, in a line; None if they are."""
        if self._known and self._rules.sees != "none":
            return "the tokens of an image see each other, and a prefix may end inside one"
        return None

    @property
    def recalled(self) -> int:
        """How many images were used whose features were known before."""
        return len(self._used) - self.computed

    def start_count(self) -> None:
        """Count images anew, as a run does that has a loaded base."""
        self._used = {}
        self.computed = 0

    def counts(self) -> dict[str, int]:
        """Return how many different images were used, and the tokens of all of them."""
        return {
            "count": len(self._used),
            "computed": self.computed,
            "recalled": self.recalled,
            "tokens": sum(image.count for image in self._used.values()),
        }

    def limit(self, max_pixels: int, allow_urls: bool) -> None:
        """Set what images may be: see --max-pixels and --allow-urls."""
        self.max_pixels = max_pixels
        self.allow_urls = allow_urls

    def keep_in_memory(self, most_bytes: int = _IN_MEMORY) -> None:
        """Keep the features of the images that were added last, and write none to disk.

        An older one exists as long as something else holds it. From now on `add` is called by
        one thread, which loads the tower, since MLX computes what is loaded there.
        """
        self._most_bytes = most_bytes
        self._tower = None

    @property
    def nbytes(self) -> int:
        """Bytes of features in memory, of all images that something holds."""
        return sum(image.nbytes for image in _TABLE.all() if image.owner is self)

    def add(self, source: ImageSource | Picture | Image | None) -> Image:
        """Return an image whose features are stored; a fault of it is a ValueError."""
        if source is None:
            raise ValueError("a message has a place for an image, but no image.")
        if isinstance(source, Image):
            return source

        picture = source
        if isinstance(source, ImageSource):
            picture = open_picture(source, self.allow_urls)
        pixels = self.max_pixels

        with self._lock:
            known = self._known.get((picture.key, pixels))
            if known is None:
                known = self._added(picture, pixels)
            self._remember(known)
        return known

    def _added(self, picture: Picture, pixels: int) -> Image:
        features = self._features_of(picture, pixels)
        in_memory = features if self._most_bytes is not None else None

        def make(start: int) -> Image:
            return Image(
                key=picture.key,
                owner=self,
                pixels=pixels,
                text=features.text,
                count=len(features.rows),
                start=start,
                shifts=features.shifts,
                features=in_memory,
            )

        return _TABLE.add(len(features.rows), make)

    def _features_of(self, picture: Picture, pixels: int) -> Features:
        """Return the features of an image from disk, or computed and maybe written there."""
        is_stored = self.model is not None and self._most_bytes is None
        if is_stored and (features := read_features(self._facts_of(pixels), picture.key)):
            return features

        if self._tower is None:
            self._tower = Tower(self.path, self.family, self.token)
        image = _resized(picture.image, pixels)
        if self.model is None:
            return self._tower.counted(image)

        features = self._tower.features(image)
        self.computed += 1
        if is_stored:
            write_features(self._facts_of(pixels), picture.key, features)
        return features

    def _remember(self, image: Image) -> None:
        key = image.key, image.pixels
        self._known[key] = image
        if self._most_bytes is None:
            self._used[key] = image
            return

        self._known.move_to_end(key)
        total = sum(each.nbytes for each in self._known.values())
        while total > self._most_bytes and len(self._known) > 1:
            _, oldest = self._known.popitem(last=False)
            total -= oldest.nbytes

    def close_tower(self) -> None:
        """Release the memory of the vision tower; the next image that is new loads it again."""
        self._tower = None
        mx.clear_cache()

    def features(self, image: Image) -> Features:
        """Return the features of an image, from memory or from disk."""
        if image.features is not None:
            return image.features

        if (features := read_features(self._facts_of(image.pixels), image.key)) is None:
            raise PackError(
                f"{IMAGES.path}: the features of an image are gone or damaged. Start again: those "
                "that are missing are computed.",
                "unreadable",
            )
        return features

    def expanded(
        self, text: str, spans: Sequence[Span], images: Sequence[Image]
    ) -> tuple[str, list[Span]]:
        """Return a rendered text with what each placeholder stands for, and its spans moved.

        A ValueError says that there are more or fewer placeholders than images.
        """
        placeholder = self.family.placeholder
        parts = text.split(placeholder)
        if len(parts) - 1 != len(images):
            raise ValueError(
                f"has {len(images)} images, but its text has {placeholder} {len(parts) - 1} times."
            )

        edges = []  # where each placeholder ends in the text, and how much longer it becomes
        at = 0
        for part, image in zip(parts, images, strict=False):
            at += len(part) + len(placeholder)
            edges.append((at, len(image.text) - len(placeholder)))

        def moved(place: int) -> int:
            return place + sum(added for end, added in edges if end <= place)

        written = [parts[0]]
        for image, part in zip(images, parts[1:], strict=True):
            written += [image.text, part]
        return "".join(written), [(moved(begin), moved(end)) for begin, end in spans]

    def numbered(self, tokens: Sequence[int], images: Sequence[Image]) -> list[int]:
        """Return tokens of an expanded text in which each token of an image names its feature."""
        places = [i for i, token in enumerate(tokens) if token == self.token]
        own = [int(token) for image in images for token in image.tokens]
        if len(places) != len(own):
            raise ValueError(
                f"has {len(places)} tokens of images where its {len(images)} images have "
                f"{len(own)} features."
            )

        numbered = list(tokens)
        for place, token in zip(places, own, strict=True):
            numbered[place] = token
        return numbered

    def inside(self, tokens: Sequence[int], images: Sequence[Image]) -> np.ndarray:
        """Return which `numbered` tokens stand for images, with those between its own, bool [L]."""
        inside = np.zeros(len(tokens), bool)
        places = np.flatnonzero(np.array(tokens) <= FIRST_IMAGE)
        start = 0
        for image in images:
            stop = start + len(image.tokens)
            inside[places[start] : places[stop - 1] + 1] = True
            start = stop
        return inside

    def prompt(self, tokenizer: Any, text: str, sources: Sequence[ImageSource]) -> list[int]:
        """Return the tokens of a rendered prompt."""
        images = [self.add(source) for source in sources]
        expanded, _ = self.expanded(text, [], images)
        plain = getattr(tokenizer, "_tokenizer", tokenizer)
        return self.numbered(plain.encode(expanded, add_special_tokens=False), images)

    def readable(self, tokenizer: Any, tokens: Sequence[int]) -> str:
        """Return tokens as a text in which each image is named once."""
        written = []
        text: list[int] = []
        image: Image | None = None
        for token in tokens:
            if token > FIRST_IMAGE:
                text.append(token)
                continue
            if image is None or not _is_of(token, image):
                image = _TABLE.of(token)
                written += [tokenizer.decode(text), image.label]
                text = []

        return "".join([*written, tokenizer.decode(text)])

    def _facts_of(self, pixels: int) -> dict[str, Any]:
        if pixels not in self._facts:
            self._facts[pixels] = tower_facts(self.path, pixels)
        return self._facts[pixels]

    def _place_prompt(self, tokens: mx.array) -> mx.array:
        """Return the tokens of a prompt for the model, which is shown its images."""
        values = np.array(tokens)
        if not names_images(values):
            return tokens
        return mx.array(for_step({"tokens": values})["tokens"])


def image_rules(config: Mapping[str, Any]) -> ImageRules:
    """Return how the language model of a checkpoint treats images."""
    family = VISION_FAMILIES[config["model_type"]]
    text = text_config(dict(config))

    scale = text["hidden_size"] ** -0.5 if family.scaled else 1.0

    sees = family.sees
    if sees == "config":
        is_set = text.get("use_bidirectional_attention") == "vision"
        sees = "window" if is_set else "none"

    levels = config["vision_config"].get("deepstack_visual_indexes") or ()
    sections = mrope_sections(config)
    return ImageRules(scale, sections, family.interleaved, len(levels), sees)


def images_in(tokens: np.ndarray) -> list[Image]:
    """Return the images that tokens name, in order, each once for each run of its tokens."""
    images: list[Image] = []
    for token in tokens[tokens <= FIRST_IMAGE].tolist():
        if not images or not _is_of(token, images[-1]):
            images.append(_TABLE.of(token))
    return images


def _is_of(token: int, image: Image) -> bool:
    return image.start <= FIRST_IMAGE - token < image.start + image.count


def for_step(inputs: Mapping[str, Any]) -> dict[str, Any]:
    """Show the model the images of a batch; return its inputs with rows of what is shown.

    ``inputs`` has int arrays of tokens among others.
    """
    named = {name: values for name, values in inputs.items() if names_images(values)}
    used = np.unique(np.concatenate([v[v <= FIRST_IMAGE] for v in named.values()]))
    images = images_in(used[::-1])
    owner = images[0].owner

    features = [owner.features(image) for image in images]
    ends = np.cumsum([0, *(image.count for image in images)])
    numbered = {**inputs, **{name: _local(v, images, ends[:-1]) for name, v in named.items()}}

    rows = mx.concatenate([each.rows for each in features])
    levels = None
    if features[0].levels is not None:
        levels = _padded(mx.concatenate([each.levels for each in features], axis=1), axis=1)
    shifts = None
    if owner._rules.sections is not None:
        shifts = _padded(mx.concatenate([mx.array(image.shifts) for image in images]))
    begins = np.zeros(len(rows), bool)
    begins[ends[:-1]] = True
    owner._inputs.show(ShownImages(_padded(rows), _padded(mx.array(begins)), levels, shifts))
    return numbered


def _local(tokens: np.ndarray, images: list[Image], rows: np.ndarray) -> np.ndarray:
    """Return tokens with ``-1 - row`` of features; ``rows`` are the first ones of the images."""
    starts = np.array([image.start for image in images])
    is_image = tokens <= FIRST_IMAGE
    numbers = FIRST_IMAGE - tokens[is_image]
    which = np.searchsorted(starts, numbers, "right") - 1

    local = tokens.copy()
    local[is_image] = -1 - (rows[which] + numbers - starts[which])
    return local


def _resized(image: Any, most_pixels: int) -> Any:
    """Return a PIL image of the same shape with at most so many pixels; 0 is any number."""
    width, height = image.size
    if not most_pixels or width * height <= most_pixels:
        return image

    scale = math.sqrt(most_pixels / (width * height))
    return image.resize((max(1, int(width * scale)), max(1, int(height * scale))))


def _padded(features: mx.array, axis: int = 0) -> mx.array:
    """Return features with zeros up to one of few numbers of rows, if steps are compiled."""
    if not runtime.COMPILES:
        return features
    rows = _FEW_ROWS
    while rows < features.shape[axis]:
        rows = rows * 3 // 2 // 8 * 8
    widths = [(0, 0)] * features.ndim
    widths[axis] = (0, rows - features.shape[axis])
    return mx.pad(features, widths)
