"""Hints for choosing a replica: digest of the prompt's first block, and cached prompt tokens of each scheduler."""

from __future__ import annotations

from gateway_svc.request.plan import GenerationPlan
from gateway_svc.request.threads import Lane
from gateway_svc.schedulers.dispatcher import Hints
from prefix_index.hashing import encoder_digest, extend_digests, extra_keys, model_salt, root_digest, root_key
from prefix_index.reader import RedisPrefixReader

MIN_BLOCKS_TO_LOOK_UP = 2  # computing a shorter prefix takes less time than the lookup


class PrefixHints:
    """Reads the prefix index that schedulers publish to. Without a reader, hints have no cached tokens. Never raises;
    waits at most the reader's timeout.
    """

    def __init__(self, lane: Lane, reader: RedisPrefixReader | None) -> None:
        self._lane = lane
        self._reader = reader

    async def look_up(self, plan: GenerationPlan) -> Hints:
        """The hints for a request."""
        digests = await self._lane.run(4 * len(plan.prompt.ids), chain_of, plan)
        affinity = digests[0] if digests else plan.prompt.ids.tobytes()
        if self._reader is None or len(digests) < MIN_BLOCKS_TO_LOOK_UP:
            return Hints(affinity)
        blocks = await self._reader.lookup(digests)
        block_size = plan.model.info.block_size
        return Hints(affinity, {epoch: count * block_size for epoch, count in blocks.items()})


def chain_of(plan: GenerationPlan) -> list[bytes]:
    """Digests of the prompt's full blocks, the same as in the model's schedulers."""
    info = plan.model.info
    digests: list[bytes] = []
    if info.block_size:
        salt = model_salt(info.revision, info.dtype, info.determinism)
        prompt = plan.prompt
        encoder = b"" if prompt.encoder is None else encoder_digest(prompt.ids)
        adapter = plan.model.adapter_digest
        key = root_key(cache_salt=prompt.cache_salt.encode(), encoder=encoder, adapter=adapter)
        root = root_digest(salt, info.block_size, key)
        extend_digests(digests, root, prompt.column, info.block_size, extra_keys(prompt.inputs, info.block_size))
    return digests
