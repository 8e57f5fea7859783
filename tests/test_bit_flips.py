"""One flipped bit in any file of a checkpoint, a pack or a base is noticed, or harmless."""

import random
from collections.abc import Callable, Iterable
from pathlib import Path

import numpy as np
import pytest

from mlx_packs import Pack, load_base
from mlx_packs.errors import PackError
from mlx_packs.packs import compatibility, making
from mlx_packs.runtime import mx
from mlx_packs.training.run_folder import RunFolder
from mlx_packs.training.state import read_training_state
from tests.helpers.checkpoints import attached_logits, write_checkpoint
from tests.helpers.damage import bits_to_flip, flip_bit
from tests.helpers.packs import random_pack

SAMPLE, ALL = 14, 340  # flips of the files of each kind, in the default suite and in the slow set


def check_flips(files: Iterable[Path], count: int, result: Callable[[], object]) -> int:
    """Flip bits of files one at a time: ``result`` stays, or raises a PackError of one line.

    Return how many flips were noticed.
    """
    files, rng, noticed = sorted(files), random.Random(18), 0
    expected = result()
    for file in files:
        for bit in bits_to_flip(file, -(-count // len(files)), rng):
            flip_bit(file, bit)
            try:
                assert result() == expected, f"{file.name}: bit {bit} changed the result"
            except PackError as error:
                assert "\n" not in error.message
                noticed += 1
            finally:
                flip_bit(file, bit)
    assert result() == expected
    return noticed


def tensors_of(file: Path) -> dict[str, tuple]:
    """Return the bytes of the tensors in a file, with dtype and shape."""
    return {
        n: (str(t.dtype), t.shape, np.array(t.reshape(-1).view(mx.uint8)).tobytes())
        for n, t in mx.load(str(file)).items()
    }


COUNTS = [SAMPLE, pytest.param(ALL, marks=pytest.mark.slow)]


@pytest.mark.parametrize("count", COUNTS)
def test_flips_in_a_checkpoint_are_noticed_or_harmless(trained_copy, count):
    run = trained_copy / "o-run"
    newest = run / "step-000002"

    def loaded():
        if RunFolder(run).latest_checkpoint() != newest:
            raise PackError(f"falls back to {RunFolder(run).latest_checkpoint().name}")
        arrays = {file.name: tensors_of(file) for file in newest.glob("*.safetensors")}
        return read_training_state(newest), arrays

    assert check_flips(newest.iterdir(), count, loaded) > 0.9 * count


@pytest.mark.parametrize("count", COUNTS)
def test_flips_in_the_identity_of_a_run_are_noticed(trained_copy, count):
    run = trained_copy / "o-run"
    names = set(RunFolder(run).check_resumable())  # the hash's may flip into one that nobody reads

    def identity():
        read = RunFolder(run).check_resumable()
        return {name: value for name, value in read.items() if name in names}

    assert check_flips([run / "config.json"], count, identity) > 0.8 * count


@pytest.mark.parametrize("count", COUNTS)
def test_flips_in_the_metrics_of_a_run_stop_nothing(trained_copy, count):
    file = trained_copy / "o-run" / "metrics.jsonl"
    text, lines = file.read_bytes(), RunFolder(file.parent).metrics_until(2)
    for bit in bits_to_flip(file, count // 2, random.Random(18)):
        file.write_bytes(text)
        flip_bit(file, bit)
        read = RunFolder(file.parent).metrics_until(2)
        assert sum(line in lines for line in read) >= len(lines) - 2  # a newline may join two


@pytest.mark.parametrize("count", COUNTS)
def test_flips_in_a_pack_are_noticed_or_harmless(trained_copy, count):
    folder = trained_copy / "o"
    names = set(Pack.open(folder).manifest)

    def opened():
        pack = Pack.open(folder)
        pack.load_tensors()
        manifest = {name: value for name, value in pack.manifest.items() if name in names}
        return manifest, tensors_of(folder / "adapters.safetensors")

    assert check_flips(folder.iterdir(), count, opened) > 0.9 * count


@pytest.mark.parametrize("count", COUNTS)
def test_flips_in_a_base_are_noticed_or_harmless(tmp_path, monkeypatch, count):
    base = write_checkpoint(tmp_path / "base")
    pack = random_pack(load_base(str(base))).save(tmp_path / "p")
    expected = attached_logits(pack, base).tobytes()

    def changed(where, path, names):
        raise PackError(f"{where}: was trained with another {names[0]}")

    monkeypatch.setattr(compatibility, "say_changed", changed)

    def computed():
        making.check_fit(pack, str(base))
        return attached_logits(pack, base).tobytes() == expected

    assert check_flips(base.iterdir(), count, computed) > 0.9 * count
