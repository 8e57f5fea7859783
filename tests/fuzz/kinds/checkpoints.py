"""Checkpoints of base models, which strangers made: their config, tensors, states and records."""

import json
import shutil
from pathlib import Path

import mlx.core as mx
import numpy as np

from mlx_packs.bases.files import RECORD
from mlx_packs.bases.loading import lazy_base
from mlx_packs.config.choices import ARCHITECTURES
from tests.fuzz.kind import SUBJECT, Kind, command, library
from tests.fuzz.subjects import resealed, write_base
from tests.helpers.bitsandbytes import write_bitsandbytes
from tests.helpers.checkpoints import write_quantized
from tests.helpers.fp4 import write_compressed

CONFIG, FILE, INDEX = "config.json", "model.safetensors", "model.safetensors.index.json"
SHARDS = ("model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors")
STATE = ".quant_state.bitsandbytes__"
PLAN = command("plan", "--model", SUBJECT, "--memory", "1", "--batch-size", "1")
GENERATE = ("generate", "--model", SUBJECT, "--prompt", "a", "--max-tokens", "1", "--raw")
MORE = {
    "quantization": {"group_size": 32, "bits": 4, "mode": "affine"},
    "quantization_config": {"quant_method": "bitsandbytes", "load_in_4bit": True},
    "text_config": {"vocab_size": 307, "model_type": "qwen3"},
    "rope_scaling": {"type": "linear", "factor": 2.0},
    "torch_dtype": "bfloat16",
    "model_file": "model.py",
    "auto_map": {"AutoModelForCausalLM": "model.Model", "AutoTokenizer": "model.Tokenizer"},
    "architectures": ["Qwen3ForCausalLM"],
    "sliding_window": 16,
}
FAMILIES = "llama gemma2 gemma3_text phi3 gpt2 qwen2 qwen3_moe mixtral mamba qwen3_next olmo2"
FAMILIES = [*FAMILIES.split(), "deepseek_v3"]


class CheckpointKind(Kind):
    """A base: planned, loaded, and now and then generated from, quantized or trained on."""

    def cheap(self):
        return [PLAN, library(lambda: lazy_base(SUBJECT), "lazy_base")]

    def whole(self):
        return [command(*GENERATE)]


class BaseConfig(CheckpointKind):
    """A checkpoint whose config.json is mutated: values that are there, or that may be."""

    name = "base-config"
    words = (*MORE, *FAMILIES, *ARCHITECTURES, "num_hidden_layers", "hidden_size", "bert")
    parts = {CONFIG: 1}

    def make(self, folder):
        write_base(folder)

    def change(self, case, name):
        more = case.some(MORE)
        if case.rng.random() < 0.15:
            more["model_type"] = case.rng.choice(FAMILIES)
        case.edit(name, **more)


class BaseDense(CheckpointKind):
    """A dense checkpoint of two shards."""

    name = "base-dense"
    words = ("model.embed_tokens.weight", "lm_head.weight", "model.layers.2.mlp.up_proj.weight")
    words += SHARDS[:1]
    parts = dict.fromkeys(SHARDS, 4) | {INDEX: 2}

    def make(self, folder):
        file = write_base(folder, mx.bfloat16) / FILE
        tensors = sorted(mx.load(str(file)).items())
        half, places = len(tensors) // 2, {}
        for shard, part in zip(SHARDS, (tensors[:half], tensors[half:]), strict=True):
            mx.save_safetensors(str(folder / shard), dict(part), {"format": "mlx"})
            places |= {name: shard for name, _ in part}
        file.unlink()
        (folder / INDEX).write_text(json.dumps({"metadata": {}, "weight_map": places}))


class BaseSt(CheckpointKind):
    """A quantized checkpoint without the record of `packs quantize`."""

    name = "base-st"
    words = "quantization bits group_size mode mxfp4 nf4 scales biases".split()
    parts = {FILE: 4, CONFIG: 1}

    def make(self, folder):
        source = write_base(folder.with_name("dense"))
        write_quantized(folder, source)
        (folder / "quantization.json").unlink()
        shutil.rmtree(source)


class BaseRec(CheckpointKind):
    """A folder of `packs quantize` with its record, which has the hashes of changed files too."""

    name = "base-rec"
    words = ("files", "bytes", "sha256", "format", "quantization", FILE, CONFIG)
    parts = {RECORD: 5, FILE: 3, CONFIG: 2}

    def make(self, folder):
        source = write_base(folder.with_name("dense"))
        write_quantized(folder, source, mode="nf4")
        shutil.rmtree(source)

    def change(self, case, name):
        case.edit(name)
        if name != RECORD:
            data = Path(SUBJECT, name).read_bytes()
            case.write(RECORD, resealed(case.files[RECORD], {name: data}))

    def cheap(self):
        inspect = ("inspect", SUBJECT)
        return [*super().cheap(), command(*inspect), command(*inspect, "--json")]


class BaseFp4(CheckpointKind):
    """A checkpoint in nvfp4 as compressed-tensors writes it."""

    name = "base-fp4"
    words = "format config_groups weights input_activations num_bits type symmetric dynamic".split()
    words += ["weight_packed", "weight_scale", "weight_global_scale", "mxfp4-pack-quantized"]
    parts = {FILE: 3, CONFIG: 3}

    def make(self, folder):
        write_compressed(folder, "nvfp4", num_hidden_layers=1)


class BaseBnb(CheckpointKind):
    """A checkpoint as bitsandbytes writes it."""

    name = "base-bnb"
    words = "nf4 fp4 blocksize nested_blocksize nested_offset float32 absmax shape".split()
    parts = {FILE: 9, CONFIG: 2}

    def make(self, folder):
        source = write_base(folder.with_name("dense"), mx.bfloat16)
        write_bitsandbytes(source, folder)
        shutil.rmtree(source)
        self.tensors = mx.load(str(folder / FILE))
        mx.eval(self.tensors)

    def change(self, case, name):
        if name != FILE or case.rng.random() < 0.5:
            return case.edit(name)
        tensor = case.rng.choice([tensor for tensor in self.tensors if STATE in tensor])
        case.mutator.note(tensor)
        state = json.loads(np.array(self.tensors[tensor]).tobytes())
        text = case.mutator.json(json.dumps(state).encode()) or b" "
        tensors = self.tensors | {tensor: mx.array(np.frombuffer(text, np.uint8))}
        case.write(FILE, b"")
        return mx.save_safetensors(f"{SUBJECT}/{FILE}", tensors, {"format": "pt"})
