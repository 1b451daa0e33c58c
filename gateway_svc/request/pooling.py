"""Reads and plans Embed and Score: what is computed of which token ids, as sentence-transformers makes them."""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from dataclasses import dataclass

from quire.internal.v1 import pooling_pb2
from quire.v1 import inference_pb2 as pb
from quire.v1 import types_pb2 as types

from gateway_svc.request.field_errors import FieldErrors, check_pooled_cost, check_token_ids, invalid
from gateway_svc.request.models import ServedModel
from gateway_svc.request.plan import check_determinism
from gateway_svc.request.prompts.reader import has_images
from gateway_svc.request.prompts.readers import TOKEN_READERS, PromptReaders, check_prompt
from gateway_svc.request.validation import RequestLimits, check_priority, check_request_id
from gateway_svc.text.bundle import Tokenizer
from request_fields import checks
from svc_common.errors import ContextLengthError, InvalidRequestError, NotConfiguredError

MAX_INPUTS = 2048
MAX_PAIRS = 1024
PAIR_ROLES = ("query", "document")
COSINE = pb.EmbedRequest(normalize=True)


@dataclass(frozen=True, slots=True)
class PooledInput:
    """One text, or a pair of texts, as token ids."""

    ids: array[int]
    second_text: int = 0  # position of the first token of the second text; 0: there is one text


@dataclass(frozen=True, slots=True)
class PoolingPlan:
    """What is computed for an Embed or Score. `pairs`: positions of the two texts of each pair, if their embeddings are
    compared; else each pair is one input.
    """

    inputs: Sequence[PooledInput]
    pooling: pooling_pb2.Pooling
    pairs: Sequence[tuple[int, int]] = ()
    activation: str = ""  # activation of the outputs of a classification head; "": none

    @property
    def num_tokens(self) -> int:
        return sum(len(item.ids) for item in self.inputs)


def check_embed(request: pb.EmbedRequest, limits: RequestLimits) -> None:
    """All checks that do not depend on the model. Raises InvalidRequestError."""
    _check_count("inputs", request.inputs, MAX_INPUTS)
    for i, prompt in enumerate(request.inputs):
        check_prompt(prompt, f"inputs[{i}]")
    _check_fields(request, limits)


def check_score(request: pb.ScoreRequest, limits: RequestLimits) -> None:
    """All checks that do not depend on the model. Raises InvalidRequestError."""
    _check_count("pairs", request.pairs, MAX_PAIRS)
    for i, pair in enumerate(request.pairs):
        for name in PAIR_ROLES:
            if not getattr(pair, name):
                raise invalid(f"pairs[{i}].{name}", "is empty; send at least one character")
    _check_fields(request, limits)


def check_model(request: pb.EmbedRequest | pb.ScoreRequest, model: ServedModel) -> None:
    """Check that the model computes embeddings or scores. Raises NotConfiguredError or InvalidRequestError."""
    if model.info.HasField("encoder"):
        raise NotConfiguredError(
            f"model {model.name!r} has an encoder and a decoder: it generates text, no embeddings or scores",
            field="model",
        )
    if not model.info.HasField("pooling"):
        raise NotConfiguredError(
            f"model {model.name!r}: its workers compute no embeddings and no scores; start them with --backend cpu",
            field="model",
        )
    check_determinism(request.scheduling.determinism, model)
    if isinstance(request, pb.EmbedRequest):
        _embed_pooling(request, model.info)
        return
    facts = model.info.pooling
    if request.instruction and not facts.answer_token_ids:
        raise invalid("instruction", f"is set, but model {model.name!r} takes no instruction; remove it")
    if not (facts.num_classes or facts.answer_token_ids or facts.embeds):
        raise NotConfiguredError(
            f"model {model.name!r} has no classification head, no LogitScore module and no embedding configuration "
            "(modules.json), so it cannot score; serve a reranker or an embedding model",
            field="model",
        )


async def plan_embed(request: pb.EmbedRequest, model: ServedModel, prompts: PromptReaders) -> PoolingPlan:
    """One vector per input. The model is checked. Raises InvalidRequestError."""
    reader = PooledInputReader(prompts, model, truncates=request.truncate)
    return PoolingPlan(await reader.inputs(request.inputs, request.prompt_name), _embed_pooling(request, model.info))


async def plan_classes(
    request: pb.EmbedRequest, model: ServedModel, prompts: PromptReaders, *, is_raw: bool = False
) -> PoolingPlan:
    """One number per class and input: a probability, or with `is_raw` the output of the head. The model is checked.

    Raises InvalidRequestError or NotConfiguredError.
    """
    facts = model.info.pooling
    if not facts.num_classes:
        raise NotConfiguredError(
            f"model {model.name!r} has no classification head, so it cannot classify; serve a model whose architecture "
            "ends with ForSequenceClassification",
            field="model",
        )
    reader = PooledInputReader(prompts, model, truncates=request.truncate)
    inputs = await reader.inputs(request.inputs, request.prompt_name)
    pooling = pooling_pb2.Pooling(task=pooling_pb2.POOLING_TASK_CLASSES)
    return PoolingPlan(inputs, pooling, activation="" if is_raw else _activation(model))


def _activation(model: ServedModel) -> str:
    facts = model.info.pooling
    if facts.num_classes == 1:
        return "sigmoid" if facts.has_sigmoid else ""
    return "sigmoid" if model.text.pooling.has_many_labels else "softmax"


async def plan_score(request: pb.ScoreRequest, model: ServedModel, prompts: PromptReaders) -> PoolingPlan:
    """One score per pair: of the classification head, of the answer yes, or the cosine of both embeddings. The model is
    checked. Raises InvalidRequestError or NotConfiguredError.
    """
    facts, reader = model.info.pooling, PooledInputReader(prompts, model, truncates=request.truncate)
    if facts.num_classes:
        pooling = _classes(model)
        return PoolingPlan(await reader.pairs(request.pairs), pooling)
    if facts.answer_token_ids:
        pooling = pooling_pb2.Pooling(task=pooling_pb2.POOLING_TASK_LOGITS, token_ids=facts.answer_token_ids)
        return PoolingPlan(await reader.rendered_pairs(request.pairs, request.instruction), pooling)
    texts = {text: None for pair in request.pairs for text in (pair.query, pair.document)}  # each is computed once
    position = {text: i for i, text in enumerate(texts)}
    inputs = await reader.inputs([pb.Prompt(text=text) for text in texts], "")
    pairs = [(position[pair.query], position[pair.document]) for pair in request.pairs]
    return PoolingPlan(inputs, _embed_pooling(COSINE, model.info), pairs)


class PooledInputReader:
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


def _check_fields(request: pb.EmbedRequest | pb.ScoreRequest, limits: RequestLimits) -> None:
    check_request_id(request.request_id)
    with FieldErrors():
        checks.check_fields(request)
    check_priority(request.scheduling.priority, limits)


def _check_count(field: str, inputs: Sequence[pb.Prompt] | Sequence[pb.TextPair], limit: int) -> None:
    if not 1 <= len(inputs) <= limit:
        raise invalid(field, f"has {len(inputs)} items; must have 1 to {limit}")
    with FieldErrors():
        check_pooled_cost(field, len(inputs), sum(one.ByteSize() for one in inputs))


def _embed_pooling(request: pb.EmbedRequest, info: types.ModelInfo) -> pooling_pb2.Pooling:
    """The form of an embedding: the request's settings, else those of the model. Raises InvalidRequestError."""
    facts = info.pooling
    if request.pooling not in types.PoolingKind.values():
        raise invalid("pooling", f"is {request.pooling}; must be a PoolingKind")
    if request.HasField("dimensions") and not 1 <= request.dimensions <= facts.dimensions:
        raise invalid("dimensions", f"is {request.dimensions}; must be from 1 to {facts.dimensions}")
    return pooling_pb2.Pooling(
        task=pooling_pb2.POOLING_TASK_VECTOR,
        kind=request.pooling or facts.kind,
        normalize=request.normalize if request.HasField("normalize") else facts.normalize,
        dimensions=request.dimensions,
    )


def _classes(model: ServedModel) -> pooling_pb2.Pooling:
    """The output of the classification head. Raises NotConfiguredError if that is not one number."""
    if (num_classes := model.info.pooling.num_classes) > 1:
        raise NotConfiguredError(
            f"model {model.name!r} has {num_classes} classes; Score needs a model with 1 (num_labels)", field="model"
        )
    return pooling_pb2.Pooling(task=pooling_pb2.POOLING_TASK_CLASSES)
