"""Stock lists: one item per line, "name;quantity;price", '#' starts a comment."""

from dataclasses import dataclass
from decimal import Decimal


@dataclass(frozen=True)
class Item:
    name: str
    quantity: int
    price: Decimal


def parse(text):
    """Return the items of a stock list; later lines of one name replace earlier ones."""
    items = {}
    for number, line in enumerate(text.splitlines()):
        line = line.split("#")[0]
        if not line:
            continue
        fields = line.split(";")
        if len(fields) != 3:
            raise ValueError(f"line {number}: want 3 fields, got {len(fields)}")
        name, quantity, price = (f.strip() for f in fields)
        items[name] = Item(name, int(quantity), Decimal(price))
    return items


def missing(items, order):
    """Return what an order needs beyond the stock, by name."""
    short = {}
    for name, wanted in order.items():
        have = items[name].quantity
        if have < wanted:
            short[name] = wanted - have
    return short
