"""Compiles the C++ kernels (`native/`) for this machine and loads them, from a cache where it can.

A library is named by a hash of all that shapes it: sources, compiler, flags and OpenMP runtime. It lies in
$SERVETWIN_CACHE_DIR, $XDG_CACHE_HOME/servetwin or ~/.cache/servetwin, beside a checksum, since loading a damaged file
can end the process. A lock lets one process compile while others wait; where the folder cannot be written or nothing
may be executed from there, the library serves this process alone.
"""

from __future__ import annotations

import ctypes
import fcntl
import hashlib
import logging
import os
import platform
import pwd
import shlex
import shutil
import subprocess
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path

log = logging.getLogger(__name__)

SOURCES = Path(__file__).parent / "native"
FLAGS = ("-std=c++17", "-O3", "-fno-math-errno", "-ffp-contract=fast", "-fopenmp", "-fPIC", "-shared")
COMPILE_TIMEOUT_S = 300
OPENMP_NAMES = ("libgomp", "libiomp5", "libomp")


class NativeBuildError(RuntimeError):
    """Why there is no native library: no compiler, or one that fails."""


class LibraryLoadError(NativeBuildError):
    """A library that cannot be loaded, for example from where nothing may be executed."""


@dataclass(frozen=True)
class InstructionSet:
    """What the compiler may use."""

    name: str
    compiler_flags: tuple[str, ...]
    cpu_flags: frozenset[str]
    """What /proc/cpuinfo must list."""


_AVX2 = frozenset(["avx2", "fma", "bmi1", "bmi2", "f16c", "movbe", "abm"])
X86_INSTRUCTION_SETS = (
    InstructionSet(
        "avx512",
        ("-march=x86-64-v4",),
        _AVX2 | frozenset(["avx512f", "avx512bw", "avx512cd", "avx512dq", "avx512vl"]),
    ),
    InstructionSet("avx2", ("-march=x86-64-v3",), _AVX2),
    InstructionSet("sse2", ("-march=x86-64",), frozenset()),
)
"""Widest first."""


@dataclass(frozen=True)
class Compiler:
    command: tuple[str, ...]
    version: str
    """First line of what it says about itself."""


# ---------------------------------------------------------------- what this machine offers


def instruction_sets() -> list[InstructionSet]:
    """Those this processor has, widest first."""
    if platform.machine() not in ("x86_64", "AMD64"):
        return [InstructionSet("native", ("-mcpu=native",), frozenset())]
    flags = cpu_flags()
    return [candidate for candidate in X86_INSTRUCTION_SETS if candidate.cpu_flags <= flags]


def cpu_flags() -> frozenset[str]:
    """The features that Linux lists for the first processor; empty where there is no such list."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return frozenset()
    listed = (line.partition(":")[2] for line in lines if line.startswith(("flags", "Features")))
    return frozenset(next(listed, "").split())


def find_compiler(environment: Mapping[str, str]) -> Compiler:
    """$CXX, else g++, else c++. Raises NativeBuildError when there is none or it does not run."""
    try:
        named = shlex.split(environment.get("CXX", ""))
    except ValueError as e:
        raise NativeBuildError(f"CXX {environment['CXX']!r}: {str(e).lower()}") from e
    candidates = [named] if named else [["g++"], ["c++"]]
    command = next((c for c in candidates if shutil.which(c[0], path=environment.get("PATH"))), None)
    if command is None:
        raise NativeBuildError(f"no C++ compiler: {' and '.join(c[0] for c in candidates)} not found")
    lines = _run([*command, "--version"]).splitlines()
    return Compiler(tuple(command), lines[0] if lines else command[0])


def loaded_openmp() -> Path | None:
    """The OpenMP runtime that this process has loaded (torch's): two of them would compete for the processors."""
    try:
        maps = Path("/proc/self/maps").read_text()
    except OSError:
        return None
    files = {Path(line.split(maxsplit=5)[5]) for line in maps.splitlines() if "/" in line}
    runtimes = sorted(file for file in files if file.name.startswith(OPENMP_NAMES))
    # torch brings its own beside its libraries; other packages may have loaded theirs too.
    return min(runtimes, key=lambda file: "torch" not in file.parts, default=None)


def cache_folder(environment: Mapping[str, str]) -> Path:
    """Where libraries are kept; it need not exist."""
    if ours := environment.get("SERVETWIN_CACHE_DIR"):
        return Path(ours).expanduser() / "kernels"
    base = (
        environment.get("XDG_CACHE_HOME") or Path(environment.get("HOME") or _home_of_the_user()) / ".cache"
    )
    return Path(base) / "servetwin" / "kernels"


def _home_of_the_user() -> str:
    try:
        return pwd.getpwuid(os.getuid()).pw_dir
    except KeyError:
        return "/nonexistent"


# ---------------------------------------------------------------- building


def load(instruction_set: InstructionSet, compiler: Compiler, folder: Path) -> ctypes.CDLL:
    """The library for these instructions, compiled where `folder` does not hold it yet.

    Raises NativeBuildError when it cannot be compiled or loaded.
    """
    openmp = loaded_openmp()
    kept = folder / f"{_key(instruction_set, compiler, openmp)}.so"
    built: Path | None = None
    with ExitStack() as stack:
        try:
            if not _intact(kept):
                stack.enter_context(_locked(kept.with_suffix(".lock")))
            if _intact(kept):
                return _open(kept)
            log.info("compiling the CPU kernels into %s: some ten seconds, once", folder)
            built = stack.enter_context(compiled(instruction_set, compiler, openmp))
            _keep(built, kept)
            return _open(kept)
        except (OSError, LibraryLoadError) as e:
            log.warning("%s cannot be used (%s): compiling the CPU kernels for this process alone", folder, e)
        return _open(built or stack.enter_context(compiled(instruction_set, compiler, openmp)))


@contextmanager
def compiled(instruction_set: InstructionSet, compiler: Compiler, openmp: Path | None) -> Iterator[Path]:
    """The library, newly compiled into a folder that lasts as long as the context. Raises NativeBuildError."""
    sources = sorted(str(source) for source in SOURCES.glob("*.cpp"))
    # The loaded runtime comes before the compiler's own, which is then not needed and so left out.
    runtime = ["-Wl,--as-needed", str(openmp)] if openmp else []
    try:
        folder = tempfile.TemporaryDirectory(prefix="servetwin-")
    except OSError as e:
        raise NativeBuildError(f"no temporary folder: {e}") from e
    with folder as name:
        built = Path(name) / "kernels.so"
        _run(
            [*compiler.command, *FLAGS, *instruction_set.compiler_flags, "-o", str(built), *sources, *runtime]
        )
        if not built.is_file():
            raise NativeBuildError(f"{compiler.command[0]} wrote no library")
        yield built


def _keep(built: Path, kept: Path) -> None:
    """Copies the library to where it is kept; it appears there whole or not at all. Raises OSError."""
    with tempfile.TemporaryDirectory(prefix=".new-", dir=kept.parent) as folder:
        library, checksum = Path(folder) / kept.name, Path(folder) / "checksum"
        shutil.copy(built, library)
        checksum.write_text(_sha256(library))
        # The checksum first: a library counts only beside its own.
        checksum.replace(kept.with_suffix(".sha256"))
        library.replace(kept)


def _key(instruction_set: InstructionSet, compiler: Compiler, openmp: Path | None) -> str:
    parts = [*compiler.command, compiler.version, *FLAGS, *instruction_set.compiler_flags]
    parts.append(openmp.name if openmp else "")
    if instruction_set.name == "native":
        parts += sorted(cpu_flags())
    digest = hashlib.sha256("\0".join(parts).encode())
    for source in sorted([*SOURCES.glob("*.cpp"), *SOURCES.glob("*.h")]):
        digest.update(source.name.encode() + b"\0" + source.read_bytes())
    return f"{instruction_set.name}-{digest.hexdigest()[:16]}"


def _run(command: list[str]) -> str:
    try:
        done = subprocess.run(
            command, capture_output=True, text=True, errors="replace", timeout=COMPILE_TIMEOUT_S, check=False
        )
    except subprocess.TimeoutExpired as e:
        raise NativeBuildError(f"{command[0]} took longer than {COMPILE_TIMEOUT_S} s") from e
    except OSError as e:
        raise NativeBuildError(f"{command[0]}: {e}") from e
    if done.returncode != 0:
        raise NativeBuildError(
            f"{command[0]} failed with exit code {done.returncode}: {_reason(done.stderr.splitlines())}"
        )
    return done.stdout


def _reason(lines: list[str]) -> str:
    """The line that says why: the first error, but for the linker, which says it before what the compiler adds."""
    own = [line for line in lines if line.strip() and "collect2" not in line]
    return next((line for line in own if "error" in line), own[-1] if own else "no message")


@contextmanager
def _locked(path: Path) -> Iterator[None]:
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


def _sha256(file: Path) -> str:
    return hashlib.sha256(file.read_bytes()).hexdigest()


def _intact(library: Path) -> bool:
    try:
        return library.with_suffix(".sha256").read_bytes() == _sha256(library).encode()
    except OSError:
        return False


def _open(library: Path) -> ctypes.CDLL:
    try:
        return ctypes.CDLL(os.fspath(library))
    except OSError as e:
        raise LibraryLoadError(f"the compiled library does not load: {e}") from e
