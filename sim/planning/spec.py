"""What decides a simulated run, as a value: it can be compared, sent to another process, written and hashed."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass, replace
from importlib.metadata import version
from pathlib import Path
from typing import Any, Self

import orjson

from servetwin.sim.commands.errors import UsageError
from servetwin.sim.commands.flags import RunFlags
from servetwin.sim.commands.loading import Load
from servetwin.sim.commands.run_fields import groups, parsed, plain, run_field
from servetwin.sim.commands.running import RunRequest
from servetwin.sim.planning.named_files import FileDigests
from servetwin.sim.runs import SCHEMA_VERSION

WORKLOAD = "workload"


@dataclass(frozen=True)
class RunSpec:
    """A workload and the groups of flags that `servetwin run` takes; every field by its name, with underscores.

    `--vllm-args` are merged into the engine's flags when a spec is made, so that a field set later always wins.
    """

    workload: str | None
    """A path or a preset's name; None with `dataset_name`."""
    groups: tuple[Any, ...]
    """In the order of `run_fields.groups()`."""

    @classmethod
    def of(cls, workload: str | None, **given: Any) -> Self:
        """From whole groups of flags by their parameter of `run`; those that are not given are at their defaults.

        Raises UsageError for --vllm-args that cannot be followed; what has no effect in them is said.
        """
        spec = cls(workload, tuple(given.get(name, default) for name, default in groups().items()))
        engine = spec.request().with_vllm_args().engine
        return spec._with_group("engine", replace(engine, vllm_args=None))

    @classmethod
    def from_fields(cls, workload: str | Path | None = None, **values: Any) -> Self:
        """From single fields. Raises UsageError as `with_` does."""
        spec = cls(None if workload is None else str(workload), tuple(groups().values()))
        spec = spec.with_(**values)
        return cls.of(spec.workload, **dict(zip(groups(), spec.groups, strict=True)))

    def __getitem__(self, name: str) -> Any:
        """The value of a field. Raises UsageError for an unknown name."""
        if name == WORKLOAD:
            return self.workload
        return getattr(self.group(run_field(name).group), name)

    def group(self, name: str) -> Any:
        """The group of flags that is this parameter of `run`."""
        return self.groups[list(groups()).index(name)]

    def with_(self, **values: Any) -> Self:
        """The same with these fields, from texts as typed or from Python values.

        Raises UsageError for an unknown name (near ones are told) and for a value that the command line would refuse.
        """
        spec = self
        for name, value in values.items():
            if name == WORKLOAD:
                spec = spec.with_read(workload=None if value is None else str(value))
                continue
            spec = spec.with_read(**{name: parsed(name, value)})
        return spec

    def with_read(self, **values: Any) -> Self:
        """The same with values that `with_` or `parsed` has read before; nothing is checked again."""
        spec = self
        for name, value in values.items():
            if name == WORKLOAD:
                spec = replace(spec, workload=value)
                continue
            group = run_field(name).group
            spec = spec._with_group(group, replace(spec.group(group), **{name: value}))
        return spec

    def _with_group(self, name: str, group: Any) -> Self:
        return replace(
            self, groups=tuple(group if n == name else g for n, g in zip(groups(), self.groups, strict=True))
        )

    def to_json(self) -> dict[str, Any]:
        """Every field as a JSON value; `from_json` reads it back."""
        values = {name: plain(value) for group in self.groups for name, value in vars(group).items()}
        return {WORKLOAD: self.workload, **values}

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> Self:
        """Raises UsageError for unknown names and values that are not allowed."""
        values = {name: tuple(v) if isinstance(v, list) else v for name, v in data.items()}
        return cls(None, tuple(groups().values())).with_(**values)

    def differences(self, other: RunSpec) -> dict[str, tuple[Any, Any]]:
        """Field -> its value here and there, where they differ."""
        mine, theirs = self.to_json(), other.to_json()
        return {name: (mine[name], theirs[name]) for name in mine if mine[name] != theirs[name]}

    def content_hash(self, known: FileDigests | None = None) -> str:
        """sha256 (hex) of everything that the figures of this run depend on.

        The fields, the bytes of the files that they name, this version, and that of the log. `known`: files that were
        read before are not read again.
        """
        content = {
            "spec": self.to_json(),
            "files": self.file_digests(known),
            "version": version("servetwin"),
            "log_schema": SCHEMA_VERSION,
        }
        return hashlib.sha256(orjson.dumps(content, option=orjson.OPT_SORT_KEYS)).hexdigest()

    def file_digests(self, known: FileDigests | None = None) -> dict[str, str]:
        """Field -> sha256 of the file, folder or module that its value names."""
        values = {name: value for group in self.groups for name, value in vars(group).items()}
        return (known or FileDigests()).of({WORKLOAD: self.workload, **values})

    def request(self) -> RunRequest:
        """The command line of `run` that this is, writing nothing."""
        by_name = dict(zip(groups(), self.groups, strict=True))
        load = Load(self.workload, by_name.pop("load"), by_name.pop("trace"))
        return RunRequest(load, **by_name | {"flags": RunFlags(**vars(by_name["flags"]))})

    def check(self) -> None:
        """Raises UsageError for what can be seen before anything is built, and for times that are measured."""
        if self["executor"] in (None, "torch"):
            why = (
                "torch measures its steps, so that no two runs are alike"
                if self["executor"]
                else "is missing"
            )
            raise UsageError(
                f"--executor {why}; allowed: constant (with --step-time-s), roofline (with --gpu and --model), a "
                "profile, recorded:RUN, or module:attribute"
            )
        self.request().check()
