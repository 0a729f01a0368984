"""What the verdicts of a two-sample report go by, for people."""

from __future__ import annotations

VERDICTS = (
    "Verdicts, alike / close (beyond that: differs): distributions by KS, 0.03 (or p at least 0.05) / 0.1; rate, CV "
    "and dispersion by their difference in terms of the larger, 10 % / 25 %; percentages by 3 / 8 points; rank "
    "correlation by 0.05 / 0.15."
)
"""A literal, since help must not wait for numpy; the limits stand in `servetwin.workloads.two_sample`."""
