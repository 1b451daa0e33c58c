"""Public prefixes: the first blocks of a prompt have the same digests for all salts, later ones depend on the salt."""

from __future__ import annotations

from collections.abc import Mapping

from scheduler_svc.core.sequence import Feature


class PublicPrefix(Feature):
    """The first `num_blocks` blocks of the prompt are public. The digest of the next block covers `salt_key`, in place
    of the root, so those of all later blocks depend on it.
    """

    def __init__(self, num_blocks: int, salt_key: bytes) -> None:
        self._keys = {num_blocks: salt_key}

    def block_keys(self, block_size: int) -> Mapping[int, bytes]:
        """The salt's key at the border."""
        return self._keys
