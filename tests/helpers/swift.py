"""mlx-swift-lm's reader of adapters, after its rules (LoRAContainer.from, load(into:))."""

import json
from pathlib import Path

import mlx.core as mx
import mlx.nn as nn
from mlx.utils import tree_flatten, tree_unflatten
from mlx_lm.tuner.dora import DoRALinear
from mlx_lm.tuner.lora import LoRALinear

_KINDS = {"lora": LoRALinear, "dora": DoRALinear}


def load_into(model: nn.Module, folder: Path) -> nn.Module:
    """Put the adapters of a folder on a model, as mlx-swift-lm does.

    Blocks are counted from the last one (``suffix(num_layers)``, which rejects a negative count); keys
    are matched within a block; linears alone get adapters; a tensor without a place is an error.
    """
    config = json.loads((folder / "adapter_config.json").read_text())
    count = config.get("num_layers")
    parameters = config["lora_parameters"]
    if not isinstance(count, int) or isinstance(count, bool) or count < 0:
        raise ValueError(f"num_layers is {count}")

    kind = _KINDS[config["fine_tune_type"]]
    settings = {"r": int(parameters["rank"]), "scale": float(parameters["scale"])}

    for block in model.layers[len(model.layers) - count :]:
        chosen = [
            (name, kind.from_base(module, **settings))
            for name, module in block.named_modules()
            if name in parameters["keys"] and isinstance(module, (nn.Linear, nn.QuantizedLinear))
        ]
        block.update_modules(tree_unflatten(chosen))

    tensors = mx.load(str(folder / "adapters.safetensors"))
    places = {name: tensor.shape for name, tensor in tree_flatten(model.parameters())}
    for name, tensor in tensors.items():
        if places.get(name) != tensor.shape:
            raise ValueError(f"{name} {tensor.shape} is unused: the model has {places.get(name)}")

    model.load_weights(list(tensors.items()), strict=False)
    return model
