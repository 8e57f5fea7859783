"""What Metal forbids and plain clang accepts: a linter of the words and one of the LLVM text."""

import re
from collections.abc import Iterator

_SPACES = re.compile(r"\b(device|constant|threadgroup|thread)\b")
_SCALARS = (
    "bool char uchar short ushort int uint long ulong size_t float half bfloat void auto "
    "float16_t bfloat16_t complex64_t int8_t uint8_t int16_t uint16_t int32_t uint32_t "
    "int64_t uint64_t"
).split()
_NAMED = re.compile(r"\b(?:typename|struct|class|using|union)\s+([A-Za-z_]\w*)")
_LAMBDA = re.compile(
    r"(?<!operator)\[[&=\s]*[\w\s,&=*]*\]\s*\([^()]*\)\s*(?:mutable\s*)?(?:->\s*[\w:<>\s]+)?\{"
)
_COMMENT = re.compile(r"//[^\n]*|/\*.*?\*/|\"(?:\\.|[^\"\\])*\"", re.DOTALL)
_DIRECTIVE = re.compile(r"^[ \t]*#(?:[^\n]*\\\n)*[^\n]*", re.MULTILINE)


def lint_words(source: str) -> list[str]:
    """Rules of Metal that can be seen in the words of a kernel's source."""

    def blank(match: re.Match[str]) -> str:
        return "\n" * match[0].count("\n")

    text = _DIRECTIVE.sub(blank, _COMMENT.sub(blank, source))
    text = re.sub(r"\[\[[^\[\]]*\]\]", "", text)
    found = [(m.start(), "Metal has no `double`") for m in re.finditer(r"\bdouble\b", text)]
    found += [(m.start(), "Metal has no lambda") for m in _LAMBDA.finditer(text)]
    found += list(_bare_pointers(text))
    found += list(_bare_constants(text))
    return [f"{what} (line {text.count(chr(10), 0, at) + 1})" for at, what in sorted(found)]


def _bare_pointers(text: str) -> Iterator[tuple[int, str]]:
    """Pointers and references whose declaration names no address space."""
    types = sorted({*_SCALARS, *_NAMED.findall(text)}, key=len, reverse=True)
    vector = r"|(?:u?char|u?short|u?int|u?long|half|bfloat|float)[234]"
    words = r"(?:\s|\b(?:const|volatile|device|constant|threadgroup|thread)\b)*"
    declaration = re.compile(
        rf"(?<![\w.>])(?:{'|'.join(types)}{vector})\b(?:\s*<[^;<>{{}}()]*>)?{words}"
        r"[*&]\s*(?:const\b\s*|restrict\b\s*)*(?:[A-Za-z_]\w*)?\s*(?=[,;=)\[{(:>])"
    )
    for match in declaration.finditer(text):
        start = max(text.rfind(c, 0, match.start()) for c in ";{}(,<")
        if not _SPACES.search(text[start + 1 : match.end()]):
            shown = " ".join(match[0].split())
            yield match.start(), f"`{shown}` names no address space"


def _bare_constants(text: str) -> Iterator[tuple[int, str]]:
    """Constants outside functions that do not stand in `constant` memory."""
    scopes, start = ["file"], 0
    for mark in re.finditer(r"[{};]", text):
        statement = text[start : mark.start()]
        if mark[0] != "}" and scopes[-1] in ("file", "struct"):
            words = r"constexpr|const" if scopes[-1] == "file" else r"constexpr"
            declared = re.match(
                rf"\s*(?:public:|private:)?\s*(?:(?:static|inline)\s+)*(?:{words})\b[^()]*(?:=|$)",
                statement,
            )
            if declared and not re.search(r"\bconstant\b", statement):
                shown = " ".join(statement.split())
                yield mark.start(), f"`{shown}` outside a function must be in `constant` memory"
        if mark[0] == "{":
            scopes.append(_scope(statement, scopes[-1]))
        elif mark[0] == "}" and len(scopes) > 1:
            scopes.pop()
        start = mark.end()


def _scope(statement: str, outer: str) -> str:
    if outer == "code":
        return "code"
    if re.search(r"\bnamespace\b", statement):
        return "file"
    # A function may return a struct: it has parameters after the word.
    if re.search(r"\b(struct|class|union)\s+\w+[^()]*$", statement):
        return "struct"
    return "code"


_DOUBLE = re.compile(
    r"= (?:f(?:add|sub|mul|div|rem|neg|cmp))\b[^\n]* double\b"
    r"|= (?:fpext|sitofp|uitofp)\b[^\n]* to double"
    r"|= (?:fptrunc|fptosi|fptoui) double"
    r"|= alloca double\b|@llvm\.[\w.]+\.f64\b"
)
_DEFINE = re.compile(r"^define [^\n]*?@(\"[^\"]+\"|[\w.$]+)\(")
_CALL = re.compile(r"\b(?:call|invoke)\b[^\n]*?(?:(@\"[^\"]+\"|@[\w.$]+)|(%[\w.]+))\(")
_DECLARE = re.compile(r"^declare [^\n]*?@(\"[^\"]+\"|[\w.$]+)\(")
_GLOBAL = re.compile(r"^@(\"[^\"]+\"|[\w.$]+) = (?![^\n]*addrspace\([23]\))[^\n]*\bglobal\b")
_LIBRARY = re.compile(r"_ZNK?5metal|_Z\w*emu_|emu_|llvm\.|mem(?:cpy|set|move)$")


def lint_llvm(llvm: str, *, metal: bool) -> list[str]:
    """Rules that can be seen in what the compiler made; with ``metal=False`` only `double`."""
    problems: list[str] = []
    calls: dict[str, set[str]] = {}
    function = ""
    for line in llvm.splitlines():
        if found := _DEFINE.match(line):
            function = found[1]
            calls[function] = set()
        if _DOUBLE.search(line):
            problems.append(f"arithmetic in `double` in {function}")
        if not metal:
            continue
        if "addrspacecast" in line:
            problems.append(f"a cast from one address space to another in {function}")
        if found := _CALL.search(line):
            if found[2]:
                problems.append(f"a call through a function pointer in {function}")
            else:
                calls.get(function, set()).add(found[1][1:])
        if (found := _DECLARE.match(line)) and not _LIBRARY.match(found[1]):
            problems.append(f"a function that Metal does not have: {found[1]}")
        if found := _GLOBAL.match(line):
            problems.append(f"a variable that outlives the thread: {found[1]}")
    problems += [f"recursion of {name}" for name in calls if _reaches(calls, name, name)]
    return list(dict.fromkeys(problems))


def threadgroup_bytes(llvm: str) -> int:
    """Size of all threadgroup arrays, each rounded up to 16 bytes, from the marks of the shim."""
    sizes = re.findall(r"\bcall [^\n]*emu_threadgroup_bytesILm(\d+)E", llvm)
    return sum(-(-int(size) // 16) * 16 for size in sizes)


def _reaches(calls: dict[str, set[str]], start: str, goal: str) -> bool:
    seen: set[str] = set()
    waiting = list(calls[start])
    while waiting:
        name = waiting.pop()
        if name == goal:
            return True
        if name not in seen:
            seen.add(name)
            waiting += calls.get(name, ())
    return False
