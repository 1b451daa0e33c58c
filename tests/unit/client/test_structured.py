"""`response_model`: schemas of dataclasses and pydantic models, and objects from JSON text."""

import enum
import json
from dataclasses import dataclass, field
from typing import Any, Literal, Optional

import pydantic
import pytest
from quire_client import Client, InvalidRequest, UnexpectedOutput
from quire_client.structured import parse, schema_of
from quire_client.testing import FakeGateway


class Colour(enum.Enum):
    RED = "red"
    BLUE = "blue"


@dataclass
class Address:
    city: str
    floor: int | None = None


@dataclass
class Person:
    name: str
    age: int
    height: float
    is_here: bool
    address: Address
    colour: Colour
    kind: Literal["a", "b"]
    pair: tuple[int, str]
    tags: list[str] = field(default_factory=list)
    scores: dict[str, float] = field(default_factory=dict)
    friends: list["Person"] = field(default_factory=list)
    note: Optional[str] = None  # noqa: UP045
    extra: Any = None


ADA = {
    "name": "Ada", "age": 36, "height": 2, "is_here": True, "address": {"city": "London", "floor": 3}, "colour": "red",
    "kind": "b", "pair": [1, "x"], "tags": ["m"], "scores": {"x": 1.5},
}  # fmt: skip


class Plain(pydantic.BaseModel):
    name: str
    age: int = pydantic.Field(ge=0)


def test_a_dataclass_is_parsed():
    person = parse(json.dumps({**ADA, "friends": [ADA]}), Person)
    assert (person.address, person.colour, person.pair) == (Address("London", 3), Colour.RED, (1, "x"))
    assert isinstance(person.height, float)
    assert person.friends[0].friends == []
    assert (person.note, person.is_here) == (None, True)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"age": "x"}, "age is 'x', not int"),
        ({"age": True}, "age is True, not int"),
        ({"address": {}}, "address has no city"),
        ({"address": {"city": "x", "street": 1}}, "address has unknown fields: street"),
        ({"tags": ["a", 1]}, r"tags\[1\] is 1, not str"),
        ({"colour": "green"}, "colour is 'green'"),
        ({"kind": "c"}, "kind is 'c'"),
        ({"pair": [1]}, "pair is"),
        ({"scores": {"a": "b"}}, "scores.a is 'b'"),
    ],
)
def test_values_of_the_wrong_type_are_named(change, words):
    with pytest.raises(ValueError, match=words):
        parse(json.dumps({**ADA, **change}), Person)


def test_other_models_are_refused():
    @dataclass
    class Odd:
        value: object

    for model in (dict, int, "Person", Odd):
        with pytest.raises(InvalidRequest, match="response_model"):
            schema_of(model)


ANSWERS = {"who?": '{"city": "Paris"}', "plain?": '{"name": "Bo", "age": 3}', "bad?": '{"city": 7}'}


def test_generate_returns_an_object():
    with FakeGateway(ANSWERS) as gateway, Client(gateway.target) as client:
        result = client.chat("who?", response_model=Address)
        assert result.parsed == Address("Paris")
        assert json.loads(gateway.requests[-1].sampling.json_schema) == schema_of(Address)
        assert client.generate("plain?", response_model=Plain).parsed == Plain(name="Bo", age=3)
        assert json.loads(gateway.requests[-1].sampling.json_schema) == Plain.model_json_schema()
        assert client.generate("who?").parsed is None
        with pytest.raises(UnexpectedOutput, match="the output is not a Address: city is 7, not str") as caught:
            client.generate("bad?", response_model=Address)
        assert caught.value.result.text == ANSWERS["bad?"]
        with pytest.raises(UnexpectedOutput, match="ended with length; raise max_tokens"):
            client.generate("plain?", response_model=Plain, max_tokens=5)
