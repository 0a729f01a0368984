"""Set-up that every test shares. The interpreter switch must come before anything imports triton."""

from __future__ import annotations

import os

os.environ.setdefault("TRITON_INTERPRET", "1")
os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")

import signal
from pathlib import Path

import pytest
from hypothesis import HealthCheck, Phase, settings

# A shell that starts this in the background has it ignored, and every process of the tests would inherit that.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)

ROOT = Path(__file__).resolve().parent.parent

settings.register_profile("dev", max_examples=50, deadline=None)
settings.register_profile("ci", max_examples=300, deadline=None, derandomize=True, print_blob=True)
settings.register_profile(
    "nightly", max_examples=5000, deadline=None, suppress_health_check=[HealthCheck.too_slow]
)
# For changes that are to be noticed: a failure is enough, nobody reads the example.
settings.register_profile(
    "mutations",
    max_examples=300,
    deadline=None,
    derandomize=True,
    phases=[Phase.explicit, Phase.generate],
)
settings.load_profile(os.environ.get("SERVETWIN_HYPOTHESIS_PROFILE", "ci"))


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--full", action="store_true", help="also run the tests marked `full`")
    parser.addoption("--nightly", action="store_true", help="also run the tests marked `nightly`")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Leaves out the tests of tiers that were not asked for (deselected, not skipped: nothing is missing)."""
    tiers = {name for name in ("full", "nightly") if not config.getoption(f"--{name}")}
    dropped = [item for item in items if any(item.get_closest_marker(t) for t in tiers)]
    if dropped:
        config.hook.pytest_deselected(items=dropped)
        items[:] = [item for item in items if item not in dropped]


@pytest.fixture(scope="session")
def shared_data() -> Path:
    """The folder of reference data, from SERVETWIN_DATA (default: ../shared beside the repository)."""
    path = Path(os.environ.get("SERVETWIN_DATA", ROOT.parent / "shared"))
    if not path.is_dir():
        pytest.skip(f"reference data not found at {path} (set SERVETWIN_DATA)")
    return path
