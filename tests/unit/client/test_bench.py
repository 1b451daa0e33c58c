"""The modules of `quire bench` without I/O: datasets, arrival times, figures and reports."""

import itertools
import json
import math
import random
from dataclasses import replace

import pytest
from quire_bench import datasets
from quire_bench.backend import arrival_times
from quire_bench.datasets import DatasetConversation, DatasetError, Lengths, Turn
from quire_bench.figures import Record, parse_slo, report_text, summarize, summary_fields
from quire_client.demo import demo_model_dir

TRACE_LINE = {"timestamp": 1000, "input_length": 700, "output_length": 5, "hash_ids": [7, 8]}

# Sent at 0.5; receives one token at 1.0, four tokens at 1.2 and one token at 1.3.
COALESCED = Record(
    sent_s=0.5, end_s=1.4, num_input=10, num_output=6, num_cached=4, chunk_times=(1.0, 1.2, 1.3), chunk_tokens=(1, 4, 1)
)


def test_poisson_arrivals_have_the_rate_and_the_seed():
    times = arrival_times(20_000, 5.0, 1.0, random.Random(1))
    gaps = [after - before for before, after in itertools.pairwise(times)]
    mean = sum(gaps) / len(gaps)
    deviation = math.sqrt(sum((gap - mean) ** 2 for gap in gaps) / len(gaps))
    assert (mean, deviation) == (
        pytest.approx(0.2, rel=0.03),
        pytest.approx(0.2, rel=0.03),
    )  # equal in an exponential distribution
    assert times == arrival_times(20_000, 5.0, 1.0, random.Random(1))
    assert times[0] == 0


@pytest.mark.parametrize(
    ("make", "num_requests"),
    [
        (lambda rng: datasets.random_prompts(9, Lengths(50, 0.5), Lengths(8), vocab_size=100, rng=rng), 9),
        (
            lambda rng: datasets.shared_prefixes(
                9, Lengths(5), Lengths(8), num_groups=2, prefix_len=40, vocab_size=100, rng=rng
            ),
            9,
        ),
        (
            lambda rng: datasets.multi_turn(
                9,
                Lengths(5),
                Lengths(8, 1.0),
                num_turns=4,
                think_s=1,
                num_groups=2,
                prefix_len=4,
                vocab_size=100,
                rng=rng,
            ),
            9,
        ),
        (lambda rng: datasets.demo_questions(demo_model_dir() / "pairs.json", count=9, output_len=None, rng=rng), 9),
    ],
)
def test_a_dataset_is_a_function_of_its_seed(make, num_requests):
    first = make(random.Random(3))
    assert first == make(random.Random(3))
    assert first != make(random.Random(4))
    assert sum(len(conversation.turns) for conversation in first) == num_requests


def test_conversations_have_turns_and_pauses():
    found = datasets.multi_turn(
        10,
        Lengths(6),
        Lengths(8),
        num_turns=4,
        think_s=2.0,
        num_groups=1,
        prefix_len=5,
        vocab_size=1000,
        rng=random.Random(0),
    )
    assert [len(conversation.turns) for conversation in found] == [4, 4, 2]
    first = found[0].turns
    assert [len(turn.prompt) for turn in first] == [11, 6, 6, 6]
    assert first[0].think_s == 0
    assert all(turn.think_s > 0 for turn in first[1:])
    assert found[0].num_tokens == 29 + 4 * 8


def test_trace_blocks_and_times(tmp_path):
    path = tmp_path / "trace.jsonl"
    lines = [
        {"timestamp": 3000, "input_length": 600, "output_length": 9, "hash_ids": [7, 9]},
        TRACE_LINE,
        {"timestamp": 2000, "input_length": 30, "output_length": 2, "hash_ids": []},
    ]
    path.write_text("\n".join(map(json.dumps, lines)))
    found = datasets.trace(path, speed=2.0, length_scale=1.0, limit=None, vocab_size=1000, seed=0)
    assert [conversation.start_s for conversation in found] == [0, 0.5, 1.0]
    first, second, third = (conversation.turns[0] for conversation in found)
    assert [len(turn.prompt) for turn in (first, second, third)] == [700, 30, 600]
    assert [turn.max_tokens for turn in (first, second, third)] == [5, 2, 9]
    assert first.prompt[:512] == third.prompt[:512]
    assert first.prompt[512:600] != third.prompt[512:600]
    small = datasets.trace(path, speed=1.0, length_scale=0.1, limit=2, vocab_size=1000, seed=0)
    assert [len(conversation.turns[0].prompt) for conversation in small] == [70, 60]


@pytest.mark.parametrize(
    ("content", "complaint"),
    [
        ("", "contains no request"),
        ("{", "line 1 is not valid JSON"),
        ("3", "line 1: 3 is not a JSON object"),
        (json.dumps(TRACE_LINE | {"timestamp": "now"}), "line 1: timestamp is 'now'; it must be a number"),
        (json.dumps(TRACE_LINE) + '\n{"timestamp": 3}', "line 2: input_length is None"),
        (json.dumps(TRACE_LINE | {"output_length": -1}), "line 1: output_length is -1"),
        (json.dumps(TRACE_LINE | {"hash_ids": [1, "x"]}), r"line 1: hash_ids is \[1, 'x'\]; it must be a list"),
    ],
)
def test_a_bad_trace_names_its_line(tmp_path, content, complaint):
    path = tmp_path / "trace.jsonl"
    path.write_text(content)
    with pytest.raises(DatasetError, match=complaint):
        datasets.trace(path, speed=1.0, length_scale=1.0, limit=None, vocab_size=1000, seed=0)


def test_files_of_texts_and_token_ids(tmp_path):
    path = tmp_path / "requests.json"
    entries = [
        {"prompt": "Hello", "max_tokens": 7},
        {"token_ids": [1, 2]},
        {"conversations": [{"from": "human", "value": "Hi"}, {"from": "gpt", "value": "one two three"}]},
    ]
    expected = (Turn("Hello", 7), Turn((1, 2), 128), Turn("Hi", 4))
    for content in (json.dumps(entries), "\n".join(map(json.dumps, entries))):
        path.write_text(content)
        found = datasets.requests_of_file(path, output_len=None, limit=None)
        assert tuple(conversation.turns[0] for conversation in found) == expected
    drawn = datasets.texts_of_file(path, count=7, output_len=5, rng=random.Random(0))
    assert len(drawn) == 7
    assert {conversation.turns[0] for conversation in drawn} == {replace(turn, max_tokens=5) for turn in expected}


@pytest.mark.parametrize(
    ("entry", "complaint"),
    [
        ({"question": "?"}, "the entry has no prompt, token_ids or conversations; its fields: question"),
        ({"token_ids": [-1]}, r"token_ids is \[-1\]"),
        ({"prompt": "a", "max_tokens": 0.5}, "max_tokens is 0.5"),
        ({"conversations": 3}, "conversations is 3"),
    ],
)
def test_a_bad_entry_is_named(tmp_path, entry, complaint):
    path = tmp_path / "requests.json"
    path.write_text(json.dumps([entry]))
    with pytest.raises(DatasetError, match=f"entry 0: {complaint}"):
        datasets.requests_of_file(path, output_len=None, limit=None)


def test_conversations_that_exceed_the_model_length_are_refused_or_skipped():
    short, long = (DatasetConversation((Turn((1,) * size, 10),)) for size in (90, 91))
    datasets.check_lengths([short], 100)
    with pytest.raises(DatasetError, match="have 101 tokens, but max_model_len is 100"):
        datasets.check_lengths([short, long], 100)
    assert datasets.without_too_long([short, long], 100) == [short]


def test_a_chunk_of_four_tokens_counts_as_four_gaps():
    latencies = summarize([COALESCED]).latencies
    assert latencies["ttft"].mean == pytest.approx(500)
    assert latencies["e2e"].mean == pytest.approx(900)
    assert latencies["tpot"].mean == pytest.approx(300 / 5)  # the five tokens after the first chunk
    assert latencies["itl"].mean == pytest.approx(latencies["tpot"].mean)
    assert latencies["itl"].percentiles[50] == pytest.approx(50)
    assert latencies["pause"].highest == pytest.approx(200)


def test_an_answer_in_one_chunk_has_no_time_per_token():
    record = replace(COALESCED, chunk_times=(1.3,), chunk_tokens=(6,))
    latencies = summarize([record]).latencies
    assert (latencies["tpot"], latencies["itl"], latencies["pause"]) == (None, None, None)
    assert latencies["ttft"].mean == pytest.approx(800)


def test_a_summary_counts_successful_requests():
    failed = Record(sent_s=0.0, end_s=2.0, error="broken")
    late = replace(COALESCED, sent_s=0.1)
    found = summarize([COALESCED, late, failed, failed], parse_slo("ttft:600,e2e:2000"))
    assert (found.num_ok, found.num_failed, found.num_good) == (2, 2, 1)
    assert (found.input_tokens, found.output_tokens, found.cached_tokens, found.hit_rate) == (20, 12, 8, 0.4)
    assert (found.duration_s, found.output_tokens_per_s, found.goodput) == (2.0, 6.0, 0.5)
    assert found.errors == {"broken": 2}
    fields = summary_fields(found)
    assert (fields["ttft_ms"]["p50"], fields["requests_good"]) == (pytest.approx(700), 1)
    text = report_text(found, client_cpu=0.95, interrupted=3)
    for words in ("2 x failed: broken", "8 from cache (40.0%)", "3 requests were open", "95% of a core", "1 with ttft"):
        assert words in text


@pytest.mark.parametrize(
    ("text", "complaint"),
    [("ttf:3", "'ttf' is not a latency"), ("ttft", "is not a number"), ("tpot:0", "above 0"), ("", "is not a latency")],
)
def test_a_bad_slo_is_refused(text, complaint):
    with pytest.raises(ValueError, match=complaint):
        parse_slo(text)
