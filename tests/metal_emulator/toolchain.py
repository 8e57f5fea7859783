"""The C++ compiler, which is inside PyPI's ``ziglang``, and a cache by hash.

Results lie in one folder under the system's temporary folder. A name is the hash of everything that
went in: compiler, flags, every file of the shim, the text. So a changed text never meets an old
library, which ``dlopen`` would hand back for an old path.
"""

import functools
import hashlib
import importlib.metadata
import importlib.util
import os
import platform
import subprocess
import sys
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path

HERE = Path(__file__).parent

_COMMON_FLAGS = (
    *("-g0", "-nostdinc", "-nostdinc++", "-fno-exceptions", "-fno-rtti"),
    "-Wno-unused-command-line-argument",
)
STRICT_FLAGS = (
    *_COMMON_FLAGS,
    *("-DEMU_STRICT", "-std=c++14", "-O0", "-S", "-emit-llvm", "-fno-sanitize=all"),
    *("-Werror=uninitialized", "-Werror=sometimes-uninitialized", "-Werror=return-type"),
    *("-Werror=vla", "-Werror=array-bounds", "-Werror=shift-count-overflow"),
    *("-Werror=division-by-zero", "-Wno-c++17-extensions"),  # MLX uses `if constexpr`
)
OPTIMIZED_FLAGS = tuple("-O2" if flag == "-O0" else flag for flag in STRICT_FLAGS)
# The language of the CUDA twins, read by the same linter.
SYNTAX_FLAGS = (
    *_COMMON_FLAGS,
    *("-DEMU_SYNTAX", "-std=gnu++17", "-O0", "-S", "-emit-llvm", "-fno-sanitize=all"),
    *("-Werror=uninitialized", "-Werror=sometimes-uninitialized", "-Werror=return-type"),
)
# Multiplications and additions stay apart, so results are the same with every compiler.
RUN_FLAGS = (
    *_COMMON_FLAGS,
    *("-std=gnu++17", "-O1", "-fPIC", "-fno-math-errno", "-ffp-contract=off", "-c", "-emit-llvm"),
    *("-fsanitize=thread", "-ftrivial-auto-var-init=pattern", "-fno-sanitize-trap=all"),
    "-fsanitize=array-bounds,shift,signed-integer-overflow,integer-divide-by-zero,alignment",
    # Without it the read of `y[i] += 1` is not reported, only the write.
    *("-mllvm", "-tsan-instrument-read-before-write"),
    *("-fvisibility=hidden", "-fno-stack-protector", "-w"),
    "-fsanitize=local-bounds",  # a private array overrun through a pointer
)
RUNTIME_FLAGS = (
    *("-g0", "-std=c++17", "-O2", "-fPIC", "-fno-exceptions", "-fno-rtti", "-fno-sanitize=all"),
    *("-fvisibility=hidden", "-fno-stack-protector", "-c"),
)
# Optimized machine code would take more time to make than it saves: a kernel runs for milliseconds.
LINK_FLAGS = ("-shared", "-nostdlib", "-O0", "-fPIC", "-fno-sanitize=all")


# (folder, text, flags) to the file made in that folder
Maker = Callable[[Path, str, tuple[str, ...]], Path]


class CompileError(Exception):
    """The compiler rejected a text; the message is its output."""


def why_not() -> str | None:
    """The reason why no kernel can run here, or None if one can."""
    if sys.platform != "linux":
        return "the emulator of Metal kernels runs on Linux only"
    if importlib.util.find_spec("ziglang") is None:
        return "no ziglang here: pip install ziglang"
    return None


def build(text: str, include: Path) -> Path:
    """The library of a text for the run, linked with the run time."""
    return _made("so", text, (*RUN_FLAGS, f"-I{include}"), _link)


def llvm(text: str, include: Path, flags: Sequence[str]) -> str:
    """Return the LLVM text of a C++ text; a rejected text is a ``CompileError``."""
    return _made("ll", text, (*flags, f"-I{include}"), _compile).read_text()


def _made(suffix: str, text: str, flags: tuple[str, ...], make: Maker) -> Path:
    """The cached product of a text; an error of the compiler is cached too."""
    key = hashlib.sha256()
    portable = [flag.replace(str(HERE), "") for flag in flags]
    for part in (_name(), _shim_hash(), *portable, *RUNTIME_FLAGS, *LINK_FLAGS, suffix, text):
        key.update(part.encode() + b"\0")
    product = _cache() / f"{key.hexdigest()[:32]}.{suffix}"
    refusal = product.with_suffix(f".{suffix}.refused")
    if refusal.exists():
        raise CompileError(refusal.read_text())
    if not product.exists():
        with tempfile.TemporaryDirectory(dir=_cache()) as folder:
            try:
                made = make(Path(folder), text, flags)
            except CompileError as error:
                (Path(folder) / "refused").write_text(str(error))
                os.replace(Path(folder) / "refused", refusal)
                raise
            os.replace(made, product)
    return product


def _compile(folder: Path, text: str, flags: tuple[str, ...]) -> Path:
    (folder / "kernel.cpp").write_text(text)
    _zig(folder, *flags, "kernel.cpp", "-o", "kernel.out")
    return folder / "kernel.out"


def _link(folder: Path, text: str, flags: tuple[str, ...]) -> Path:
    _compile(folder, text, flags)
    kept = _cache() / f"runtime-{_key(_name(), _shim_hash(), *RUNTIME_FLAGS)}.o"
    if not kept.exists():
        runtime = str(HERE / "runtime" / "runtime.cpp")
        _zig(folder, *RUNTIME_FLAGS, f"-I{HERE / 'shim'}", runtime, "-o", "runtime.o")
        os.replace(folder / "runtime.o", kept)
    os.rename(folder / "kernel.out", folder / "kernel.bc")
    _zig(folder, *LINK_FLAGS, "kernel.bc", str(kept), "-o", "kernel.so")
    return folder / "kernel.so"


def _zig(folder: Path, *arguments: str) -> None:
    # Without a target zig compiles for this very processor, with fused multiply-adds.
    # `python -m ziglang` would start an interpreter for each of some thousand texts.
    package = importlib.util.find_spec("ziglang")
    command = [str(Path(package.origin).with_name("zig")), "c++"]
    command += ["-target", f"{platform.machine()}-linux-gnu", *arguments]
    caches = {f"ZIG_{kind}_CACHE_DIR": str(_cache() / "zig") for kind in ("GLOBAL", "LOCAL")}
    done = subprocess.run(
        command, cwd=folder, env=os.environ | caches, capture_output=True, text=True
    )
    if done.returncode:
        raise CompileError(done.stderr.strip())


def _name() -> str:
    return f"zig {importlib.metadata.version('ziglang')}"


@functools.cache
def _cache() -> Path:
    folder = Path(tempfile.gettempdir()) / f"mlx-packs-metal-emulator-{os.getuid()}"
    folder.mkdir(mode=0o700, exist_ok=True)
    if folder.stat().st_uid != os.getuid():
        raise PermissionError(f"[emulator] {folder} belongs to someone else; remove it.")
    return folder


@functools.cache
def _shim_hash() -> str:
    files = sorted([*(HERE / "shim").rglob("*"), *(HERE / "runtime").rglob("*")])
    return _key(*(f"{file.name}\0{file.read_text()}" for file in files if file.is_file()))


def _key(*parts: str) -> str:
    return hashlib.sha256("\0".join(parts).encode()).hexdigest()[:16]
