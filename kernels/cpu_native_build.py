"""Compiles the C++ kernels (`native/`) for this machine and loads them, from a cache where it can.

A library is named by a hash of all that shapes it: sources, compiler, flags and OpenMP runtime. It lies in
$SERVETWIN_CACHE_DIR, $XDG_CACHE_HOME/servetwin or ~/.cache/servetwin, beside a checksum, since loading a damaged file
can end the process. A lock lets one process compile while others wait; where the folder cannot be written, the
library is compiled for this process alone.
"""

from __future__ import annotations

import ctypes
import fcntl
import hashlib
import logging
import os
import platform
import shlex
import shutil
import subprocess
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

log = logging.getLogger(__name__)

SOURCES = Path(__file__).parent / "native"
FLAGS = ("-std=c++17", "-O3", "-fno-math-errno", "-ffp-contract=fast", "-fopenmp", "-fPIC", "-shared")
COMPILE_TIMEOUT_S = 300
OPENMP_NAMES = ("libgomp", "libiomp5", "libomp")


class NativeBuildError(RuntimeError):
    """Why there is no native library: no compiler, or one that fails."""


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
    named = shlex.split(environment.get("CXX", ""))
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
        return Path(ours) / "kernels"
    base = environment.get("XDG_CACHE_HOME") or Path(environment.get("HOME", "/")) / ".cache"
    return Path(base) / "servetwin" / "kernels"


# ---------------------------------------------------------------- building


def load(instruction_set: InstructionSet, compiler: Compiler, folder: Path) -> ctypes.CDLL:
    """The library for these instructions, compiled where `folder` does not hold it yet.

    Raises NativeBuildError when it cannot be compiled or loaded.
    """
    openmp = loaded_openmp()
    library = folder / f"{_key(instruction_set, compiler, openmp)}.so"
    if _intact(library):
        return _open(library)
    try:
        with _locked(library.with_suffix(".lock")):
            if not _intact(library):
                log.warning("compiling the CPU kernels into %s: some ten seconds, once", folder)
                compile_library(instruction_set, compiler, openmp, library)
    except OSError as e:
        log.warning("cannot keep compiled kernels in %s (%s): compiling for this process alone", folder, e)
        with tempfile.TemporaryDirectory(prefix="servetwin-") as private:
            library = Path(private) / library.name
            compile_library(instruction_set, compiler, openmp, library)
            return _open(library)
    return _open(library)


def compile_library(
    instruction_set: InstructionSet, compiler: Compiler, openmp: Path | None, library: Path
) -> None:
    """Compiles into `library`, which appears whole or not at all. Raises NativeBuildError, OSError."""
    sources = sorted(str(source) for source in SOURCES.glob("*.cpp"))
    with tempfile.TemporaryDirectory(prefix=".compiling-", dir=library.parent) as folder:
        output = Path(folder) / library.name
        # The loaded runtime comes before the compiler's own, which is then not needed and so left out.
        runtime = ["-Wl,--as-needed", str(openmp)] if openmp else []
        flags = [*FLAGS, *instruction_set.compiler_flags]
        _run([*compiler.command, *flags, "-o", str(output), *sources, *runtime])
        checksum = output.with_suffix(".sha256")
        checksum.write_text(_sha256(output))
        # The checksum first: a library counts only beside its own.
        checksum.replace(library.with_suffix(".sha256"))
        output.replace(library)


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
        done = subprocess.run(command, capture_output=True, text=True, timeout=COMPILE_TIMEOUT_S, check=False)
    except (OSError, subprocess.TimeoutExpired) as e:
        raise NativeBuildError(f"{command[0]}: {e}") from e
    if done.returncode != 0:
        lines = done.stderr.splitlines()
        reason = next((line for line in lines if "error" in line), lines[0] if lines else "no message")
        raise NativeBuildError(f"{command[0]} failed with exit code {done.returncode}: {reason}")
    return done.stdout


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
        return library.with_suffix(".sha256").read_text() == _sha256(library)
    except OSError:
        return False


def _open(library: Path) -> ctypes.CDLL:
    try:
        return ctypes.CDLL(os.fspath(library))
    except OSError as e:
        raise NativeBuildError(f"the compiled library does not load: {e}") from e
