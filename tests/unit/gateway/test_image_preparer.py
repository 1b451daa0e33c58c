"""Images become what the model's image processor makes of them; hostile ones are the caller's error."""

from __future__ import annotations

import io
import os
import signal
from collections.abc import AsyncIterator
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import transformers
from PIL import Image
from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil

from gateway_svc.request.sandbox import image_preparer
from gateway_svc.request.sandbox.image_preparer import ImageLimits, ImagePreparer, PreparedImage, RequestImage
from svc_common.errors import InvalidRequestError, OverloadedError
from tests.unit.gateway.images import IMAGE_INFO, PREPROCESSOR, bomb, encoded, image_model, picture

LIMITS = ImageLimits(max_images=2, max_bytes=200_000, max_pixels=1_000_000)


@pytest.fixture
async def preparer() -> AsyncIterator[ImagePreparer]:
    preparer = ImagePreparer(LIMITS)
    yield preparer
    await preparer.close()


def given(*images: bytes) -> list[RequestImage]:
    return [RequestImage(data, f"media[{i}]") for i, data in enumerate(images)]


def pixel_values(image: PreparedImage) -> Any:
    """The image as the processor returns it."""
    count = image.height * image.width
    patches = np.frombuffer(image.data, np.uint8, count * 108).reshape(count, 3, 1, 36).repeat(2, axis=2)
    levels = np.frombuffer(image.data, "<f4", offset=count * 108).reshape(3, 256)
    return levels[np.arange(3)[:, None, None], patches].reshape(count, -1)


async def test_pixels_equal_those_of_the_image_processor(preparer: ImagePreparer) -> None:
    settings = {name: value for name, value in PREPROCESSOR.items() if not name.endswith(("_type", "_class"))}
    processor = Qwen2VLImageProcessorPil(**settings)
    assert isinstance(processor, transformers.BaseImageProcessor)
    turned = Image.Exif()
    turned[0x0112] = 6  # orientation
    images = [
        encoded(picture(70, 50)),
        encoded(picture(300, 41), "JPEG", quality=80, exif=turned),
        encoded(picture(40, 40, "L"), "PNG"),
        encoded(picture(64, 64, "L").convert("P"), "GIF", save_all=True, append_images=[picture(64, 64, "L", 1)]),
        encoded(picture(12, 7), "PNG"),  # is enlarged
    ]
    model = image_model(PREPROCESSOR)
    for data in images:
        (found,) = await preparer.prepare(given(data), model)
        with Image.open(io.BytesIO(data)) as opened:
            expected = processor(images=[transformers.image_utils.load_image(opened)], return_tensors="np")
        assert [1, found.height, found.width] == expected["image_grid_thw"][0].tolist()
        assert np.array_equal(pixel_values(found), expected["pixel_values"])
        assert found.num_tokens(IMAGE_INFO) == found.height * found.width // 4


async def test_a_transparent_image_is_shown_on_white(preparer: ImagePreparer) -> None:
    """Each kind of transparency gives the pixels of the composed image, whatever colour is hidden."""
    model, size = image_model(PREPROCESSOR), (40, 40)
    mask = Image.new("L", size, 0)
    mask.paste(255, (8, 8, 24, 30))
    black = Image.new("RGBA", size, (0, 0, 0, 0))
    black.paste((0, 0, 0, 255), mask=mask)
    hidden = Image.new("RGBA", size, (200, 30, 40, 0))
    hidden.paste((0, 0, 0, 255), mask=mask)
    palette = Image.eval(mask, lambda value: 1 if value else 0).convert("P")
    palette.putpalette([255, 0, 0, 0, 0, 0])
    grey = Image.eval(mask, lambda value: 0 if value else 77)
    images = [
        encoded(black, "PNG"),
        encoded(hidden, "PNG"),
        encoded(hidden, "WEBP", lossless=True, exact=True),
        encoded(hidden.convert("LA"), "PNG"),
        encoded(palette, "PNG", transparency=0),
        encoded(palette, "GIF", transparency=0),
        encoded(grey, "PNG", transparency=77),
        encoded(Image.merge("RGB", [grey] * 3), "PNG", transparency=(77, 77, 77)),
    ]
    (expected,) = await preparer.prepare(given(encoded(Image.eval(mask, lambda value: 255 - value))), model)
    for data in images:
        (found,) = await preparer.prepare(given(data), model)
        assert found.data == expected.data


async def test_16_bits_of_grey_are_scaled(preparer: ImagePreparer) -> None:
    model = image_model(PREPROCESSOR)
    grey = np.arange(1600, dtype=np.uint16).reshape(40, 40) * 40
    (found,) = await preparer.prepare(given(encoded(Image.fromarray(grey))), model)
    levels = Image.fromarray((grey / 257).round().astype(np.uint8))
    (expected,) = await preparer.prepare(given(encoded(levels)), model)
    assert found.data == expected.data


def many_scans(num_scans: int, form: str = "JPEG", **options: object) -> bytes:
    """A progressive JPEG whose last scan is repeated."""
    data = encoded(picture(64, 64), form, progressive=True, **options)
    end = data.index(b"\xff\xd9")
    last = data.rindex(b"\xff\xda", 0, end)
    return data[:last] + data[last:end] * num_scans + data[end:]


BAD = {
    "no image": (b"GIF, said the file", "media\\[0\\] of 18 bytes is not an image in one of the formats PNG, JPEG"),
    "empty": (b"", "is not an image"),
    "truncated": (encoded(picture(200, 200))[:-400], "is damaged"),
    "truncated jpeg": (encoded(picture(200, 200), "JPEG")[:600], "is damaged"),
    "bomb": (bomb(50_000, 50_000)[:100_000], "has 50000 x 50000 pixels; at most 1000000 are allowed"),
    "other format": (encoded(picture(20, 20), "BMP"), "is not an image in one of the formats"),
    "ratio": (bomb(900_000, 1)[:60], "has 900000 x 1 pixels; one side may be 200 times the other"),
    "scans": (many_scans(5000), r"has 50\d\d scans; at most 64 are allowed"),
    "scans of several images": (
        many_scans(5000, "MPO", save_all=True, append_images=[picture(8, 8)]), r"has 50\d\d scans; at most 64",
    ),
}  # fmt: skip


async def test_what_a_phone_appends_to_a_photo_has_no_scans(preparer: ImagePreparer) -> None:
    photo = encoded(picture(64, 64), "JPEG")
    found = await preparer.prepare(given(photo, photo + b"\xff\xda" * 100), image_model(PREPROCESSOR))
    assert found[0].data == found[1].data


async def test_a_bad_image_is_the_callers_error(preparer: ImagePreparer) -> None:
    for data, words in BAD.values():
        with pytest.raises(InvalidRequestError, match=words) as caught:
            await preparer.prepare(given(data), image_model(PREPROCESSOR))
        assert caught.value.field == "media[0]"
    assert len(preparer.pids) == 1


async def test_models_and_counts_are_checked(preparer: ImagePreparer) -> None:
    good = encoded(picture(20, 20))
    with pytest.raises(InvalidRequestError, match="one of 3 images; at most 2") as caught:
        preparer.check(given(good, good, good), image_model(PREPROCESSOR))
    assert caught.value.field == "media[2]"
    with pytest.raises(InvalidRequestError, match="has 200001 bytes; at most 200000 are allowed"):
        preparer.check(given(bytes(200_001)), image_model(PREPROCESSOR))
    with pytest.raises(InvalidRequestError, match="takes none; use another model"):
        preparer.check(given(good), image_model(PREPROCESSOR, takes_images=False))
    with pytest.raises(InvalidRequestError, match=r"has no preprocessor_config\.json"):
        preparer.check(given(good), image_model())
    with pytest.raises(InvalidRequestError, match="image_processor_type 'CLIPImageProcessor'"):
        await preparer.prepare(given(good), image_model({"image_processor_type": "CLIPImageProcessor"}))
    assert preparer.pids


async def test_a_killed_process_is_replaced(preparer: ImagePreparer) -> None:
    model, good = image_model(PREPROCESSOR), given(encoded(picture(20, 20)))
    await preparer.prepare(good, model)
    os.kill(preparer.pids[0], signal.SIGKILL)
    (found,) = await preparer.prepare(good, model)
    assert found.height


async def test_limits_on_time(preparer: ImagePreparer, monkeypatch: pytest.MonkeyPatch) -> None:
    model, large = image_model(PREPROCESSOR), given(encoded(picture(990, 990), "JPEG", quality=30))
    await preparer.prepare(large, model)
    monkeypatch.setattr(image_preparer, "JOB", replace(image_preparer.JOB, cpu_s=0.001))
    with pytest.raises(InvalidRequestError, match="CPU time"):
        await preparer.prepare(large, model)
    monkeypatch.setattr(image_preparer, "JOB", replace(image_preparer.JOB, timeout_s=0.0))
    with pytest.raises(OverloadedError, match="a process did not prepare images within 0 s"):
        await preparer.prepare(large, model)
