"""The table of cards, and how names are matched."""

from __future__ import annotations

import pytest

from servetwin.sim.cards import card_names, find_card


@pytest.mark.parametrize(
    ("typed", "name"),
    [
        ("h100", "H100-SXM"),
        ("H100_SXM", "H100-SXM"),
        ("NVIDIA H100 80GB HBM3", "H100-SXM"),
        ("h100 pcie", "H100-PCIe"),
        ("a100", "A100-80GB"),
        ("NVIDIA A100-SXM4-40GB", "A100-40GB"),
        ("rtx4090", "RTX-4090"),
        ("4090", "RTX-4090"),
        ("NVIDIA GeForce RTX 4090", "RTX-4090"),
        ("NVIDIA RTX PRO 6000 Blackwell Server Edition", "RTX-PRO-6000"),
        ("AMD Instinct MI300X", "MI300X"),
        ("b200", "B200"),
        ("l40s", "L40S"),
        ("H200", "H200"),
    ],
)
def test_names_are_matched_loosely(typed: str, name: str) -> None:
    """Case, spaces, dashes and the maker's words do not count."""
    assert find_card(typed).name == name


def test_every_printed_name_finds_its_card() -> None:
    assert [find_card(name).name for name in card_names()] == card_names()


@pytest.mark.parametrize("typed", ["h1000", "", "rtx", "v100"])
def test_an_unknown_card_is_refused_with_the_list(typed: str) -> None:
    with pytest.raises(ValueError, match=r"is not known; allowed: A100-40GB, .*MI300X"):
        find_card(typed)


@pytest.mark.parametrize("name", card_names())
def test_figures_are_dense_and_plausible(name: str) -> None:
    """fp8 never more than twice bf16 (sparse figures would be), a link slower than the memory, 20 to 200 GiB."""
    card = find_card(name)
    assert card.bf16_flops <= card.fp8_flops <= 2.05 * card.bf16_flops
    assert card.link_bytes_per_s < card.bandwidth_bytes_per_s
    assert 20 * 2**30 < card.memory_bytes < 200 * 2**30


def test_defaults_follow_vllms_device_rule() -> None:
    """From 70 GiB on, and no A100: 1,024 seats and 8,192 tokens."""
    assert find_card("H100").default_limits() == (1024, 8192)
    assert find_card("A100-80GB").default_limits() == (256, 2048)
    assert find_card("RTX-4090").default_limits() == (256, 2048)
