"""Images that rows name: files of every kind that is read."""

import io
from pathlib import Path

from PIL import Image

from mlx_packs.errors import PackError
from mlx_packs.vision.pictures import ImageSource, open_picture
from tests.fuzz.kind import SUBJECT, Kind, library
from tests.fuzz.mutate import EDGES

KINDS = ("PNG", "JPEG", "WEBP", "BMP", "GIF", "TIFF")
_LIES = {"PNG": 16, "BMP": 18, "GIF": 6, "TIFF": 4, "WEBP": 24, "JPEG": 160}  # near the size


class ImageKind(Kind):
    """A small picture of each kind, with EXIF data where a kind has some."""

    name = "image"
    words = ("IDAT", "tRNS", "PLTE", "acTL", "VP8X", "VP8L", "ANIM", "Exif", "RIFF")
    file = "a.png"

    def make(self, folder):
        folder.mkdir()
        picture = Image.linear_gradient("L").resize((24, 16)).convert("RGB")
        exif = Image.Exif()
        exif[0x0112] = 6
        for kind in KINDS:
            file = io.BytesIO()
            picture.save(file, kind, exif=exif)
            (folder / f"a.{kind.lower()}").write_bytes(file.getvalue())
            open_picture(ImageSource(file.getvalue()))

    def mutate(self, case):
        """Change bytes of a file, most often of its header, or what it is."""
        rng = case.rng
        kind = rng.choice(KINDS)
        self.file = f"a.{kind.lower()}"
        if rng.random() < 0.03:
            return case.replace(self.file)
        if rng.random() < 0.6:
            return case.edit(self.file)

        data = bytearray(case.files[self.file])
        at = _LIES[kind] + rng.randrange(12)
        new = rng.choice((*EDGES, 1, 40, 16_000, 65_535)) % (1 << 16)
        data[at : at + 2] = new.to_bytes(2, rng.choice(("little", "big")))
        case.mutator.note(f"2 bytes at {at} are {new}")
        return case.write(self.file, bytes(data))

    def cheap(self):
        return [library(self.open, "open_picture")]

    def open(self):
        """Open the file as a row names it; a rejected one is an error of one line."""
        try:
            open_picture(ImageSource(self.file, Path(SUBJECT)))
        except ValueError as error:
            raise PackError(str(error)) from None
