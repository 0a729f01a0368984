"""Several workloads as one, as if their clients all used one engine."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from servetwin.workloads.columns import REQUEST_FIELDS, RequestColumns, concatenated
from servetwin.workloads.id_lists import id_lists, with_ids
from servetwin.workloads.spec import RequestSpec, WorkloadError
from servetwin.workloads.transform import as_columns


def merged(workloads: Iterable[Sequence[RequestSpec]], *, shared_prefixes: bool = False) -> RequestColumns:
    """All requests by arrival, each workload from its own time 0; at one time in the order of the workloads.

    Request and session ids that an earlier workload has, too, get `@2`, `@3` ... behind them. Prefix ids are numbered
    anew so that no two workloads share one, unless `shared_prefixes`; prompts given by their tokens share what they
    share. Clients and cache salts of one name are the same. Source rows are those of the workloads.
    Raises WorkloadError for none.
    """
    parts = [as_columns(w) for w in workloads]
    if not parts:
        raise WorkloadError("workloads: must be at least one")
    requests, sessions = _Names(), _Names()
    columns, next_id = [], 0
    for place, part in enumerate(parts, start=1):
        part = part.with_column("request_id", requests.apart(part.values("request_id"), place))
        if part.has("session_id"):
            part = part.with_column("session_id", sessions.apart(part.values("session_id"), place))
        if part.has("prefix_ids") and not shared_prefixes and len(parts) > 1:
            lists = id_lists(part)
            part, next_id = with_ids(part, lists.codes + next_id), next_id + lists.distinct
        columns.append({name: part.table[name] for name in REQUEST_FIELDS if name in part.table.column_names})
    return RequestColumns(concatenated(columns)).in_order_of_arrival()


class _Names:
    """Names of one kind that are in use."""

    def __init__(self) -> None:
        self._taken: set[str] = set()

    def apart(self, names: Sequence[str | None], place: int) -> list[str | None]:
        """The names of workload `place`, changed where an earlier workload has them; equal ones stay equal."""
        own = dict.fromkeys(name for name in names if name is not None)
        chosen: dict[str | None, str | None] = {None: None}
        for name in own:
            new = name
            while new in self._taken or (new != name and new in own):
                new = f"{new}@{place}"
            chosen[name] = new
        self._taken.update(new for new in chosen.values() if new is not None)
        return [chosen[name] for name in names]
