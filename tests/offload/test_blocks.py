"""Blocks on disk compute what blocks in memory compute, to the bit, and are never in memory together."""

import os

import mlx.nn as nn
import pytest
from mlx.utils import tree_flatten

from mlx_packs import LoRAConfig, TrainConfig
from mlx_packs.adapters.attach import attach
from mlx_packs.adapters.dora import DoRA
from mlx_packs.adapters.lora import Attached
from mlx_packs.adapters.saved_modules import attach_method
from mlx_packs.errors import BaseChanged, ReadFailed, read_errors
from mlx_packs.nn.tables_on_disk import TableOnDisk
from mlx_packs.objectives.causal_lm import Head, split_head
from mlx_packs.offload.blocks import OffloadedBlocks, StoredBlock, state_of
from mlx_packs.offload.tables import piece_files, tables_of, write_pieces
from mlx_packs.optim import make_optimizer
from mlx_packs.packs.base import load_base
from mlx_packs.runtime import mx
from tests.helpers.checkpoints import write_dense, write_quantized, write_stored
from tests.helpers.families import family_base, randomized, targets_of
from tests.helpers.family_sweep import FAMILIES, sweep
from tests.helpers.models import base_of, model_of
from tests.helpers.packing import LIMIT, aligned_batch, packed_batch
from tests.helpers.steps import adapted, fill_b, lm_stepper, loss_and_gradients
from tests.helpers.trees import BATCH, tree_of
from tests.helpers.variants import slow_except


def offloaded(model: nn.Module, folder) -> OffloadedBlocks:
    """Write blocks and tables of a model to files, and let it read them."""
    stored = []
    for number, block in enumerate(model.layers):
        file = folder / f"{number}.safetensors"
        arrays = dict(tree_flatten(block.parameters()))
        mx.save_safetensors(str(file), arrays)
        stored.append(StoredBlock({file: arrays}, {file: state_of(file)}))
    tables = tables_of(model)
    blocks = OffloadedBlocks(model, stored)

    for path, table in tables.items():
        file = folder / f"{path}.safetensors"
        arrays = dict(tree_flatten(table.module.parameters()))
        mx.save_safetensors(str(file), arrays)
        pieces = piece_files(folder, path, len(table.module.weight)) if table.is_head else []
        write_pieces(pieces, arrays)
        table.put_on_disk({name: (file, name) for name in arrays}, pieces, blocks.count)
    return blocks


def check_step(folder, prepare, batch=BATCH, checked=lambda base: None) -> None:
    """Compare a step on a checkpoint in memory and on disk; `prepare` gives the head of a base."""
    results = []
    for on_disk in (False, True):
        mx.random.seed(0)
        base = load_base(folder, offload=on_disk)
        assert (base.blocks_on_disk is not None) == on_disk
        head = prepare(base)
        base.model.train()
        results.append(loss_and_gradients(base.model, head, [batch]))
        checked(base)
    check_bit_identical(results)


def recomputed(attached: Attached):
    """Recompute blocks of a base with adapters; return its head."""
    attached.recompute("block")
    return split_head(attached.model)


def check_bit_identical(results: list[tuple]) -> None:
    (expected_loss, expected), (loss, gradients) = results
    assert loss == expected_loss and set(gradients) == set(expected)
    assert any(gradient.any().item() for gradient in expected.values())
    for name, tensor in expected.items():
        assert mx.array_equal(gradients[name], tensor).item(), name


# Its model calls parts of a block; `put_on_disk` finds NaN in its logits, and rejects it.
NOT_BY_BLOCKS = ("iquestloopcoder",)
BY_BLOCKS = [family for family in FAMILIES if family not in NOT_BY_BLOCKS]


def adapted_family(family: str, folder=None) -> tuple[Attached, Head | None]:
    """A small base with adapters that recomputes its blocks; they are in files of a folder."""
    mx.random.seed(0)
    base = family_base(family)
    if folder:
        offloaded(base.model, folder)
    attached = attach(base, LoRAConfig(rank=2, target_modules=targets_of(base, 2)))
    randomized(attached)
    head = recomputed(attached)
    base.model.train()
    return attached, head


@pytest.mark.parametrize("family", sweep(BY_BLOCKS))
def test_the_step_of_every_family_is_bit_identical(family, tmp_path):
    results = []
    for folder in (None, tmp_path):
        attached, head = adapted_family(family, folder)
        results.append(loss_and_gradients(attached.model, head, [BATCH]))
    check_bit_identical(results)


@pytest.mark.nightly
@pytest.mark.parametrize("family", BY_BLOCKS)
def test_twenty_steps_of_every_family_are_bit_identical(family, tmp_path):
    results = []
    for folder in (None, tmp_path):
        attached, head = adapted_family(family, folder)
        optimizer = make_optimizer(TrainConfig(learning_rate=1e-3, iters=20))
        optimizer.init(attached.model.trainable_parameters())
        stepper = lm_stepper(attached.model, optimizer, head=head)
        losses = [stepper(BATCH, last=True, alone=True)[0] for _ in range(20)]
        results.append((losses, attached.tensors()))
    assert losses[-1] < losses[0]
    check_bit_identical(results)


STORED = {
    "dense": {},
    "affine": {"bits": 4, "shards": 2},
    "half": {"bits": 4, "dtype": mx.bfloat16},
}
FORMATS = [(kind, "transient") for kind in ("dense", "affine", "half", "nf4", "mxfp4")]
FORMATS += [("affine", "quantized"), ("mxfp4", "quantized")]
OFTEN = [("dense", "transient"), ("nf4", "transient"), ("affine", "quantized")]


@pytest.mark.slow
@pytest.mark.parametrize(("kind", "path"), slow_except(FORMATS, *OFTEN))
def test_the_step_on_every_format_is_bit_identical(kind, path, tmp_path):
    def prepare(base):
        attached = attach(base, LoRAConfig(rank=2), matmul_path=path)
        fill_b(attached)
        return recomputed(attached)

    if kind in STORED:
        folder = write_stored(tmp_path / "base", **STORED[kind])
    else:
        folder = write_quantized(tmp_path / "base", write_dense(tmp_path / "dense"), mode=kind)
    check_step(folder, prepare)


@pytest.mark.parametrize("batch", [packed_batch(), aligned_batch(), tree_of(BATCH, 2)])
def test_the_step_on_packed_rows_and_trees_is_bit_identical(batch, tmp_path):
    packed = None if len(batch.layout) and not isinstance(batch.layout, tuple) else LIMIT + 1
    folder = write_stored(tmp_path / "base", bits=4)
    check_step(folder, lambda base: adapted(base, -1, "block", packed)[1], batch)


def test_dora_reads_the_norms_of_weights_on_disk(tmp_path):
    def prepare(base):
        attached = DoRA().attach(base, LoRAConfig(rank=2), TrainConfig(method="dora"), "quantized")
        fill_b(attached)
        return recomputed(attached)

    check_step(write_stored(tmp_path / "base", bits=4), prepare)


@pytest.mark.parametrize("tied", [True, False])
def test_tables_with_adapters_and_those_trained_in_full_are_in_memory(tied, tmp_path):
    folder = write_stored(tmp_path / "base", bits=4, tie_word_embeddings=tied)
    targets = ("embed_tokens", "q_proj") if tied else ("lm_head", "q_proj")
    lora = LoRAConfig(
        rank=2, target_modules=targets, modules_to_save=() if tied else ("embed_tokens",)
    )
    train = TrainConfig(method="lora", recompute="block")

    def no_table_on_disk(base):
        assert not any(isinstance(module, TableOnDisk) for module in base.model.modules())

    def prepare(base):
        return recomputed(attach_method(base, lora, train, "quantized"))

    check_step(folder, prepare, checked=no_table_on_disk)


def test_blocks_that_are_kept_in_memory_are_not_read_again(tmp_path):
    model, _ = model_of("qwen3", num_hidden_layers=4)
    tokens = mx.array([[1, 2, 3]])
    expected = model(tokens)
    blocks = offloaded(model, tmp_path)
    read = []
    for count in (3, 4):
        blocks.keep_in_memory(count)
        assert blocks.on_disk == 4 - count
        before = blocks.bytes_read
        assert mx.array_equal(model(tokens), expected).item()
        read.append(blocks.bytes_read - before)
    assert read[0] - read[1] == blocks.block_bytes


def test_two_blocks_of_weights_are_in_memory_at_a_time(tmp_path):
    """36 blocks of 2.8 MB: a step holds the activations of `--recompute block` and few blocks."""
    sizes = {"hidden_size": 256, "intermediate_size": 512, "num_hidden_layers": 36}
    base = base_of("qwen3", **sizes)
    model = base.model
    mx.eval(model.parameters())
    blocks = offloaded(model, tmp_path)
    _, head = adapted(base, recompute="block")
    mx.synchronize()
    mx.clear_cache()
    held = mx.get_active_memory()
    mx.reset_peak_memory()
    loss_and_gradients(model, head, [BATCH])
    assert mx.get_peak_memory() - held < 6 * blocks.block_bytes


def test_files_that_change_or_vanish_are_an_error_of_one_line(tmp_path):
    model, _ = model_of("qwen3")
    offloaded(model, tmp_path)
    file = tmp_path / "1.safetensors"
    content = file.read_bytes()

    file.unlink()
    with pytest.raises(BaseChanged, match="cannot be read any more"):
        model(mx.array([[1]]))
    file.write_bytes(content + b" ")
    with pytest.raises(BaseChanged, match="changed"):
        model(mx.array([[1]]))


def test_a_read_that_fails_while_mlx_computes_is_an_error_of_one_line(tmp_path):
    model, _ = model_of("qwen3")
    offloaded(model, tmp_path)
    logits = model(mx.array([[1]]))
    os.truncate(tmp_path / "1.safetensors", 1000)
    with pytest.raises(ReadFailed), read_errors():
        mx.eval(logits)
