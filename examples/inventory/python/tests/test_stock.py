from decimal import Decimal

import pytest

from inventory.stock import Item, missing, parse

LIST = """\
# stock of 2026
bolt ; 120 ; 0.15
nut;80;0.05   # small ones

washer;0;0.02
nut;95;0.06
"""


def test_parse():
    items = parse(LIST)
    assert items["bolt"] == Item("bolt", 120, Decimal("0.15"))
    assert items["nut"] == Item("nut", 95, Decimal("0.06"))
    assert sorted(items) == ["bolt", "nut", "washer"]


def test_blank_lines_with_spaces_are_ignored():
    assert parse("   \n\t\n") == {}


def test_errors_name_the_line_as_editors_count():
    with pytest.raises(ValueError, match="line 2"):
        parse("bolt;1;1\nnut;2\n")


def test_missing():
    items = parse(LIST)
    assert missing(items, {"bolt": 120}) == {}
    assert missing(items, {"bolt": 121, "nut": 1}) == {"bolt": 1}


def test_missing_of_unknown_items_is_all_of_them():
    assert missing(parse(LIST), {"rivet": 7}) == {"rivet": 7}
