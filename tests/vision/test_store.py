"""The store of features: what comes back is what was put, or nothing."""

import numpy as np
import pytest

from mlx_packs.runtime import mx
from mlx_packs.vision.store import IMAGES, read_features, write_features
from mlx_packs.vision.tower import Features

FACTS = {"base": "sha256:1", "max_pixels": 100}


@pytest.mark.parametrize("dtype", [mx.float32, mx.bfloat16])
@pytest.mark.parametrize("is_full", [True, False])
def test_features_come_back_as_they_were(tmp_path, monkeypatch, dtype, is_full):
    monkeypatch.setenv("MLX_PACKS_CACHE", str(tmp_path))
    rows = mx.random.normal((3, 4)).astype(dtype)
    more = {}
    if is_full:
        levels = mx.random.normal((2, 3, 4)).astype(dtype)
        more = {"levels": levels, "shifts": np.ones((3, 4), np.float32)}

    write_features(FACTS, "key", Features("<image>", rows, **more))
    features = read_features(FACTS, "key")
    assert features.text == "<image>"
    assert features.rows.dtype == dtype and mx.array_equal(features.rows, rows).item()
    if is_full:
        assert features.levels.dtype == dtype and mx.array_equal(features.levels, levels).item()
        assert features.shifts.dtype == np.float32 and features.shifts.tolist() == [[1] * 4] * 3
    assert read_features({**FACTS, "max_pixels": 99}, "key") is None


def test_a_damaged_file_is_no_feature(tmp_path, monkeypatch):
    monkeypatch.setenv("MLX_PACKS_CACHE", str(tmp_path))
    write_features(FACTS, "key", Features("x", mx.ones((3, 4))))
    (file,) = IMAGES.path.iterdir()
    content = file.read_bytes()
    file.unlink()
    file.write_bytes(content[:-40] + bytes(40))
    assert read_features(FACTS, "key") is None
