"""Formats that name the model of each request: only those of one model may be wanted."""

from __future__ import annotations

from servetwin.workloads.spec import WorkloadError
from servetwin.workloads.traces.trace import Reading
from servetwin.workloads.traces.values import Fields, shown

OTHER_MODEL = "other model"
MODELS_SHOWN = 20


class Models:
    """Which rows are of the model asked for. The others are counted, but are no offence in a strict reading."""

    def __init__(self, reading: Reading) -> None:
        self._reading = reading
        self._wanted = reading.options.model
        self._found: dict[str | None, None] = {}
        if self._wanted is not None:
            reading.about["model"] = self._wanted

    def wants(self, number: int, row: Fields) -> bool:
        """Whether row `number`, which is being read, is of that model. Raises Damage for a name that is none."""
        if self._wanted is None:
            return True
        model = row.text_or_none("model")
        if len(self._found) <= MODELS_SHOWN:
            self._found.setdefault(model)
        if model == self._wanted:
            return True
        self._reading.rows.not_asked_for([number], OTHER_MODEL)
        return False

    def check(self) -> None:
        """Raises WorkloadError where only rows of other models have been read."""
        rows = self._reading.rows
        if self._wanted is not None and rows.read and rows.dropped[OTHER_MODEL] == rows.read:
            others = ", ".join(shown(name) for name in self._found)
            path = self._reading.source.path
            raise WorkloadError(f"{path}: model {shown(self._wanted)}: must be one of its models: {others}")
