"""Scenarios of the Tinker SDK, each in a process of its own: ``python -m … SCENARIO URL JSON``."""

import json
import sys

import tinker
from tinker import types


def service(url: str) -> tinker.ServiceClient:
    return tinker.ServiceClient(base_url=url, api_key="tml-test")


def datum(tokens: list[int], **inputs: list[float]) -> types.Datum:
    return types.Datum(model_input=types.ModelInput.from_ints(tokens), loss_fn_inputs=inputs)


def losses(client, steps: int, data: list[types.Datum], adam: dict) -> list[float]:
    """Train by cross_entropy, with both calls in flight; return the sum of each step."""
    values = []
    for _ in range(steps):
        forward = client.forward_backward(data, "cross_entropy")
        client.optim_step(types.AdamParams(**adam)).result()
        values.append(forward.result().metrics["loss:sum"])
    return values


def supervised(url: str, given: dict) -> dict:
    client = service(url).create_lora_training_client("base", **given["lora"]).result()
    values = []
    for batch in given["batches"]:
        data = [datum(**row) for row in batch]
        values += losses(client, 1, data, given["adam"])
    return {"losses": values, "rank": client.get_info().lora_rank}


def saved(url: str, given: dict) -> dict:
    """Train, save and train on; or train on from what was saved."""
    data = [datum(**row) for row in given["rows"]]
    if path := given.get("path"):
        create = service(url).create_training_client_from_state_with_optimizer
        return {"after": losses(create(path).result(), 3, data, given["adam"])}

    client = service(url).create_lora_training_client("base", rank=4, seed=1).result()
    before = losses(client, 3, data, given["adam"])
    path = client.save_state("three").result().path
    return {"before": before, "path": path, "after": losses(client, 3, data, given["adam"])}


def waiting(url: str, given: dict) -> dict:
    """Wait for more than the server computes before it ends."""
    client = service(url).create_lora_training_client("base", rank=4, seed=1).result()
    data = [datum(**row) for row in given["rows"]]
    if given["samples"]:
        sampler = client.save_weights_and_get_sampling_client().result()
        prompt = types.ModelInput.from_ints(given["rows"][0]["tokens"][:2])
        params = types.SamplingParams(max_tokens=1500, stop=[])
        futures = [sampler.sample(prompt, 8, params)]
    else:
        futures = [client.forward_backward(data, "cross_entropy") for _ in range(40)]
    print("waiting", flush=True)
    return {"results": [str(future.result()) for future in futures]}


def reinforce(url: str, given: dict) -> dict:
    """Raise the share of sampled tokens below a limit, by importance_sampling."""
    client = service(url).create_lora_training_client("base", rank=8, seed=1).result()
    tokenizer = client.get_tokenizer()
    prompt = tokenizer.encode("The list of")
    rewards = []
    for step in range(given["steps"]):
        sampler = client.save_weights_and_get_sampling_client().result()
        params = types.SamplingParams(max_tokens=8, temperature=1.0, seed=step, stop=[])
        request = types.ModelInput.from_ints(prompt)
        sequences = sampler.sample(request, given["samples"], params).result().sequences

        gains = [[float(token < given["limit"]) for token in each.tokens] for each in sequences]
        mean = sum(map(sum, gains)) / sum(map(len, gains))
        rewards.append(mean)
        data = [
            datum(
                prompt + each.tokens[:-1],
                target_tokens=prompt[1:] + each.tokens,
                logprobs=[0.0] * (len(prompt) - 1) + each.logprobs,
                advantages=[0.0] * (len(prompt) - 1) + [gain - mean for gain in gain_of],
            )
            for each, gain_of in zip(sequences, gains, strict=True)
        ]
        client.forward_backward(data, given["loss"]).result()
        client.optim_step(types.AdamParams(learning_rate=given["rate"])).result()
    return {"rewards": rewards}


def everything(url: str, given: dict) -> dict:
    """Call what the other scenarios do not, and return what a recipe would read."""
    client = service(url)
    training = client.create_lora_training_client("base", rank=4).result()
    rows = [datum(**row) for row in given["rows"]]
    losses(training, 2, rows, {"learning_rate": 1e-3})

    path = training.save_weights_for_sampler("final").result().path
    sampler = client.create_sampling_client(model_path=path).result()
    prompt = types.ModelInput.from_ints(given["rows"][0]["tokens"])
    scores = sampler.compute_logprobs(prompt).result()
    params = types.SamplingParams(max_tokens=4, temperature=0)
    sample = sampler.sample(prompt, 2, params).result()

    rest = tinker.RestClient(base_url=url, api_key="tml-test")
    rest.delete_checkpoint_from_tinker_path(path).result()

    errors = {}
    for name, call in {
        "loss": lambda: training.forward(rows, "dro"),
        "settings": lambda: training.forward(rows, "ppo", {"clip_low_threshold": 0.5}),
        "top": lambda: sampler.sample(prompt, 1, params, topk_sample_logprobs=2),
        "update": lambda: training.optim_step(types.AdamParams()),
        "saved": lambda: client.create_training_client_from_state(path),
    }.items():
        try:
            call().result()
        except tinker.TinkerError as error:
            errors[name] = f"{type(error).__name__}: {error}"

    client.close("success").result()
    return {
        "scores": scores,
        "tokens": [each.tokens for each in sample.sequences],
        "ids": len({each.sequence_id for each in sample.sequences}),
        "saved": path,
        "errors": errors,
    }


if __name__ == "__main__":
    scenario, url, given = sys.argv[1:]
    print(json.dumps(globals()[scenario](url, json.loads(given))))
