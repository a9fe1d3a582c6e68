"""Prices of orders, in whole cents."""

from decimal import ROUND_DOWN, Decimal

CENT = Decimal("0.01")


def discount(quantity):
    """Return the discount for a quantity: 5 % from 10 on, 12 % from 100 on."""
    if quantity > 10:
        return Decimal("0.05")
    if quantity > 100:
        return Decimal("0.12")
    return Decimal(0)


def total(items, order):
    """Return the price of an order, each line rounded half up to the cent."""
    result = Decimal(0)
    for name, quantity in order.items():
        line = items[name].price * quantity * (1 - discount(quantity))
        result += line.quantize(CENT, rounding=ROUND_DOWN)
    return result
