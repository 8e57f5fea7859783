"""Loops that the unmodified SDK of Tinker drives; each is a process of its own.

python -m benchmarks.real.tinker_client LOOP URL FILE    # started by `benchmarks.real.tinker`
"""

import json
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import tinker
from tinker import types

Row = tuple[list[int], int]  # its tokens, and where its targets start


def service(url: str) -> tinker.ServiceClient:
    """Return a client of a server."""
    return tinker.ServiceClient(base_url=url, api_key="tml-benchmark")


def datum(row: Row, weight: float) -> types.Datum:
    """Return a row whose targets have this weight each."""
    tokens, first = row
    weights = [0.0] * (first - 1) + [weight] * (len(tokens) - first)
    return types.Datum(
        model_input=types.ModelInput.from_ints(tokens[:-1]),
        loss_fn_inputs={"target_tokens": tokens[1:], "weights": weights},
    )


def supervised(url: str, settings: dict[str, Any]) -> dict[str, Any]:
    """Train on batches by cross_entropy, one for each step; save the result."""
    client = service(url).create_lora_training_client("base", **settings["lora"]).result()
    adam = types.AdamParams(**settings["adam"])
    values = []
    began = time.monotonic()
    for batch in settings["batches"]:
        targets = sum(len(tokens) - first for tokens, first in batch)
        data = [datum(row, 1 / targets) for row in batch]
        forward = client.forward_backward(data, "cross_entropy")
        client.optim_step(adam).result()
        values.append(forward.result().metrics["loss:sum"])

    seconds = time.monotonic() - began
    path = client.save_state("supervised").result().path
    return {"losses": values, "seconds": seconds, "path": path}


def reinforce(url: str, settings: dict[str, Any]) -> dict[str, Any]:
    """Train on a saved model's own samples by importance_sampling; the reward is a right answer."""
    client = service(url).create_training_client_from_state(settings["path"]).result()
    adam = types.AdamParams(**settings["adam"])
    rewards = []
    for step in range(settings["steps"]):
        sampler = client.save_weights_and_get_sampling_client().result()
        data = []
        gains = []
        for row in settings["rows"]:
            of_row, gain = _scored(sampler, row, settings["samples"], step)
            data += of_row
            gains.append(gain)

        rewards.append(sum(gains) / len(gains))
        if data:
            forward = client.forward_backward(data, "importance_sampling")
            client.optim_step(adam).result()
            forward.result()
    return {"rewards": rewards}


def repeated(url: str, settings: dict[str, Any]) -> dict[str, Any]:
    """Train, sample, save and leave for some seconds; return the losses of each time."""
    rest = tinker.RestClient(base_url=url, api_key="tml-benchmark")
    until = time.monotonic() + settings["seconds"]
    results = []
    while not results or time.monotonic() < until:
        own = service(url)
        client = own.create_lora_training_client("base", **settings["lora"]).result()
        losses = []
        for batch in settings["batches"]:
            forward = client.forward_backward([datum(row, 1.0) for row in batch], "cross_entropy")
            client.optim_step(types.AdamParams(**settings["adam"])).result()
            losses.append(forward.result().metrics["loss:sum"])

        sampler = client.save_weights_and_get_sampling_client().result()
        params = types.SamplingParams(max_tokens=8, temperature=0, stop=[])
        request = types.ModelInput.from_ints(settings["batches"][0][0][0])
        (sample,) = sampler.sample(request, 1, params).result().sequences
        path = client.save_state("repeated").result().path
        rest.delete_checkpoint_from_tinker_path(path).result()
        own.close("success").result()
        results.append({"losses": losses, "sample": list(sample.tokens)})
    return {"results": results}


def _scored(sampler: Any, row: Row, count: int, seed: int) -> tuple[list[types.Datum], float]:
    """Return samples of a row with their advantages, and their mean reward.

    Without a difference between their rewards there is nothing to learn from them.
    """
    tokens, first = row
    prompt, answer = tokens[:first], tokens[first:]
    params = types.SamplingParams(max_tokens=len(answer), temperature=1.0, seed=seed, stop=[])
    request = types.ModelInput.from_ints(prompt)
    sequences = sampler.sample(request, count, params).result().sequences
    rewards = [float(list(each.tokens) == answer) for each in sequences]
    mean = sum(rewards) / count
    if mean in (0, 1):
        return [], mean

    data = []
    for each, reward in zip(sequences, rewards, strict=True):
        advantage = (reward - mean) / count
        data.append(_sample(prompt, each, advantage))
    return data, mean


def _sample(prompt: Sequence[int], sampled: Any, advantage: float) -> types.Datum:
    """Return a sampled sequence whose tokens all have this advantage."""
    before = [0.0] * (len(prompt) - 1)
    tokens = list(sampled.tokens)
    return types.Datum(
        model_input=types.ModelInput.from_ints([*prompt, *tokens[:-1]]),
        loss_fn_inputs={
            "target_tokens": [*prompt[1:], *tokens],
            "logprobs": before + list(sampled.logprobs),
            "advantages": before + [advantage] * len(tokens),
        },
    )


def main(arguments: Sequence[str]) -> int:
    loop, url, file = arguments
    loops = {each.__name__: each for each in (supervised, reinforce, repeated)}
    settings = json.loads(Path(file).read_text(encoding="utf-8"))
    print(json.dumps(loops[loop](url, settings)))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
