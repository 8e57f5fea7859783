"""The C++ compiler: a clang of the system or the one inside PyPI's ``ziglang``; a cache by hash.

Results lie in one folder under the system's temporary folder. A name is the hash of everything that
went in: compiler, flags, every file of the shim, the text. So a changed text never meets an old
library, which ``dlopen`` would hand back for an old path.
"""

import functools
import hashlib
import importlib.util
import os
import platform
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

HERE = Path(__file__).parent
OLDEST_CLANG = 17  # arithmetic on __bf16
LOCAL_BOUNDS_CLANG = 21  # reports a private array overrun through a pointer; older ones crash

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
    *("-std=gnu++17", "-O1", "-fPIC", "-fno-math-errno", "-ffp-contract=off", "-c"),
    *("-fsanitize=thread", "-ftrivial-auto-var-init=pattern", "-fno-sanitize-trap=all"),
    "-fsanitize=array-bounds,shift,signed-integer-overflow,integer-divide-by-zero,alignment",
    # Without it the read of `y[i] += 1` is not reported, only the write.
    *("-mllvm", "-tsan-instrument-read-before-write"),
    *("-fvisibility=hidden", "-fno-stack-protector", "-w"),
)
RUNTIME_FLAGS = (
    *("-g0", "-std=c++17", "-O2", "-fPIC", "-fno-exceptions", "-fno-rtti", "-fno-sanitize=all"),
    *("-fvisibility=hidden", "-fno-stack-protector", "-c"),
)
LINK_FLAGS = ("-shared", "-nostdlib")


# (folder, text, flags) to the file made in that folder
Maker = Callable[[Path, str, tuple[str, ...]], Path]


class CompileError(Exception):
    """The compiler rejected a text; the message is its output."""


@dataclass(frozen=True)
class Toolchain:
    """A compiler: its name, the start of its command line, the version of its clang."""

    name: str
    command: tuple[str, ...]
    version: int

    def build(self, text: str, include: Path) -> Path:
        """The library of a text for the run, linked with the run time."""
        local = ("-fsanitize=local-bounds",) if self.version >= LOCAL_BOUNDS_CLANG else ()
        return self._made("so", text, (*RUN_FLAGS, *local, f"-I{include}"), self._link)

    def llvm(self, text: str, include: Path, flags: Sequence[str]) -> str:
        """Return the LLVM text of a C++ text; a rejected text is a ``CompileError``."""
        return self._made("ll", text, (*flags, f"-I{include}"), self._compile).read_text()

    def _made(self, suffix: str, text: str, flags: tuple[str, ...], make: Maker) -> Path:
        """The cached product of a text; an error of the compiler is cached too."""
        key = hashlib.sha256()
        portable = [flag.replace(str(HERE), "") for flag in flags]
        for part in (self.name, _shim_hash(), *portable, *RUNTIME_FLAGS, *LINK_FLAGS, suffix, text):
            key.update(part.encode() + b"\0")
        product = cache_folder() / f"{key.hexdigest()[:32]}.{suffix}"
        refusal = product.with_suffix(f".{suffix}.refused")
        if refusal.exists():
            raise CompileError(refusal.read_text())
        if not product.exists():
            with tempfile.TemporaryDirectory(dir=cache_folder()) as folder:
                try:
                    made = make(Path(folder), text, flags)
                except CompileError as error:
                    (Path(folder) / "refused").write_text(str(error))
                    os.replace(Path(folder) / "refused", refusal)
                    raise
                os.replace(made, product)
        return product

    def _compile(self, folder: Path, text: str, flags: tuple[str, ...]) -> Path:
        (folder / "kernel.cpp").write_text(text)
        self._run(folder, *flags, "kernel.cpp", "-o", "kernel.out")
        return folder / "kernel.out"

    def _link(self, folder: Path, text: str, flags: tuple[str, ...]) -> Path:
        self._compile(folder, text, flags)
        runtime = HERE / "runtime" / "runtime.cpp"
        key = _key(self.name, _shim_hash(), *RUNTIME_FLAGS)
        if not (kept := cache_folder() / f"runtime-{key}.o").exists():
            include = f"-I{HERE / 'shim'}"
            self._run(folder, *RUNTIME_FLAGS, include, str(runtime), "-o", "runtime.o")
            os.replace(folder / "runtime.o", kept)
        os.rename(folder / "kernel.out", folder / "kernel.o")
        self._run(folder, *LINK_FLAGS, "kernel.o", str(kept), "-o", "kernel.so")
        return folder / "kernel.so"

    def _run(self, folder: Path, *arguments: str) -> None:
        zig = {f"ZIG_{kind}_CACHE_DIR": str(cache_folder() / "zig") for kind in ("GLOBAL", "LOCAL")}
        done = subprocess.run(
            [*self.command, *arguments],
            cwd=folder,
            env=os.environ | zig,
            capture_output=True,
            text=True,
        )
        if done.returncode:
            raise CompileError(done.stderr.strip())


@functools.cache
def find_toolchain() -> Toolchain | None:
    """A compiler that can run kernels here, or None; ``why_not`` has the reason.

    A new clang of the system, else zig, else an older clang, which sees a little less.
    """
    if sys.platform != "linux":
        return None
    found = sorted(_clangs(), key=lambda clang: clang.version, reverse=True)
    if not found or found[0].version < LOCAL_BOUNDS_CLANG:
        found = [*_zig(), *found]
    return found[0] if found else None


def _clangs() -> Iterator[Toolchain]:
    for name in ("clang++", *(f"clang++-{n}" for n in range(30, OLDEST_CLANG - 1, -1))):
        if path := shutil.which(name):
            banner = _output(path, "--version")
            if (version := _clang_version(banner)) >= OLDEST_CLANG:
                yield Toolchain(banner.splitlines()[0], (path,), version)


def _zig() -> Iterator[Toolchain]:
    if importlib.util.find_spec("ziglang"):
        zig = (sys.executable, "-m", "ziglang")
        # Without a target zig compiles for this very processor, with fused multiply-adds.
        command = (*zig, "c++", "-target", f"{platform.machine()}-linux-gnu")
        version = _clang_version(_output(*zig, "c++", "--version"))
        yield Toolchain(f"zig {_output(*zig, 'version').strip()}", command, version)


def _output(*command: str) -> str:
    return subprocess.run(command, capture_output=True, text=True).stdout


def _clang_version(banner: str) -> int:
    found = re.search(r"clang version (\d+)", banner)
    return int(found[1]) if found else 0


def why_not() -> str | None:
    """The reason why no kernel can run here, or None if one can."""
    if sys.platform != "linux":
        return "the emulator of Metal kernels runs on Linux only"
    if find_toolchain() is None:
        return f"no clang >= {OLDEST_CLANG} and no ziglang here: pip install ziglang"
    return None


@functools.cache
def cache_folder() -> Path:
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
