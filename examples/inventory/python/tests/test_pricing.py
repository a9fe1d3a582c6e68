from decimal import Decimal

import pytest

from inventory.pricing import discount, total
from inventory.stock import parse


@pytest.mark.parametrize(
    "quantity, want", [(1, "0"), (9, "0"), (10, "0.05"), (99, "0.05"), (100, "0.12"), (5000, "0.12")]
)
def test_discount(quantity, want):
    assert discount(quantity) == Decimal(want)


def test_total_rounds_half_up():
    items = parse("pin;100;0.005")
    assert total(items, {"pin": 1}) == Decimal("0.01")


def test_total_of_several_lines():
    items = parse("bolt;500;0.15\nnut;500;0.06")
    assert total(items, {"bolt": 100, "nut": 10}) == Decimal("13.20") + Decimal("0.57")
