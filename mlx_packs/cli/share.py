"""`packs push` and `packs pull`: packs on the Hugging Face Hub."""

import click

from ..display import Display, size
from ..errors import PackError
from . import options
from .options import option
from .output import print_report


@click.command()
@click.argument("pack", type=click.Path())
@click.argument("repo")
@option("--private", is_flag=True, help="Make the repository private if it is created.")
@option("--revision", metavar="BRANCH", help="Branch to push to.", default_text="main")
@option(
    "--license",
    metavar="ID",
    help="Identifier of the licence on the Hub.",
    default_text="none",
)
@option(
    "--samples",
    is_flag=True,
    help="Also upload the held-out examples and completions that the pack's card shows.",
)
@options.as_json
def push(pack: str, repo: str, **settings) -> None:
    """Upload a pack to the Hugging Face Hub.

    REPO is owner/name. The pack is checked first, then its folder is uploaded unchanged. A licence
    is therefore added to the folder itself, and held-out examples are removed from it; for a pulled
    pack, a copy is changed.
    """
    from ..packs.share import push

    report = push(pack, repo, progress=Display(), **settings)
    name = report["repo"]
    if settings["revision"]:
        name += f"@{report['revision']}"

    lines = [
        f"pushed  {len(report['files'])} files ({size(report['bytes'])}) · commit "
        f"{report['commit'][:12]} · {report['url']}",
        f"try     packs pull {name} --out packs/{report['repo'].rsplit('/', 1)[-1]}",
    ]
    print_report(report, lines)


@click.command()
@click.argument("repo")
@option(
    "--out",
    metavar="DIR",
    help="Folder to write the pack to.",
    default_text="the Hub's cache, for commands with owner/name as their PACK",
)
@options.overwrite
@options.as_json
def pull(repo: str, out: str, overwrite: bool) -> None:
    """Download a pack from the Hugging Face Hub.

    REPO is owner/name or owner/name@revision. Only the files that the manifest lists are
    downloaded, and their hashes are checked before DIR is created. After an interruption the same
    command continues.
    """
    from ..packs.manifest import read_pin
    from ..packs.share import pull

    if overwrite and out is None:
        text = "applies to --out DIR only. The cache is always updated."
        raise PackError(f"--overwrite: {text}", "conflict")

    pack = pull(repo, out, overwrite=overwrite, progress=Display())
    report = {"pack": str(pack.path), "pack_mb": pack.size_mb, **(read_pin(pack.path) or {})}
    lines = [
        f"pulled  {pack.path} ({pack.size_mb:.2f} MB) · commit {report['commit'][:12]} · hashes ok",
        f'try     packs generate {out or repo} --prompt "…"',
    ]
    print_report(report, lines)
