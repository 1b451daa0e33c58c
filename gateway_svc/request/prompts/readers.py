"""Reads the prompts of all kinds. The kind chooses the reader, once."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from quire.v1 import inference_pb2 as pb

from gateway_svc.request.field_errors import check_token_ids, invalid
from gateway_svc.request.models import ServedModel
from gateway_svc.request.prompts.audio import AudioPart, AudioReader, audio_parts
from gateway_svc.request.prompts.embeddings import EmbeddingsReader
from gateway_svc.request.prompts.reader import PromptInput, PromptReader, ReadContext, has_images
from gateway_svc.request.prompts.text import (
    MAX_TOKENIZE_BYTES,
    ChatReader,
    Encoding,
    TextReader,
    TokenPromptReader,
    TokensReader,
)
from gateway_svc.request.sandbox.audio_decoder import AudioDecoder
from gateway_svc.request.sandbox.image_preparer import ImageLimits, ImagePreparer
from gateway_svc.request.sandbox.template_renderer import TemplateRenderer
from gateway_svc.request.threads import Threads

TOKEN_READERS: Mapping[str, TokenPromptReader] = {"text": TextReader(), "tokens": TokensReader(), "chat": ChatReader()}
READERS: Mapping[str, PromptReader] = {**TOKEN_READERS, "embeddings": EmbeddingsReader(), "audio": AudioReader()}
MAX_DETOKENIZE_IDS = 1 << 20
MAX_STRINGS_BYTES = 1 << 20  # limit for a Tokenize that returns strings, which take up to 150 bytes each
PART_IDS = 1 << 14


def check_prompt(prompt: pb.Prompt, field: str = "prompt") -> None:
    """Check the form of a prompt: one kind, not empty, known roles. Raises InvalidRequestError."""
    kind = prompt.WhichOneof("kind")
    if kind is None:
        raise invalid(field, "is not set; send prompt.text, tokens, chat, embeddings or audio")
    READERS[kind].check(prompt, field)


def check_prompt_size(request: pb.GenerateRequest, model: ServedModel) -> PromptReader:
    """Refuse a prompt that is certainly too long, before it is read. Returns its reader."""
    kind = request.prompt.WhichOneof("kind") or ""
    if kind != "audio" and model.info.encoder.HasField("audio"):
        raise invalid("prompt", f"has no audio, but model {model.name!r} turns speech into text; send prompt.audio")
    reader = READERS[kind]
    reader.check_size(request, model)
    return reader


class PromptReaders:
    """Reads prompts for generations, for Embed and Score, and for calls that only tokenize."""

    def __init__(
        self,
        threads: Threads,
        templates: TemplateRenderer,
        images: ImagePreparer | None = None,
        audio: AudioDecoder | None = None,
    ) -> None:
        decoders = images or ImagePreparer(ImageLimits()), audio or AudioDecoder()
        self.threads = threads
        self._requests = ReadContext(threads.requests, templates, *decoders)
        self._calls = ReadContext(threads.calls, templates, *decoders)

    async def read(
        self, request: pb.GenerateRequest, model: ServedModel, known_ids: Sequence[int] | None = None
    ) -> PromptInput:
        """The prompt of a generation, whose form is checked. `known_ids`: its ids, if a record has them.

        Raises InvalidRequestError, ContextLengthError, UnimplementedError or OverloadedError.
        """
        reader = check_prompt_size(request, model)
        return await reader.read(request, model, known_ids, self._requests)

    async def audio_parts(self, audio: pb.Audio, model: ServedModel, max_s: float) -> list[AudioPart]:
        """Speech of any length in parts that the model takes, of at most `max_s`, which end at pauses."""
        return await audio_parts(audio, model, max_s, self._requests)

    async def count(self, request: pb.GenerateRequest, model: ServedModel) -> int:
        """The number of tokens of a prompt. Raises like `read`, and like `tokenize` if there are too many calls."""
        reader = check_prompt_size(request, model)
        with self.threads.counted_call(request.ByteSize()):
            prompt = await reader.read(request, model, None, self._calls)
        return len(prompt.ids[-request.truncate_prompt_tokens :])

    async def token_ids(self, prompt: pb.Prompt, model: ServedModel) -> Sequence[int]:
        """The ids of a text, tokens or a chat without images. Raises like `read`."""
        kind = prompt.WhichOneof("kind") or ""
        return (await TOKEN_READERS[kind].token_ids(prompt, model, self._requests, Encoding())).ids

    async def tokenize(self, request: pb.TokenizeRequest, model: ServedModel) -> pb.TokenizeResponse:
        """Token ids of a prompt. Raises InvalidRequestError, or OverloadedError if there are too many calls."""
        size = request.ByteSize()
        how = Encoding(not request.HasField("add_special_tokens") or request.add_special_tokens)
        reader = TOKEN_READERS[request.prompt.WhichOneof("kind") or ""]
        with self.threads.counted_call(size) as lane:
            prompt = await reader.token_ids(request.prompt, model, self._calls, how)
            return await lane.run(size, _tokenize_response, request, model, prompt.ids)

    async def detokenize(self, request: pb.DetokenizeRequest, model: ServedModel) -> pb.DetokenizeResponse:
        """Text of token ids. Raises like `tokenize`."""
        return await self.threads.run_call(request.ByteSize(), _detokenize_response, request, model)


def check_tokenize(request: pb.TokenizeRequest) -> None:
    """Check the size and the form of a Tokenize prompt."""
    prompt, size = request.prompt, request.prompt.ByteSize()
    limit = MAX_STRINGS_BYTES if request.token_strings else MAX_TOKENIZE_BYTES
    if size > limit:
        words = "with token_strings " if request.token_strings else ""
        raise invalid("prompt", f"has {size} bytes; Tokenize accepts {words}at most {limit}: send it in parts")
    check_prompt(prompt)
    if (kind := prompt.WhichOneof("kind")) not in TOKEN_READERS:
        raise invalid(f"prompt.{kind}", f"is set, but {kind} has no tokens; send text or a chat")
    if has_images(prompt.chat):
        raise invalid("prompt.chat", "has images, which have no tokens; send the chat without them")


def check_detokenize(ids: Sequence[int]) -> None:
    """Check the number of ids of a Detokenize."""
    if len(ids) > MAX_DETOKENIZE_IDS:
        raise invalid("ids", f"has {len(ids)} ids; Detokenize accepts at most {MAX_DETOKENIZE_IDS}: send them in parts")


def _tokenize_response(request: pb.TokenizeRequest, model: ServedModel, ids: Sequence[int]) -> pb.TokenizeResponse:
    """Built in parts: other threads run in between."""
    check_token_ids("prompt", ids, model)
    tokenizer = model.require_tokenizer("token_strings") if request.token_strings else None
    response = pb.TokenizeResponse(max_model_len=model.info.max_model_len)
    for start in range(0, len(ids), PART_IDS):
        part = ids[start : start + PART_IDS]
        response.ids.extend(part)
        if tokenizer is not None:
            response.token_strings.extend(tokenizer.token_strings(part))
    return response


def _detokenize_response(request: pb.DetokenizeRequest, model: ServedModel) -> pb.DetokenizeResponse:
    tokenizer = model.require_tokenizer("ids")
    check_token_ids("ids", request.ids, model)
    return pb.DetokenizeResponse(text=tokenizer.decode(request.ids, skip_special_tokens=request.skip_special_tokens))
