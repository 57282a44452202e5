"""Pictures made small need Pillow, which the base install does not have."""

from __future__ import annotations

import base64
import io

import numpy as np
from PIL import Image

from p99lab.lab import publish as publishing


def page_with(picture: Image.Image) -> str:
    content = io.BytesIO()
    picture.save(content, format="PNG")
    return f'<p>before</p><img alt="x" src="data:image/png;base64,{base64.b64encode(content.getvalue()).decode()}">'


def embedded(page: str) -> Image.Image:
    return Image.open(io.BytesIO(base64.b64decode(page.partition("base64,")[2].partition('"')[0])))


def noise(width: int, height: int) -> Image.Image:
    return Image.fromarray(np.random.default_rng(0).integers(0, 256, (height, width, 3), dtype=np.uint8))


def test_a_large_picture_is_scaled_and_gets_few_colours() -> None:
    page = page_with(noise(2 * publishing.PICTURE_WIDTH, 300))
    small = publishing.smaller(page)
    assert len(small) < len(page) / 4
    assert small.startswith('<p>before</p><img alt="x" src="data:image/png;base64,')
    assert embedded(small).size == (publishing.PICTURE_WIDTH, 150)
    assert len(embedded(small).convert("RGB").getcolors(1000) or ()) <= publishing.PICTURE_COLOURS


def test_a_picture_that_is_small_already_is_kept() -> None:
    page = page_with(Image.new("RGB", (4, 4), "white"))
    assert len(publishing.smaller(page)) <= len(page)
    assert embedded(publishing.smaller(page)).convert("RGB").getpixel((0, 0)) == (255, 255, 255)


def test_transparency_becomes_white() -> None:
    page = page_with(Image.new("RGBA", (publishing.PICTURE_WIDTH * 2, 2000), (0, 0, 0, 0)))
    assert embedded(publishing.smaller(page)).convert("RGB").getpixel((0, 0)) == (255, 255, 255)


def test_what_is_no_picture_stays_as_it_is() -> None:
    page = '<img src="data:image/png;base64,AAAA"><img src="data:image/png;base64,AAA">'
    assert publishing.smaller(page) == page
