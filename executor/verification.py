"""Which of a step's sampled tokens are kept, when some of its inputs were guesses.

A row with k drafts has 1 + k rows of logits: behind its last known token, and behind each draft. All are sampled
in the usual way, each as if the drafts before it were outputs. A draft is accepted when it is the token sampled in
its place and all drafts before it were accepted; what is sampled behind the first wrong draft means nothing. Since
a draft is one definite token, the tokens that are kept have the distribution (and, with noise named by its place, the
very values) of decoding without drafts.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

Int64Array = npt.NDArray[np.int64]
NO_DRAFT = -1
"""Stands behind the last row of logits of a request."""


def kept_tokens(
    token_ids: Int64Array, next_draft_ids: Int64Array, num_drafts_before: Int64Array
) -> npt.NDArray[np.bool_]:
    """Which sampled tokens are kept, `[num_logits]`: of each request the accepted drafts and the token behind them.

    All arguments are `[num_logits]`: the tokens sampled, the draft that stood in the place of each (NO_DRAFT: none
    did), and how many drafts of its request stood before it.
    """
    wrong = token_ids != next_draft_ids
    wrong_before = np.cumsum(wrong) - wrong
    first_of_request = np.arange(len(wrong)) - num_drafts_before
    kept: npt.NDArray[np.bool_] = wrong_before == wrong_before[first_of_request]
    return kept
