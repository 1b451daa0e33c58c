"""Content ids: bit 31 is set, and they follow from the digest of an input and the index in it."""

import numpy as np

from prefix_index.hashing import DIGEST_BYTES, FIRST_CONTENT_ID, content_digest, content_ids


def ids_of(digest: bytes, length: int) -> list[int]:
    return np.frombuffer(content_ids(digest, length), dtype="<u4").tolist()


def test_content_ids_have_fixed_values() -> None:
    """Gateways, schedulers and cached blocks of different releases must agree on them."""
    assert ids_of(bytes(range(16)), 3) == [3323545752, 4039542238, 2990844071]
    assert content_digest(b"a", b"bc").hex() == "f14abc19c330e936bb9c8506d69bac9b"


def test_each_id_is_above_all_token_ids() -> None:
    ids = ids_of(content_digest(b"image"), 2000)
    assert min(ids) >= FIRST_CONTENT_ID
    assert len(set(ids)) == len(ids)


def test_a_longer_input_with_the_same_digest_begins_with_the_same_ids() -> None:
    assert ids_of(b"d" * 16, 7) == ids_of(b"d" * 16, 100)[:7]


def test_a_digest_depends_on_each_part_and_on_its_length() -> None:
    parts = [(b"ab", b"c"), (b"a", b"bc"), (b"abc",), (b"abc", b""), (b"", b"abc"), (b"ab", b"d")]
    digests = {content_digest(*each) for each in parts}
    assert len(digests) == len(parts)
    assert {len(digest) for digest in digests} == {DIGEST_BYTES}


def test_inputs_with_other_digests_have_other_ids() -> None:
    assert not set(ids_of(content_digest(b"1"), 500)) & set(ids_of(content_digest(b"2"), 500))
