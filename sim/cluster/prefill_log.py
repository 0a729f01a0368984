"""The log of a replica that computes prompts: what is done there goes on elsewhere."""

from __future__ import annotations

from servetwin.sim.columns import COMPLETED, NEVER
from servetwin.sim.events import EventLog, OpenRequest, Sink


class PrefillLog(EventLog):
    """Keeps requests whose prompt is computed for `hand_over`, instead of writing their rows."""

    def __init__(
        self, sink: Sink, *, log_blocks: bool = True, save_tokens: bool = False, replica: int | None = 0
    ) -> None:
        super().__init__(sink, log_blocks=log_blocks, save_tokens=save_tokens, replica=replica)
        self._done: dict[str, OpenRequest] = {}

    def hand_over(self, request_id: str) -> OpenRequest | None:
        """What is known of a request that is done here; None when it ended otherwise."""
        return self._done.pop(request_id, None)

    def _event(
        self,
        time_ns: int,
        request_id: str | None,
        kind: str,
        reason: str | None = None,
        computed_tokens: int = 0,
        blocks: int = 0,
        until_ns: int = NEVER,
    ) -> None:
        if kind == "finished":
            kind, reason = "prefilled", None
        super()._event(time_ns, request_id, kind, reason, computed_tokens, blocks, until_ns)

    def _ended(self, request_id: str, reason: str, finish_ns: int) -> None:
        if reason not in COMPLETED:
            super()._ended(request_id, reason, finish_ns)
            return
        request = self._open.pop(request_id)
        # The token that came out of it is computed again where the answer is.
        request.first_token_ns = request.last_token_ns = request.since_step = request.last_step = NEVER
        request.num_output_tokens = request.blocks = 0
        self._done[request_id] = request
