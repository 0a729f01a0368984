"""Compiled kernels are cached, compiled once, and never take the process down with them."""

from __future__ import annotations

import logging
import os
import pwd
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from servetwin.kernels import cpu_native, ops
from servetwin.kernels import cpu_native_build as build

try:
    COMPILER = build.find_compiler(os.environ)
except build.NativeBuildError as e:
    pytest.skip(str(e), allow_module_level=True)

WIDEST = build.instruction_sets()[0]
COUNTING_COMPILER = """#!/bin/sh
case "$*" in *-o*) echo compiled >> "{log}" ;; esac
exec {compiler} "$@"
"""


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """An empty cache, chosen by the environment."""
    monkeypatch.setenv("SERVETWIN_CACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.delenv(cpu_native.SWITCH, raising=False)
    cpu_native._native.cache_clear()
    yield tmp_path / "cache" / "kernels"
    cpu_native._native.cache_clear()


@pytest.fixture
def small_source(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A source that compiles fast, in the place of the kernels."""
    folder = tmp_path / "native"
    folder.mkdir()
    (folder / "answer.cpp").write_text('extern "C" int answer() { return 42; }')
    monkeypatch.setattr(build, "SOURCES", folder)
    return folder


@pytest.fixture
def compiler(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> build.Compiler:
    """One that notes each compilation in compiled.log, and is chosen by $CXX."""
    script = tmp_path / "counting-compiler"
    script.write_text(COUNTING_COMPILER.format(log=tmp_path / "compiled.log", compiler=COMPILER.command[0]))
    script.chmod(0o755)
    monkeypatch.setenv("CXX", str(script))
    return build.find_compiler(os.environ)


def compilations(tmp_path: Path) -> int:
    log = tmp_path / "compiled.log"
    return len(log.read_text().splitlines()) if log.exists() else 0


@pytest.mark.usefixtures("small_source")
def test_compiled_once_and_found_again(compiler: build.Compiler, cache: Path, tmp_path: Path) -> None:
    """The second load reads the cache, which holds nothing but the library, its checksum and its lock."""
    for _ in range(2):
        assert build.load(WIDEST, compiler, cache).answer() == 42
    assert compilations(tmp_path) == 1
    assert sorted(file.suffix for file in cache.iterdir()) == [".lock", ".sha256", ".so"]


def test_other_sources_are_another_library(
    compiler: build.Compiler, cache: Path, tmp_path: Path, small_source: Path
) -> None:
    """So an update of the package needs no clean-up."""
    build.load(WIDEST, compiler, cache)
    (small_source / "answer.cpp").write_text('extern "C" int answer() { return 43; }')
    assert build.load(WIDEST, compiler, cache).answer() == 43
    assert compilations(tmp_path) == 2


def test_two_processes_compile_once(
    compiler: build.Compiler, cache: Path, tmp_path: Path, small_source: Path
) -> None:
    """The second waits for the first and takes what it made."""
    code = """if True:
        import os, sys
        from pathlib import Path
        from servetwin.kernels import cpu_native_build as build
        build.SOURCES = Path(sys.argv[1])
        compiler = build.find_compiler(os.environ)
        assert build.load(build.instruction_sets()[0], compiler, Path(sys.argv[2])).answer() == 42
    """
    command = [sys.executable, "-c", code, str(small_source), str(cache)]
    processes = [subprocess.Popen(command) for _ in range(2)]
    assert [process.wait() for process in processes] == [0, 0]
    assert compilations(tmp_path) == 1


@pytest.mark.usefixtures("small_source")
@pytest.mark.parametrize("damage", ["truncated", "garbage", "no checksum"])
def test_a_damaged_library_is_compiled_afresh(
    compiler: build.Compiler, cache: Path, tmp_path: Path, damage: str
) -> None:
    """It is never loaded: a truncated one would end the process."""
    build.load(WIDEST, compiler, cache)
    (library,) = cache.glob("*.so")
    if damage == "no checksum":
        library.with_suffix(".sha256").unlink()
    else:
        content = library.read_bytes()
        library.unlink()  # a new file: this process has the old one mapped
        library.write_bytes(content[:5000] if damage == "truncated" else b"garbage")
    assert build.load(WIDEST, compiler, cache).answer() == 42
    assert compilations(tmp_path) == 2


@pytest.mark.usefixtures("small_source")
def test_a_folder_that_cannot_be_written(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """The library is compiled for this process alone, which is said; nothing is left behind."""
    in_the_way = tmp_path / "file"
    in_the_way.touch()
    temporary = tmp_path / "temporary"
    temporary.mkdir()
    monkeypatch.setattr("tempfile.tempdir", str(temporary))
    assert build.load(WIDEST, COMPILER, in_the_way / "kernels").answer() == 42
    (message,) = caplog.messages
    assert "compiling the CPU kernels for this process alone" in message
    assert list(temporary.iterdir()) == []


@pytest.mark.parametrize(
    ("cxx", "reason"),
    [
        ("no-such-compiler", "no C++ compiler: no-such-compiler not found"),
        ("false", "false failed with exit code 1"),
        ("g++ '-O", 'CXX "g++ \'-O": no closing quotation'),
    ],
)
def test_without_a_working_compiler_torch_does_the_work(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, cxx: str, reason: str
) -> None:
    """One warning names the reason, `status()` too, and the operations work on."""
    monkeypatch.setenv("CXX", cxx)
    assert not cpu_native.available()
    assert not cpu_native.covers("silu_and_mul", torch.ones(1, 2))
    assert reason in cpu_native.status()
    (record,) = caplog.records
    assert record.levelno == logging.WARNING
    assert reason in record.message
    assert torch.allclose(ops.silu_and_mul(torch.ones(1, 2), backend="cpu"), torch.ones(1, 1).sigmoid())


def test_a_compiler_that_refuses_the_sources(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, cache: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Its first error is in the warning, and nothing half-made is in the cache."""
    script = tmp_path / "refusing-compiler"
    script.write_text(
        '#!/bin/sh\n[ "$1" = --version ] && exit 0\necho "x.cpp:1: error: not today" >&2\nexit 1\n'
    )
    script.chmod(0o755)
    monkeypatch.setenv("CXX", str(script))
    assert not cpu_native.available()
    assert "error: not today" in caplog.text
    assert [file.suffix for file in cache.iterdir()] == [".lock"]


WORKING = '[ "$1" = --version ] && { echo "made up 1.0"; exit 0; }\nwhile [ "$1" != -o ]; do shift; done\n'


@pytest.mark.parametrize(
    ("script", "reason"),
    [
        (WORKING, "wrote no library"),
        (
            WORKING + 'echo "int none;" | g++ -shared -fPIC -x c++ -o "$2" -',
            "has no function paged_attention_float32",
        ),
        ("printf '\\377' >&2; exit 1", "failed with exit code 1"),
        (WORKING + 'printf "ld: no room\\ncollect2: error: ld returned 1\\n" >&2; exit 1', "ld: no room"),
    ],
)
def test_a_compiler_that_makes_nothing_of_use(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, script: str, reason: str
) -> None:
    compiler = tmp_path / "odd-compiler"
    compiler.write_text(f"#!/bin/sh\n{script}\n")
    compiler.chmod(0o755)
    monkeypatch.setenv("CXX", str(compiler))
    assert not cpu_native.available()
    assert reason in cpu_native.status()


@pytest.mark.usefixtures("small_source")
def test_a_folder_that_nothing_can_be_loaded_from(
    monkeypatch: pytest.MonkeyPatch, cache: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """As when it is mounted without the right to execute: the library just built is used from elsewhere."""
    open_anywhere = build._open

    def refuse(library: Path) -> object:
        if library.parent == cache:
            raise build.LibraryLoadError("failed to map segment")
        return open_anywhere(library)

    monkeypatch.setattr(build, "_open", refuse)
    assert build.load(WIDEST, COMPILER, cache).answer() == 42
    assert "cannot be used (failed to map segment)" in caplog.text


def test_a_damaged_checksum_counts_as_none(cache: Path) -> None:
    cache.mkdir(parents=True)
    (cache / "a.so").write_bytes(b"x")
    (cache / "a.sha256").write_bytes(b"\xff\xfe\x80")
    assert not build._intact(cache / "a.so")


def test_without_home_the_cache_lies_in_the_home_of_the_user(monkeypatch: pytest.MonkeyPatch) -> None:
    """Not in the current folder, as an empty HOME would have it."""
    for environment in ({}, {"HOME": ""}):
        assert build.cache_folder(environment) == Path(
            pwd.getpwuid(os.getuid()).pw_dir, ".cache/servetwin/kernels"
        )
    monkeypatch.setenv("HOME", "/home/me")
    assert build.cache_folder({"SERVETWIN_CACHE_DIR": "~/c"}) == Path("/home/me/c/kernels")


def test_torch_by_choice(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    """SERVETWIN_CPU_KERNELS=torch compiles nothing and warns of nothing."""
    monkeypatch.setenv(cpu_native.SWITCH, "torch")
    assert not cpu_native.available()
    assert cpu_native.status() == "off: SERVETWIN_CPU_KERNELS=torch"
    assert caplog.records == []


def test_instructions_the_processor_lacks_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """The message lists what there is."""
    monkeypatch.setenv(cpu_native.SWITCH, "avx9000")
    with pytest.raises(ValueError, match=f"got 'avx9000', expected torch, {WIDEST.name}"):
        cpu_native.available()


@pytest.mark.skipif(WIDEST.name == "native", reason="another architecture")
@pytest.mark.parametrize("instruction_set", build.X86_INSTRUCTION_SETS, ids=lambda i: i.name)
def test_every_instruction_set_compiles(instruction_set: build.InstructionSet) -> None:
    """Also those that this processor cannot run, with its own vectors."""
    with build.compiled(instruction_set, COMPILER, build.loaded_openmp()) as library:
        assert library.stat().st_size > 0
    assert not library.exists()


def test_the_widest_instructions_come_first(monkeypatch: pytest.MonkeyPatch) -> None:
    """A processor gets what its flags allow, at least SSE2, which every x86-64 has."""
    monkeypatch.setattr("platform.machine", lambda: "x86_64")
    offered = {}
    for candidate in build.X86_INSTRUCTION_SETS:
        monkeypatch.setattr(build, "cpu_flags", lambda flags=candidate.cpu_flags: flags)
        offered[candidate.name] = [i.name for i in build.instruction_sets()]
    assert offered == {"avx512": ["avx512", "avx2", "sse2"], "avx2": ["avx2", "sse2"], "sse2": ["sse2"]}


@pytest.mark.parametrize(
    ("environment", "folder"),
    [
        ({"SERVETWIN_CACHE_DIR": "/a", "XDG_CACHE_HOME": "/b", "HOME": "/c"}, "/a/kernels"),
        ({"XDG_CACHE_HOME": "/b", "HOME": "/c"}, "/b/servetwin/kernels"),
        ({"HOME": "/c"}, "/c/.cache/servetwin/kernels"),
    ],
)
def test_where_the_cache_lies(environment: dict[str, str], folder: str) -> None:
    """Our own variable, then the common one, then the home folder."""
    assert build.cache_folder(environment) == Path(folder)


def test_importing_compiles_nothing(compiler: build.Compiler, tmp_path: Path) -> None:
    """The first use does, so that a program chooses when it waits."""
    subprocess.run([sys.executable, "-c", "import servetwin.kernels.ops"], check=True)
    assert compilations(tmp_path) == 0
