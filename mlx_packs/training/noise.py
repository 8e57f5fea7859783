"""Noise on the embeddings of tokens in training (NEFTune, https://arxiv.org/abs/2310.05914)."""

from ..adapters.trainable import Trainable
from ..bases.geometry import is_embedding
from ..errors import PackError
from ..nn.frozen_weight import frozen_weight
from ..nn.quantized import bare_module
from ..nn.wrapped import NoisyEmbedding, trained_module


def add_noise(trainable: Trainable, alpha: float) -> None:
    """Put noise on the embeddings of the tokens, in training, until the trainable is detached."""
    vocab_size = trainable.base.vocab_size
    noisy = {}
    for path, module in trainable.model.named_modules():  # a module comes before those inside it
        table = bare_module(trained_module(module))
        is_inside = path.rpartition(".")[0] in noisy
        if not is_inside and is_embedding(table) and frozen_weight(table).shape[0] == vocab_size:
            noisy[path] = NoisyEmbedding(module, alpha)

    if not noisy:
        raise PackError(
            f"--neftune-noise-alpha: {trainable.base.name} has no embedding that it can be added "
            "to.",
            "unsupported",
        )
    trainable.swap(list(noisy.items()))
