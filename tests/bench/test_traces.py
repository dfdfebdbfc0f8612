import pytest

from bench.traces import has_times, read_trace
from bench.workload import Arrival

AZURE = """TIMESTAMP,ContextTokens,GeneratedTokens
2023-11-16 23:59:59.5000000,4808,10
2023-11-17 00:00:01.2500000,110,0
"""
MOONCAKE = """{"timestamp": 3000, "input_length": 700, "output_length": 5, "hash_ids": [0, 1]}
{"timestamp": 4500, "input_length": 1100, "output_length": 6, "hash_ids": [0, 1, 2]}
"""
PROMPTS = """{"prompt": "Why is the sky blue?", "max_tokens": 12}

{"prompt": "Hi"}
"""


def written(tmp_path, text, name="t.csv"):
    (tmp_path / name).write_text(text)
    return tmp_path / name


@pytest.mark.parametrize("newline", ["\n", "\r\n"])
def test_azure_rows_count_from_the_first(tmp_path, newline):
    path = tmp_path / "code.csv"
    path.write_bytes(AZURE.replace("\n", newline).encode())
    workload = read_trace(path)
    assert workload.name == "code"
    assert workload.arrivals == (
        Arrival(at_s=0.0, num_input=4808, num_output=10),
        # At least one token is asked for.
        Arrival(at_s=1.75, num_input=110, num_output=1),
    )
    assert has_times(workload)


def test_rows_are_put_in_order(tmp_path):
    head, first, second = AZURE.splitlines()
    workload = read_trace(written(tmp_path, "\n".join([head, second, first])))
    assert [a.num_input for a in workload.arrivals] == [4808, 110]


def test_mooncake_lines_keep_their_blocks(tmp_path):
    first, second = read_trace(written(tmp_path, MOONCAKE, "m.jsonl")).arrivals
    assert first == Arrival(
        at_s=0.0, num_input=700, num_output=5, block_ids=(0, 1), block_tokens=512
    )
    assert (second.at_s, second.block_ids) == (1.5, (0, 1, 2))


def test_prompts_have_no_times(tmp_path):
    workload = read_trace(written(tmp_path, PROMPTS, "p.jsonl"))
    assert [(a.text, a.num_output) for a in workload.arrivals] == [
        ("Why is the sky blue?", 12),
        ("Hi", 128),
    ]
    assert not has_times(workload)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("TIMESTAMP,ContextTokens,GeneratedTokens\nnow,1,1\n", ":2 is no row"),
        ("a,b\n1,2\n", ":2 is no row"),
        ("TIMESTAMP,ContextTokens,GeneratedTokens\n", "has no requests"),
        (MOONCAKE + '{"timestamp": 1}\n', ":3 is no request"),
        (MOONCAKE + "{\n", ":3 is no request"),
        ('{"prompt": ""}\n', ":1 is no request"),
        ('{"prompt": [1]}\n', ":1 is no request"),
        ("", "has no requests"),
    ],
)
def test_another_file_is_refused_with_its_line(tmp_path, text, message):
    with pytest.raises(ValueError, match=message):
        read_trace(written(tmp_path, text))
