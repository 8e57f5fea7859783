"""`packs bench-serve`: throughput and latency of a server at high load."""

import click

from ..errors import PackError
from . import options
from .options import option
from .output import exit_if_failed, print_report

_MOST = 4  # models that are mixed if none are named


@click.command()
@option("--url", default="http://127.0.0.1:8080", metavar="URL", help="Server to send requests to.")
@option(
    "--models",
    metavar="NAMES",
    help="Models to mix, separated by commas.",
    default_text=f"the first {_MOST} that the server lists",
)
@option(
    "--concurrency",
    default="1,16",
    metavar="N,N",
    help="Numbers of requests that are under way at once.",
)
@option(
    "--requests",
    type=click.IntRange(1, 100_000),
    default=64,
    metavar="N",
    help="Requests of each measurement.",
)
@option(
    "--prompt-words",
    type=click.IntRange(1, 100_000),
    default=32,
    metavar="N",
    help="Words of each prompt.",
)
@option(
    "--max-tokens",
    type=click.IntRange(1, 100_000),
    default=64,
    metavar="N",
    help="Maximum length of an answer, in tokens.",
)
@option(
    "--api-key",
    envvar="MLX_PACKS_API_KEY",
    default="",
    metavar="KEY",
    help="Key of the server; better set as MLX_PACKS_API_KEY.",
    show_default=False,
)
@options.as_json
def bench_serve(
    url: str,
    models: str | None,
    concurrency: str,
    requests: int,
    prompt_words: int,
    max_tokens: int,
    api_key: str,
) -> None:
    """Measure how a server of the OpenAI API answers at high load.

    For each number of concurrent requests, one model and several alternating ones are measured:
    answers and tokens per second, and percentiles of the time to the first token and to the
    complete answer. The exit code is 1 if a request failed.
    """
    from ..bench.serving import Load, Target, run_load, table

    target = Target(url, api_key)
    served = target.models()
    chosen = options.names(models) or tuple(served[:_MOST])
    if not chosen:
        raise PackError(f"--url {url}: lists no model. Name them with --models.", flag="models")

    mixes = [chosen]
    if len(chosen) > 1:
        mixes = [chosen[-1:], chosen]

    results = []
    for at_once in _numbers(concurrency):
        for i, mix in enumerate(mixes):
            run_load(target, Load(mix, min(at_once, 4), min(requests, 4), prompt_words, 4, seed=-1))
            load = Load(mix, at_once, requests, prompt_words, max_tokens, seed=i)
            results.append(run_load(target, load))

    print_report({"url": url, "results": results}, table(results))
    failed = sum(sum(result["errors"].values()) for result in results)
    if failed:
        exit_if_failed([f"{failed} requests failed."])


def _numbers(text: str) -> list[int]:
    try:
        numbers = [int(part) for part in options.names(text)]
    except ValueError:
        numbers = []

    if not numbers or not all(1 <= number <= 1024 for number in numbers):
        raise PackError(f"--concurrency {text}: must be numbers of 1 to 1024, such as 1,16.")
    return numbers
