"""What images are called in COCO's json: numbers where these tell them apart."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from utils.evaluate.coco import MAX_NUMBER, image_identifiers


def test_numbers_where_they_are_unique():
    names = ["000000000139", "1", "01", "001", "7", "a", "1_000", "-5", "²3", "٣", str(MAX_NUMBER), "9" * 30]
    found = image_identifiers(names)
    assert found["000000000139"] == 139 and found["7"] == 7 and found[str(MAX_NUMBER)] == MAX_NUMBER
    assert all(found[name] == name for name in names if found[name] not in (139, 7, MAX_NUMBER))


@given(st.sets(st.text("01x", min_size=1, max_size=5)))
def test_two_names_never_share_an_identifier(names):
    found = image_identifiers(names)
    assert set(found) == names and len(set(found.values())) == len(names)
