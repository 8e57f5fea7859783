"""Rows of an embedding mapped from its file are bit-identical to those of the loaded one."""

import mlx.nn as nn
import numpy as np
import pytest

from mlx_packs import load_base
from mlx_packs.bases.mapped_embedding import MappedEmbedding, map_embedding
from mlx_packs.runtime import mx
from tests.helpers.checkpoints import write_checkpoint, write_quantized
from tests.helpers.models import nf4_embedding

TOKENS = np.array([[3, 4095, 0], [17, 3, 2000]], np.int32)
KEY = "model.embed_tokens.weight"


@pytest.mark.parametrize(
    ("dtype", "mode"),
    [(mx.float32, None), (mx.bfloat16, None), (mx.float16, "affine"), (mx.bfloat16, "affine")],
)
def test_mapped_rows_are_those_of_the_embedding(tmp_path, dtype, mode):
    folder = write_checkpoint(tmp_path / "base", "llama", dtype=dtype)
    if mode:
        folder = write_quantized(tmp_path / "packed", folder, mode=mode)
    embedding = load_base(folder).model.model.embed_tokens
    table = map_embedding(folder, KEY, embedding)
    assert isinstance(table, MappedEmbedding)
    rows = table(TOKENS)
    assert mx.array_equal(rows, embedding(mx.array(TOKENS)))
    assert rows.dtype == embedding(mx.array(TOKENS)).dtype
    assert all(isinstance(part, np.memmap) for part, _ in table._parts.values())


def test_the_reason_is_given_where_a_table_cannot_be_mapped(tmp_path):
    folder = write_checkpoint(tmp_path / "base", "llama")
    other = nn.Embedding(10, 64)
    assert map_embedding(folder, KEY, other) == f"{KEY} is stored in the files as F32 [4096, 64]"
    assert map_embedding(folder, None, other) == "its tensor in the files is not known"
    packed = nf4_embedding(other)
    assert map_embedding(folder, KEY, packed) == "rows of a NF4Embedding are not read from a file"
    assert "the files have no no.such.weight" in map_embedding(folder, "no.such.weight", other)
