"""An answer as a dataclass: the output is constrained to the JSON Schema of the class."""

from dataclasses import dataclass
from typing import Literal

from quire_client import Client


@dataclass
class Review:
    sentiment: Literal["positive", "neutral", "negative"]
    stars: Literal[1, 2, 3, 4, 5]
    is_spam: bool


with Client() as client:
    result = client.chat("Rate this review: 'Works, but arrived late.'", response_model=Review, max_tokens=256)
    review: Review = result.parsed
    print(review)
    print(f"{review.stars} stars, {review.sentiment}, spam: {review.is_spam}")
