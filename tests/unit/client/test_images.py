"""Images of the SDK: every form becomes the same bytes, and a wrong one is refused before the call."""

from __future__ import annotations

import base64
from pathlib import Path

import pytest
from quire.v1 import inference_pb2 as pb
from quire_client import Image, InvalidRequest, Message
from quire_client.requests.generate import generate_request

DATA = b"\x89PNG data"
URL = "data:image/png;base64," + base64.b64encode(DATA).decode()


def parts_of(message: object) -> list[pb.ContentPart]:
    request = generate_request(None, None, [message], {})  # type: ignore[list-item]
    return list(request.prompt.chat.messages[0].parts)


def test_all_forms_of_an_image_are_equal(tmp_path: Path) -> None:
    path = tmp_path / "cat.png"
    path.write_bytes(DATA)
    assert {Image.of(form).data for form in (DATA, path, str(path), URL, Image(DATA))} == {DATA}
    expected = [pb.ContentPart(text="look"), pb.ContentPart(image=DATA)]
    text = {"type": "text", "text": "look"}
    for image in ({"type": "image", "image": path}, {"type": "image_url", "image_url": {"url": URL}}, Image(DATA)):
        assert parts_of({"role": "user", "content": [text, image]}) == expected
    assert parts_of(Message("user", parts=("look", Image(DATA)))) == expected
    assert parts_of({"role": "user", "content": [text, text]}) == []


def test_images_of_a_prompt_are_sent_in_order(tmp_path: Path) -> None:
    request = generate_request("<|image_pad|><|image_pad|>", None, None, {"images": [DATA, URL]})
    assert list(request.media) == [DATA, DATA]


@pytest.mark.parametrize("image", ["/no/such/file.png", "https://example.com/cat.png", "data:image/png;base64,?"])
def test_an_image_that_cannot_be_read_is_refused(image: str) -> None:
    with pytest.raises(InvalidRequest, match="images: the image cannot be read"):
        generate_request("x", None, None, {"images": [image]})
    with pytest.raises(InvalidRequest, match="messages: the image cannot be read"):
        parts_of({"role": "user", "content": [{"type": "image_url", "image_url": image}]})
