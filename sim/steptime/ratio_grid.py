"""Times measured on a grid: interpolated as a ratio to a physical model, which carries their growth.

A non-negative sum of physical terms (launch, compute, memory traffic) comes within some 10 % everywhere. What is left,
the ratio of measured to model, varies slowly, so that straight lines between grid points follow it well: linear in the
logarithm of the ratio over logarithms of the coordinates. Grid points that were not measured are filled in first, from
their neighbours along each axis, weighted by how well such neighbours foretell the points that were measured.

Beyond the grid the ratio of the nearest edge stands, and the physical model alone grows.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]
SMALLEST_ERROR = 1e-4
"""Of a log-ratio: no neighbour is trusted more."""


class RatioGrid:
    """`points` [n, axes], `ratios` [n], above 0: measured over modelled time."""

    def __init__(self, points: Floats, ratios: Floats) -> None:
        from scipy.interpolate import RegularGridInterpolator

        grid = [np.unique(axis) for axis in points.T]
        # An axis with one value says nothing of its direction.
        self._axes = [i for i, values in enumerate(grid) if len(values) > 1]
        self._low, self._high = points.min(axis=0), points.max(axis=0)
        self._level = float(np.log(ratios).mean())
        if not self._axes:
            return
        coordinates = [np.log1p(grid[i]) for i in self._axes]
        places = tuple(np.searchsorted(grid[i], points[:, i]) for i in self._axes)
        nodes = np.full([len(axis) for axis in coordinates], np.nan)
        nodes[places] = np.log(ratios)
        self._interpolate = RegularGridInterpolator(coordinates, filled(nodes, coordinates))

    def __call__(self, points: Floats) -> Floats:
        """Ratios [n] at `points` [n, axes]."""
        if not self._axes:
            return np.full(len(points), np.exp(self._level))
        inside = np.clip(points, self._low, self._high)[:, self._axes]
        ratios: Floats = np.exp(self._interpolate(np.log1p(inside)))
        return ratios


def filled(nodes: Floats, axes: Sequence[Floats]) -> Floats:
    """The nodes of a tensor grid with values for those that are NaN; `axes`: the coordinates along each axis."""
    missing = np.isnan(nodes)
    if not missing.any():
        return nodes
    total, weight = np.zeros(nodes.shape), np.zeros(nodes.shape)
    for axis, coordinates in enumerate(axes):
        estimates = _between_neighbours(nodes, coordinates, axis)
        found = ~np.isnan(estimates)
        trust = _expected_error(np.abs(estimates - nodes)) ** -2
        total[found] += (trust * estimates)[found]
        weight[found] += trust[found]
    known = nodes.copy()
    by_neighbours = missing & (weight > 0)
    known[by_neighbours] = total[by_neighbours] / weight[by_neighbours]
    return _with_nearest(known)


def _between_neighbours(nodes: Floats, coordinates: Floats, axis: int) -> Floats:
    """Each node on the straight line between the nearest known ones before and behind it; NaN without both."""
    lines = np.moveaxis(nodes, axis, -1)
    count = lines.shape[-1]
    places = np.where(np.isnan(lines), -1, np.arange(count))
    before = np.maximum.accumulate(places, axis=-1)
    before = np.concatenate([np.full((*lines.shape[:-1], 1), -1), before[..., :-1]], axis=-1)
    places = np.where(np.isnan(lines), count, np.arange(count))
    behind = np.minimum.accumulate(places[..., ::-1], axis=-1)[..., ::-1]
    behind = np.concatenate([behind[..., 1:], np.full((*lines.shape[:-1], 1), count)], axis=-1)
    both = (before >= 0) & (behind < count)
    first, last = np.where(both, before, 0), np.where(both, behind, count - 1)
    share = (coordinates - coordinates[first]) / (coordinates[last] - coordinates[first])
    values = np.take_along_axis(lines, first, -1), np.take_along_axis(lines, last, -1)
    estimates = np.where(both, values[0] + share * (values[1] - values[0]), np.nan)
    in_place: Floats = np.moveaxis(estimates, -1, axis)
    return in_place


def _expected_error(errors: Floats) -> Floats:
    """What an estimate at each node is likely to be off: the mean error of measured nodes (NaN elsewhere), times how
    much larger than that it is at this place on every axis.
    """
    mean = max(float(np.nanmean(errors)) if not np.isnan(errors).all() else 1.0, SMALLEST_ERROR)
    expected = np.full(errors.shape, np.log(mean))
    for axis, count in enumerate(errors.shape):
        slices = np.moveaxis(errors, axis, 0).reshape(count, -1)
        seen = (~np.isnan(slices)).sum(axis=1)
        at_place = np.where(seen > 0, np.nansum(slices, axis=1) / np.maximum(seen, 1), mean)
        shape = [1] * errors.ndim
        shape[axis] = count
        expected = expected + np.log(np.maximum(at_place, SMALLEST_ERROR) / mean).reshape(shape)
    errors_expected: Floats = np.maximum(np.exp(expected), SMALLEST_ERROR)
    return errors_expected


def _with_nearest(nodes: Floats) -> Floats:
    """What has no neighbours on both sides of any axis takes the value of the nearest node."""
    if not np.isnan(nodes).any():
        return nodes
    from scipy.ndimage import distance_transform_edt

    nearest = distance_transform_edt(np.isnan(nodes), return_distances=False, return_indices=True)
    taken: Floats = nodes[tuple(nearest)]
    return taken
