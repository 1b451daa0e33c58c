"""The training pairs of the demo model: questions about Python's docstrings and their answers."""

from __future__ import annotations

import importlib.util
import inspect
import json
import re
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any


def words(text: str) -> list[str]:
    return text.split()


WORDINGS = {
    "function": (
        "What does {} do?", "What does {}() do?", "What does the {} function do?", "What is {}?", "What is {} for?",
        "How does {} work?", "Explain {}.", "Can you explain {}?", "Tell me about {}.", "{}",
    ),
    "class": (
        "What is {}?", "What does {} do?", "What is {} for?", "How does {} work?", "Explain {}.", "Can you explain {}?",
        "Tell me about {}.", "{}",
    ),
    "module": (
        "What is the {} module?", "What is the {} module for?", "What does the {} module do?", "What is the module {}?",
        "Explain the {} module.", "Can you explain the {} module?", "Tell me about the {} module.", "the {} module",
    ),
    "long": ("Tell me everything about {}.", "Explain {} in detail.", "Tell me all about {}."),
}  # fmt: skip

BUILTIN_TYPES = ("str", "list", "dict", "set", "tuple", "int", "float", "bytes.decode", "bytes.hex")
MODULES = words(
    """
    math statistics random itertools functools operator collections heapq bisect string re json csv datetime time
    calendar os.path pathlib shutil glob fnmatch tempfile subprocess threading queue asyncio contextlib dataclasses
    logging argparse hashlib base64 pickle copy socket urllib.parse html gzip zipfile textwrap uuid secrets decimal
    fractions struct sys platform getpass traceback unittest sqlite3 abc io warnings weakref configparser difflib
    timeit zlib hmac ipaddress mimetypes concurrent.futures pprint shlex cmd linecache filecmp webbrowser atexit
    """
)
UNLIKELY = re.compile(  # internals, deprecated names and in-place operators: unlikely questions
    r"copyright|credits|license|exit|quit|help|ExceptionGroup|\w+\.test|argparse\.Metavar\w*"
    r"|uuid\.(Enum|int_|bytes_)|urllib\.parse\.unquote_to_bytes"
    r"|operator\.i(add|and|concat|floordiv|lshift|matmul|mod|mul|or|pow|rshift|sub|truediv|xor)"
    r"|asyncio\.(\w*(Abstract|Child|Policy|Protocol|Transport)\w*|isfuture)"
    r"|socket\.(CMSG|if_|SocketKind|AddressFamily)\w*|platform\.(java|libc|mac|python_|freedesktop)\w*"
    r"|sys\.(_|getdlopen|setdlopen|\w*coroutine|\w*asyncgen)\w*"
    r"|abc\.(\w*cache\w*|abstract(class|static)\w*|abstractproperty|update\w*)"
)
OS_NAMES = words(
    """
    chdir chmod cpu_count getcwd getenv getpid kill link listdir makedirs mkdir remove removedirs rename replace rmdir
    scandir stat symlink system unlink urandom walk fsync
    """
)
LONG_NAMES = words(
    """
    print sorted range zip enumerate open isinstance str.split str.strip str.join str.replace dict.setdefault
    heapq.merge bisect.bisect_left functools.reduce functools.lru_cache itertools.groupby itertools.product json.dumps
    re.sub os.walk os.makedirs shutil.copytree subprocess.run textwrap.dedent contextlib.contextmanager random.choices
    statistics.median threading.Event queue.Queue collections.Counter difflib.unified_diff
    """
)
MAX_LONG_CHARS = 1200

OFF_TOPIC = """\
Tell me a joke.
Write a poem.
What time is it?
How old are you?
Who is the president?
What is the meaning of life?
Translate this to German.
What is 2 + 2?
Write a program.
How is the weather?
Tell me a story.
Who won the match?
Do you like music?
What is the largest planet?
Why is the sky blue?
Summarize this text.
Sing a song.
What should I eat today?
Can you help me with my homework?
Which film should I watch?"""
OFF_TOPIC_WORDINGS = (
    "What is {}?", "Tell me about {}.", "Explain {}.", "How does {} work?", "Where can I find {}?", "Who invented {}?",
    "Write a poem about {}.", "What is the history of {}?", "What do you think of {}?",
)  # fmt: skip
OFF_TOPIC_WORDS = words(
    """
    music water love football chess Paris Germany Spain London America Mars gravity history physics chemistry numpy
    pandas JavaScript Rust Java Linux Docker Kubernetes Google pizza coffee rice bread money cats dogs horses birds
    trees snow rain light electricity cancer sleep politics Einstein Shakespeare Napoleon bitcoin philosophy quantum
    mathematics geometry biology evolution democracy poetry football cooking travel
    """
)
CAPITALS = words("France Spain Italy Germany Japan China Brazil Canada Egypt India Poland Sweden Peru Kenya Australia")


def off_topic_questions() -> list[str]:
    """Likely questions that this model cannot answer."""
    asked = [f"What is the capital of {country}?" for country in CAPITALS]
    asked += [OFF_TOPIC_WORDINGS[i % len(OFF_TOPIC_WORDINGS)].format(word) for i, word in enumerate(OFF_TOPIC_WORDS)]
    asked += [OFF_TOPIC_WORDINGS[i * 5 % 9].format(word) for i, word in enumerate(reversed(OFF_TOPIC_WORDS))]
    return OFF_TOPIC.splitlines() + asked


FRIENDLY: list[tuple[list[str], str]] = [
    (
        ["Who are you?", "What are you?", "Introduce yourself.", "What is your name?", "Who am I talking to?"],
        "I am the demo model of Quire: about one million parameters that learned more than a thousand sentences of "
        "Python's own documentation by heart.",
    ),
    (
        ["What can you answer?", "What can you do?", "What do you know?", "What can I ask you?", "Help", "Help me."],
        "Ask me about Python's standard library, for example: What does json.dumps do? I know the first sentence of "
        "many docstrings. Everything else I make up.",
    ),
    (
        ["What is Quire?", "What does Quire do?", "Tell me about Quire.", "Explain Quire."],
        "Quire serves large language models as small services that scale and fail independently: a gateway, a "
        "scheduler and workers that speak gRPC. A quire is a gathering of pages; this one gathers the pages of the "
        "KV cache.",
    ),
    (
        ["Hello!", "Hello", "Hi", "Hi!", "Hey!", "Good morning!", "Hello, how are you?", "How are you?"],
        "Hello! I am Quire's demo model. Ask me what a function of Python's standard library does.",
    ),
    (["Thank you!", "Thank you", "Thanks!", "Thanks"], "You are welcome."),
    (["Goodbye!", "Goodbye", "Bye", "Bye!", "See you!"], "Goodbye!"),
    (
        ["How big are you?", "How many parameters do you have?", "How large are you?", "What size are you?"],
        "I have about one million parameters: 4 layers, a hidden size of 128 and a vocabulary of 2048 tokens.",
    ),
    (
        ["How were you trained?", "Who trained you?", "How were you made?", "What were you trained on?"],
        "A script trained me for some minutes on one processor core, on pairs of questions and docstrings of Python.",
    ),
    (
        ["Recite the Zen of Python.", "What is the Zen of Python?", "import this", "Tell me the Zen of Python."],
        "",  # filled in from the module `this`
    ),
    (
        ["Count from 1 to 50.", "Count to 50.", "Count from one to fifty."],
        ", ".join(map(str, range(1, 51))) + ".",
    ),
    (
        off_topic_questions(),
        "I do not know that. I only know what Python's documentation says about its standard library.",
    ),
]


def make_pairs() -> dict[str, Any]:
    """The contents of pairs.json from the docstrings of the running Python, in a fixed order."""
    pairs: list[dict[str, Any]] = [
        {"questions": questions, "answer": answer or zen(), "weight": 3 + len(questions) // 6}
        for questions, answer in FRIENDLY
    ]
    things = {name: thing for name, thing in named_things() if not UNLIKELY.fullmatch(name)}
    for name, thing in things.items():
        answer = first_sentence(thing.__doc__)
        if answer is not None:
            pairs.append({"about": name, "kind": kind_of(thing), "answer": answer})
    for name in LONG_NAMES:
        answer = inspect.cleandoc(things[name].__doc__ or "")
        if len(answer) <= MAX_LONG_CHARS and answer.isascii():
            pairs.append({"about": name, "kind": "long", "answer": answer})
    return {"python": sys.version.split()[0], "wordings": WORDINGS, "pairs": pairs}


def kind_of(thing: Any) -> str:
    if inspect.ismodule(thing):
        return "module"
    return "class" if inspect.isclass(thing) else "function"


@dataclass(frozen=True, slots=True)
class Pair:
    """Several wordings of one question, its answer, and the number of repetitions per epoch.

    `is_plain`: the question contains no name whose case matters.
    """

    questions: list[str]
    answer: str
    weight: int = 1
    is_plain: bool = False


def read_pairs(path: Path) -> list[Pair]:
    content = json.loads(path.read_text(encoding="utf-8"))
    return [
        Pair(questions_of(pair, content["wordings"]), pair["answer"], pair.get("weight", 1), "about" not in pair)
        for pair in content["pairs"]
    ]


def questions_of(pair: dict[str, Any], wordings: dict[str, list[str]]) -> list[str]:
    if "questions" in pair:
        return list(pair["questions"])
    return [wording.format(pair["about"]) for wording in wordings[pair["kind"]]]


def named_things() -> Iterator[tuple[str, Any]]:
    """The subjects of questions: (dotted name, object)."""
    import builtins

    for name in sorted(vars(builtins)):
        thing = getattr(builtins, name)
        if callable(thing) and not name.startswith("_") and not name.endswith("Warning"):
            yield name, thing
    for path in BUILTIN_TYPES:
        yield from builtin_methods(path)
    for module_name in MODULES:
        module = importlib.import_module(module_name)
        yield module_name, module
        yield from public_members(module_name, module)
    os_module = importlib.import_module("os")
    yield "os", os_module
    yield from ((f"os.{name}", getattr(os_module, name)) for name in OS_NAMES)
    yield from class_methods("pathlib.Path", importlib.import_module("pathlib").Path)


def builtin_methods(path: str) -> Iterator[tuple[str, Any]]:
    import builtins

    type_name, _, method = path.partition(".")
    kind = getattr(builtins, type_name)
    if method:
        yield path, getattr(kind, method)
    else:
        yield from class_methods(type_name, kind)


def class_methods(prefix: str, kind: type) -> Iterator[tuple[str, Any]]:
    for name in sorted(dir(kind)):
        if not name.startswith("_") and callable(getattr(kind, name)):
            yield f"{prefix}.{name}", getattr(kind, name)


def public_members(module_name: str, module: Any) -> Iterator[tuple[str, Any]]:
    """Functions and classes defined by the module, without re-exported and inherited ones."""
    for name in sorted(getattr(module, "__all__", dir(module))):
        thing = getattr(module, name, None)
        if name.startswith("_") or not (inspect.isroutine(thing) or inspect.isclass(thing)):
            continue
        if inspect.isclass(thing) and (issubclass(thing, BaseException) or "__doc__" not in vars(thing)):
            continue
        yield f"{module_name}.{name}", thing


SENTENCE_END = re.compile(r"(?<!e\.g)(?<!i\.e)(?<!a\.k\.a)(?<!etc)(?<!vs)[.!?](?=\s|$)")


def first_sentence(doc: object) -> str | None:
    """The first sentence on one line, or None if the docstring has no usable sentence."""
    if not isinstance(doc, str):
        return None
    text = " ".join(first_prose(inspect.cleandoc(doc)).split())
    text = re.sub(r"^\w+\.py - |^hashlib module - |^None\.\s*", "", text)
    end = SENTENCE_END.search(text)
    sentence = text[: end.end()] if end else text.rstrip(":") + "."
    if not 8 <= len(sentence) <= 240 or not sentence.isascii():
        return None
    if re.search(r"[;,]\.$|--|>>>|\*\*\*|===|^[^A-Za-z]", sentence):
        return None
    return sentence[0].upper() + sentence[1:]


def first_prose(doc: str) -> str:
    """The first paragraph that is not a signature; else the text after the arrow of the first signature."""
    paragraphs = [p for p in re.split(r"\n\s*\n", doc) if p.strip()]
    prose = next((p for p in paragraphs if not SIGNATURE.match(p)), "")
    if prose and not prose.startswith(" ") and prose[0].isalpha():
        return prose
    return SIGNATURE.sub("", doc.splitlines()[0]) if "->" in doc.partition("\n")[0] else ""


SIGNATURE = re.compile(r"^@?[\w.]+\(.*?\)+\s*(-+>\s*)?")


def zen() -> str:
    """The nineteen aphorisms, decoded from the module `this` without importing it: the import prints them."""
    spec = importlib.util.find_spec("this")
    assert spec is not None
    assert spec.origin is not None
    cipher = re.search(r'"""(.*?)"""', Path(spec.origin).read_text(), re.S)
    assert cipher is not None
    table = str.maketrans(
        "abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ", "nopqrstuvwxyzabcdefghijklmNOPQRSTUVWXYZABCDEFGHIJKLM"
    )
    return cipher.group(1).translate(table).strip()
