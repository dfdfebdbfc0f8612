"""What a layout says about a block, and which layouts a lane can put together."""

from dataclasses import replace

import pytest

from kvtransfer.layout import KvLayout, first_difference

LAYOUT = KvLayout(
    model="toy",
    model_digest="00",
    dtype="bfloat16",
    block_size=5,
    num_layers=3,
    num_kv_heads=2,
    head_dim=4,
)


def test_a_block_is_two_bytes_for_each_of_its_elements():
    assert LAYOUT.block_shape == (3, 2, 2, 5, 4)
    assert LAYOUT.block_bytes == 3 * 2 * 2 * 5 * 4 * 2


@pytest.mark.parametrize(
    ("order", "shape"),
    [("L2HSD", (3, 2, 2, 5, 4)), ("L2SHD", (3, 2, 5, 2, 4)), ("SL2HD", (5, 3, 2, 2, 4))],
)
def test_the_inner_order_moves_dimensions_and_leaves_the_logical_shape(order, shape):
    layout = replace(LAYOUT, inner_order=order)
    assert layout.inner_shape == shape
    assert layout.block_shape == LAYOUT.block_shape
    assert layout.block_bytes == LAYOUT.block_bytes


@pytest.mark.parametrize("order", ["", "L2HS", "L2HSDD", "LLHSD", "l2hsd", "L2HSX"])
def test_an_order_of_other_letters_is_refused_by_name(order):
    with pytest.raises(ValueError, match=r"^inner_order: "):
        replace(LAYOUT, inner_order=order)


@pytest.mark.parametrize(("tokens", "blocks"), [(1, 1), (4, 1), (5, 1), (6, 2), (123, 25)])
def test_blocks_are_rounded_up(tokens, blocks):
    assert LAYOUT.blocks_for(tokens) == blocks


@pytest.mark.parametrize("change", [{"block_size": 16}, {"inner_order": "L2SHD"}])
def test_what_a_lane_translates_is_no_difference_but_another_fingerprint(change):
    other = replace(LAYOUT, **change)
    assert first_difference(LAYOUT, other) is None
    assert other.fingerprint != LAYOUT.fingerprint


@pytest.mark.parametrize(
    "change",
    [
        {"model": "other"},
        {"model_digest": "01"},
        {"dtype": "float16"},
        {"num_layers": 4},
        {"num_kv_heads": 1},
        {"head_start": 2},
        {"head_dim": 8},
    ],
)
def test_everything_else_that_differs_is_named(change):
    ((name, value),) = change.items()
    expected = f"{name}: {getattr(LAYOUT, name)} != {value}"
    assert first_difference(LAYOUT, replace(LAYOUT, block_size=7, **change)) == expected
