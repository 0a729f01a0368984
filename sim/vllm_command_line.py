"""A `vllm serve` command line taken apart: which flag was given which value, configuration file included.

Nothing is given a meaning here. The habits are those of vLLM's parser (ecosystem.md 1): `-` and `_` are the
same in names, `--flag=value`, `--no-flag`, JSON or dotted keys for nested configurations, `--config FILE.yaml`
below the command line.
"""

from __future__ import annotations

import re
import shlex
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from difflib import get_close_matches
from itertools import takewhile
from pathlib import Path
from typing import Any, NamedTuple

import orjson

from servetwin.sim.vllm_flags import FLAGS, SHORT, Takes, spelled

_PROGRAMS = (
    ("vllm", "serve"),
    ("serve",),
    ("python", "-m", "vllm.entrypoints.openai.api_server"),
    ("python3", "-m", "vllm.entrypoints.openai.api_server"),
)
_ASSIGNMENT = re.compile(r"[A-Za-z_]\w*=")
_FLAG = re.compile(r"--?[A-Za-z]")
_LEVEL = re.compile(r"-O(\d+)")


class VllmArgsError(ValueError):
    """A vLLM command line that cannot be followed; the message names flag, value and what is allowed."""


@dataclass(frozen=True, slots=True)
class CommandLine:
    """What was given; of a flag given twice the last, and the command line before the configuration file."""

    flags: dict[str, Any]
    """Name with underscores -> bool (no value), str, list of str, or (a nested configuration) str or dict."""
    environment: dict[str, str]
    """Assignments in front of the command."""


class _Given(NamedTuple):
    name: str
    keys: tuple[str, ...]
    """Path into a nested configuration; empty: all of it."""
    value: Any


def read_command_line(text: str) -> CommandLine:
    """Raises VllmArgsError for an unknown flag, a missing value, or a configuration file that cannot be read."""
    environment, words = _without_program(_words(text))
    typed = list(_given_by_words(words))
    files = [given.value for given in typed if given.name == "config"]
    if len(files) > 1:
        raise VllmArgsError(f"--config is given {len(files)} times: one file is allowed")
    from_file = _given_by_file(Path(files[0])) if files else ()
    flags = _collected([*from_file, *typed])
    flags.pop("config", None)
    return CommandLine(flags, environment)


def _words(text: str) -> list[str]:
    try:
        return shlex.split(text.replace("\\\n", " "))
    except ValueError as e:
        raise VllmArgsError(f"{text!r}: {str(e).lower()}") from e


def _without_program(words: list[str]) -> tuple[dict[str, str], list[str]]:
    assignments = list(takewhile(_ASSIGNMENT.match, words))
    environment = dict(word.split("=", 1) for word in assignments)
    rest = words[len(assignments) :]
    for program in _PROGRAMS:
        if tuple(rest[: len(program)]) == program:
            return environment, rest[len(program) :]
    if "serve" in rest and "bench" not in rest:
        # Behind a launcher, such as `nohup vllm serve ...`.
        return environment, rest[rest.index("serve") + 1 :]
    if len(rest) > 1 and not rest[0].startswith("-") and not rest[1].startswith("-"):
        raise VllmArgsError(
            f"no `vllm serve` in {' '.join(rest[:4])!r} ...; paste from `serve` or from the model on"
        )
    return environment, rest


def _given_by_words(words: Sequence[str]) -> Iterator[_Given]:
    rest = deque(_LEVEL.sub(r"--optimization-level=\1", w) if _LEVEL.fullmatch(w) else w for w in words)
    model: str | None = None
    while rest:
        word = rest.popleft()
        given = _read_flag(word, rest) if _FLAG.match(word) else _Given("model", (), word)
        if given.name == "model":
            if model is not None:
                raise VllmArgsError(f"{given.value!r} was not expected: the model is {model!r} already")
            model = given.value
        yield given


def _read_flag(word: str, rest: deque[str]) -> _Given:
    text, equals, inline = word.partition("=")
    name, keys, on = _resolve(text)
    takes = FLAGS[name]
    if takes is Takes.NOTHING:
        if equals:
            raise VllmArgsError(f"{word}: takes {takes.value}")
        return _Given(name, keys, on)
    values = [inline] if equals else _following(rest, takes)
    if not values and takes is Takes.MAYBE:
        return _Given(name, keys, True)
    if not values:
        raise VllmArgsError(f"{text}: takes {takes.value}, and none follows")
    return _Given(name, keys, values if takes is Takes.MANY else values[0])


def _following(rest: deque[str], takes: Takes) -> list[str]:
    """The words that belong to a flag, taken from the front of `rest`."""
    values: list[str] = []
    while rest and not _FLAG.match(rest[0]) and (takes is Takes.MANY or not values):
        values.append(rest.popleft())
    return values


def _resolve(text: str) -> tuple[str, tuple[str, ...], bool]:
    """`--no-x`, `--x.key`, `-tp` -> (name, keys, whether it is switched on)."""
    root, *keys = text.lstrip("-").split(".")
    name = root.replace("-", "_") if text.startswith("--") else SHORT.get(root, "")
    on = True
    if name not in FLAGS and FLAGS.get(name.removeprefix("no_")) is Takes.NOTHING:
        name, on = name.removeprefix("no_"), False
    if name not in FLAGS:
        raise VllmArgsError(f"{text} is no flag of vllm serve 0.22{_did_you_mean(root)}")
    if keys and FLAGS[name] is not Takes.JSON:
        raise VllmArgsError(f"{text}: {spelled(name)} takes {FLAGS[name].value}, and no dotted key")
    return name, tuple(key.replace("-", "_") for key in keys), on


def _did_you_mean(root: str) -> str:
    similar = get_close_matches(root.replace("-", "_"), FLAGS, n=1, cutoff=0.7)
    return f"; did you mean {spelled(similar[0])}?" if similar else ""


def _given_by_file(path: Path) -> Iterator[_Given]:
    for key, value in _yaml_mapping(path).items():
        try:
            name, keys, on = _resolve(f"--{key}")
            if name == "config":
                raise VllmArgsError("--config: stands in a configuration file itself")
            if value is not None:
                yield _Given(name, keys, _file_value(name, on, value))
        except VllmArgsError as e:
            raise VllmArgsError(f"{path}: {e}") from e


def _yaml_mapping(path: Path) -> dict[Any, Any]:
    import yaml

    try:
        content = yaml.safe_load(path.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, yaml.YAMLError) as e:
        raise VllmArgsError(f"--config {path}: cannot be read: {e}") from e
    if not isinstance(content, dict):
        raise VllmArgsError(f"--config {path}: must map flag names to values, holds {type(content).__name__}")
    return content


def _file_value(name: str, on: bool, value: Any) -> Any:
    takes = FLAGS[name]
    if takes is Takes.NOTHING:
        if not isinstance(value, bool):
            raise VllmArgsError(f"{spelled(name)} {value!r}: must be true or false")
        return value is on
    if takes is Takes.MANY:
        return [str(v) for v in value] if isinstance(value, list) else [str(value)]
    if takes is Takes.JSON and isinstance(value, dict):
        return value
    return orjson.dumps(value).decode() if isinstance(value, dict | list) else str(value)


def _collected(all_given: Iterable[_Given]) -> dict[str, Any]:
    flags: dict[str, Any] = {}
    for name, keys, value in all_given:
        if keys:
            flags[name] = _with_key(json_object(name, flags.get(name, {})), keys, value)
        else:
            flags[name] = value
    return flags


def json_object(name: str, value: Any) -> dict[str, Any]:
    """The object that a nested configuration holds, decoded where it was given as text."""
    decoded = value
    if isinstance(value, str):
        try:
            decoded = orjson.loads(value)
        except orjson.JSONDecodeError as e:
            raise VllmArgsError(f"{spelled(name)} {value!r}: is not JSON: {e}") from e
    if not isinstance(decoded, dict):
        raise VllmArgsError(f"{spelled(name)} {value!r}: must be a JSON object")
    return decoded


def _with_key(config: dict[str, Any], keys: tuple[str, ...], value: Any) -> dict[str, Any]:
    """`config` with the value put where the keys lead; a key that ends in + adds to a list."""
    first, *deeper = keys
    if deeper:
        inner = config.get(first, {})
        return {
            **config,
            first: _with_key(inner if isinstance(inner, dict) else {}, tuple(deeper), value),
        }
    if first.endswith("+"):
        key = first.removesuffix("+")
        more = [_json_or_text(part) for part in str(value).split(",")]
        return {**config, key: [*config.get(key, []), *more]}
    return {**config, first: _json_or_text(value)}


def _json_or_text(value: Any) -> Any:
    if not isinstance(value, str):
        return value
    try:
        return orjson.loads(value)
    except orjson.JSONDecodeError:
        return value
