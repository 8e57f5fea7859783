"""Requests of forward passes from bytes to padded batches, and what is wrong with some."""

import numpy as np
import pytest

from mlx_packs.errors import PackError
from mlx_packs.serving.train import wire
from mlx_packs.serving.train.batches import RowLimits, batch_of, checked_row, split_passes
from mlx_packs.serving.train.losses import LOSSES, settings_of
from mlx_packs.serving.train.wire import MESSAGES, RawDatum, read_forward_request
from tests.helpers.tinker import forward_request

LIMITS = RowLimits(context=6, vocab_size=50)
GOOD = {"target_tokens": [2, 3], "weights": [0.5, 1.0]}
SAMPLED = {"target_tokens": [2, 3], "logprobs": [-1.0, -2.0], "advantages": [1.0, 0.0]}


def row_of(tokens: list[int], inputs: dict, loss: str = "cross_entropy", **settings):
    request = read_forward_request(forward_request("m", [(tokens, inputs)], loss, **settings))
    chosen = settings_of(LOSSES[loss], request.settings)
    return checked_row(0, request.data[0], LOSSES[loss], chosen, LIMITS)


def test_a_row():
    row = row_of([1, 2], GOOD)
    assert row.tokens.tolist() == [1, 2] and row.targets.tolist() == [2, 3]
    assert row.inputs["weights"].tolist() == [0.5, 1.0]
    assert row_of([1, 2], {"target_tokens": [2, 3]}).inputs == {"weights": 1.0}

    row = row_of([1, 2], SAMPLED, "ppo", clip_low_threshold=0.5)
    assert row.inputs["clip_low_threshold"] == 0.5 and row.inputs["clip_high_threshold"] == 1.2


@pytest.mark.parametrize(
    ("tokens", "inputs", "loss", "message"),
    [
        ([], GOOD, "cross_entropy", "has 0 tokens"),
        ([1] * 7, GOOD, "cross_entropy", "1 to 6, the context"),
        ([1, 50], GOOD, "cross_entropy", "token 50 is outside"),
        ([1, -1], GOOD, "cross_entropy", "token -1 is outside"),
        ([1, 2], {"target_tokens": [2, 50]}, "cross_entropy", "token 50 is outside"),
        ([1, 2], {"target_tokens": [2.0, 3.0]}, "cross_entropy", "must be integers"),
        ([1, 2], {"target_tokens": [2, 3, 4]}, "cross_entropy", "a target for each"),
        ([1, 2], {"weights": [1.0, 1.0]}, "cross_entropy", "target_tokens: is required"),
        ([1, 2], GOOD | {"weights": [1.0]}, "cross_entropy", r"weights: has the shape \[1\]"),
        ([1, 2], GOOD | {"weight": [1.0, 1.0]}, "cross_entropy", "weight: this loss does not"),
        ([1, 2], SAMPLED | {"advantages": [np.nan, 1.0]}, "ppo", "advantages: has NaN"),
        ([1, 2], GOOD, "importance_sampling", "weights: this loss does not"),
        ([1, 2], {"target_tokens": [2, 3]}, "ppo", "logprobs: is required"),
        ([1, 2], SAMPLED | {"sequence_ratio_mask": [1.0, 1.0]}, "gspo", "in loss_fn_config"),
    ],
)
def test_faulty_rows(tokens, inputs, loss, message):
    with pytest.raises(PackError, match=message):
        row_of(tokens, inputs, loss)


def sparse_request(starts: list[int], columns: list[int], shape: tuple[int, ...] = (2, 3)) -> bytes:
    request = MESSAGES["ForwardBackwardRequest"](model_id="m", loss_fn="cross_entropy")
    datum = request.data.add()
    datum.model_input.add().encoded_text.tokens = np.array([1, 2], np.int32).tobytes()
    value = datum.loss_fn_inputs.add(key="target_tokens").value
    value.dtype = 2
    value.shape.extend(shape)
    value.sparse_csr.values = np.array([7, 8, 9]).tobytes()
    value.sparse_csr.crow_indices = np.array(starts).tobytes()
    value.sparse_csr.col_indices = np.array(columns).tobytes()
    return request.SerializeToString()


def test_sparse_targets():
    (datum,) = read_forward_request(sparse_request([0, 1, 3], [2, 0, 1])).data
    assert datum.inputs["target_tokens"].tolist() == [[0, 0, 7], [8, 9, 0]]
    row = checked_row(0, datum, LOSSES["cross_entropy"], {}, LIMITS)
    batch = batch_of([row])
    assert row.size == 2 and batch.arrays["positions"].tolist() == [0, 1]
    assert batch.arrays["owners"].tolist() == [0] * 6
    assert batch.targets[0].tolist() == [[0, 0, 7], [8, 9, 0]]


@pytest.mark.parametrize(
    "faulty",
    [
        b"\xff\xff",
        sparse_request([0, 1, 4], [2, 0, 1]),
        sparse_request([1, 1, 3], [2, 0, 1]),
        sparse_request([0, 3, 1], [2, 0, 1]),
        sparse_request([0, 1, 3], [3, 0, 1]),
        sparse_request([0, 1, 3], [2, 0]),
        sparse_request([0, 1, 3], [2, 0, 1], (6,)),
        sparse_request([0, 1, 3], [2, 0, 1], (2, 1 << 40)),
        sparse_request([0, 1, 3], [2, 0, 1], (-2, 3)),
    ],
)
def test_faulty_bytes(faulty):
    with pytest.raises(PackError):
        read_forward_request(faulty)


def test_tensors_that_would_grow_too_large(monkeypatch):
    with pytest.raises(PackError, match="1024 is the most"):
        read_forward_request(sparse_request([0, 1, 3], [2, 0, 1], (2, 1025)))
    with pytest.raises(PackError, match="shape: has a length of 3"):
        read_forward_request(sparse_request([0, 1, 3], [2, 0, 1], (2, 3, 1)))

    monkeypatch.setattr(wire, "_MOST_NUMBERS", 11)
    datum = ([1, 2], {"target_tokens": [[1, 2, 3], [4, 5, 6]]})
    assert read_forward_request(forward_request("m", [datum])).data
    with pytest.raises(PackError, match="has 12 numbers"):
        read_forward_request(forward_request("m", [datum, datum]))


def test_images_are_rejected():
    request = MESSAGES["ForwardBackwardRequest"](model_id="m")
    image = b"\x12\x03\x0a\x01x"  # the field 2 of a chunk, a message whose field 1 is "x"
    request.data.add().model_input.add().MergeFromString(image)
    with pytest.raises(PackError, match="images"):
        read_forward_request(request.SerializeToString())


def row_of_length(length: int):
    datum = RawDatum(np.ones(length, np.int32), {"target_tokens": np.ones(length, np.int64)})
    return checked_row(0, datum, LOSSES["cross_entropy"], {}, RowLimits(4096, 50))


def passes(most: int, *lengths: int) -> list[list[int]]:
    return split_passes([row_of_length(length) for length in lengths], most)


def test_the_rows_of_each_pass():
    """Padding counts, a long row is a pass by itself, and a large pass has little padding."""
    assert passes(12, 2, 6, 5) == [[1, 2], [0]]
    assert passes(12, 1, 13) == [[1], [0]]
    assert passes(256, 120, 8) == [[0, 1]]
    assert passes(2048, 84, 300) == [[1], [0]]
    assert passes(2048, 300, 160, 300) == [[0, 2, 1]]


def test_rows_of_a_pass_are_padded_to_one_width():
    batch = batch_of([row_of([1] * n, {"target_tokens": [2] * n}) for n in (6, 5)])
    assert batch.arrays["tokens"].shape == (2, 8) and batch.arrays["tokens"][1, 5] == 0
    assert batch.arrays["positions"].tolist() == [0, 1, 2, 3, 4, 5, 8, 9, 10, 11, 12]
    assert batch.arrays["owners"].tolist() == [0] * 6 + [1] * 5
    assert batch.inputs["weights"].tolist() == [1.0] * 11
