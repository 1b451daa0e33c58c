"""The token ids of the texts of Embed and Score, as sentence-transformers makes them."""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from dataclasses import dataclass

from quire.v1 import inference_pb2 as pb

from gateway_svc.request.field_errors import check_token_ids
from gateway_svc.request.models import ServedModel
from gateway_svc.request.prompts.images import has_images
from gateway_svc.request.prompts.readers import TOKEN_READERS, PromptReaders
from gateway_svc.text.bundle import Tokenizer
from svc_common.errors import ContextLengthError, InvalidRequestError

PAIR_ROLES = ("query", "document")


@dataclass(frozen=True, slots=True)
class PooledInput:
    """One text, or a pair of texts, as token ids."""

    ids: array[int]
    second_text: int = 0  # position of the first token of the second text; 0: there is one text


class InputReader:
    """Converts the inputs of one model."""

    def __init__(self, prompts: PromptReaders, model: ServedModel, *, truncates: bool) -> None:
        self._prompts = prompts
        self._model = model
        self._truncates = truncates
        self._limit = model.info.pooling.max_length

    async def inputs(self, prompts: Sequence[pb.Prompt], prompt_name: str) -> list[PooledInput]:
        """The inputs of an Embed. `prompt_name`: of a prompt of the model, which precedes each text."""
        prefix = self._prefix(prompt_name)
        found = []
        for i, prompt in enumerate(prompts):
            field = f"inputs[{i}]"
            if prompt.WhichOneof("kind") == "text":
                ids = await self._text(prefix + prompt.text, field)
            elif prompt_name:
                raise InvalidRequestError(f"prompt_name applies to texts, but {field} is no text", field="prompt_name")
            else:
                ids = self._fitting(await self._given(prompt, field), field)
                check_token_ids(field, ids, self._model)
            found.append(PooledInput(array("I", ids)))
        return found

    async def pairs(self, pairs: Sequence[pb.TextPair]) -> list[PooledInput]:
        """Both texts of each pair in one input, with the special tokens of the model."""
        tokenizer, lane = self._model.require_tokenizer("pairs"), self._prompts.threads.requests
        found = []
        for i, pair in enumerate(pairs):
            size = pair.ByteSize()
            ids, second = await lane.run(size, tokenizer.encode_pair, pair.query, pair.document, self._cut)
            found.append(PooledInput(array("I", self._checked(ids, f"pairs[{i}]")), second))
        return found

    async def rendered_pairs(self, pairs: Sequence[pb.TextPair], instruction: str) -> list[PooledInput]:
        """Both texts of each pair in the model's chat template, as messages of the roles query and document."""
        found = []
        for i, pair in enumerate(pairs):
            chat = pb.Chat(add_generation_prompt=self._model.text.pooling.adds_generation_prompt)
            if given := instruction or self._prefix(""):
                chat.messages.add(role="system", content=given)
            for role, content in zip(PAIR_ROLES, (pair.query, pair.document), strict=True):
                chat.messages.add(role=role, content=content)
            ids = await self._given(pb.Prompt(chat=chat), f"pairs[{i}]")
            found.append(PooledInput(array("I", self._checked(ids, f"pairs[{i}]"))))
        return found

    async def _given(self, prompt: pb.Prompt, field: str) -> Sequence[int]:
        """The ids of a prompt that is no text. Raises InvalidRequestError for an input that is not made of tokens."""
        if prompt.WhichOneof("kind") not in TOKEN_READERS or has_images(prompt.chat):
            raise InvalidRequestError(f"{field} has images or embeddings; send text, tokens or a chat", field=field)
        return await self._prompts.token_ids(prompt, self._model)

    @property
    def _cut(self) -> int | None:
        return self._limit if self._truncates else None

    def _prefix(self, name: str) -> str:
        """The text of a prompt of the model. Raises InvalidRequestError for an unknown name."""
        prompts, default = self._model.text.pooling.prompts, self._model.text.pooling.default_prompt
        if not name:
            return prompts.get(default, "")
        if name not in prompts:
            have = ", ".join(sorted(prompts)) or "none"
            raise InvalidRequestError(
                f"prompt_name is {name[:80]!r}; prompts of model {self._model.name!r}: {have}", field="prompt_name"
            )
        return prompts[name]

    async def _text(self, text: str, field: str) -> Sequence[int]:
        tokenizer: Tokenizer = self._model.require_tokenizer(field)
        ids = await self._prompts.threads.requests.run(len(text), tokenizer.encode_cut, text, self._cut)
        return self._checked(ids, field)

    def _fitting(self, ids: Sequence[int], field: str) -> Sequence[int]:
        """Ids of a client or a chat have no special tokens at their end that must stay."""
        return ids[: self._limit] if self._truncates else self._checked(ids, field)

    def _checked(self, ids: Sequence[int], field: str) -> Sequence[int]:
        if not ids:
            raise InvalidRequestError(f"{field} gives no tokens; send more text", field=field)
        if len(ids) > self._limit:
            raise ContextLengthError(
                f"{field} has {len(ids)} tokens; model {self._model.name!r} takes at most {self._limit}: send less, or "
                "set truncate",
                field=field,
                limit=self._limit,
            )
        return ids
