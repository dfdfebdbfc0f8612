import pytest

from bench.records import RequestRecord, read_jsonl, write_jsonl

# Due at 1 s, sent 0.25 s late; tokens 1, 2+3, 4.
RECORD = RequestRecord(
    index=3,
    offered_s=1.0,
    sent_s=1.25,
    num_input=10,
    num_output=4,
    label="steady",
    chunks=((1.5, 1), (2.0, 2), (3.0, 1)),
    ended_s=3.5,
    queue_s=0.125,
    served_as="local",
)


def test_times_count_from_when_the_request_was_due():
    assert RECORD.ttft_s == 0.5
    assert RECORD.e2e_s == 2.5


def test_tpot_is_the_mean_of_all_gaps_after_the_first_token():
    assert RECORD.num_generated == 4
    assert RECORD.tpot_s == (3.0 - 1.5) / 3


def test_tokens_of_one_chunk_have_one_gap_before_them_and_none_between():
    assert RECORD.gaps_s() == [0.5, 0.0, 1.0]


def test_a_first_chunk_of_three_tokens_has_two_empty_gaps():
    record = RequestRecord(
        index=0, offered_s=0, sent_s=0, num_input=1, num_output=4, chunks=((1.0, 3), (1.5, 1))
    )
    assert record.gaps_s() == [0.0, 0.0, 0.5]


def test_what_did_not_happen_has_no_time():
    refused = RequestRecord(
        index=0, offered_s=0, sent_s=0, num_input=1, num_output=4, outcome="refused"
    )
    assert (refused.ttft_s, refused.tpot_s, refused.e2e_s) == (None, None, None)
    assert refused.gaps_s() == []


def test_an_answer_of_one_token_has_no_tpot():
    record = RequestRecord(
        index=0, offered_s=0, sent_s=0, num_input=1, num_output=1, chunks=((1.0, 1),)
    )
    assert record.tpot_s is None


def test_a_file_gives_back_what_was_written(tmp_path):
    write_jsonl(tmp_path / "r.jsonl", [RECORD, RECORD])
    assert read_jsonl(tmp_path / "r.jsonl") == [RECORD, RECORD]


@pytest.mark.parametrize("line", ["{", "{}", '{"chunks": [], "colour": 1}', "7"])
def test_another_file_is_refused_with_its_line(tmp_path, line):
    write_jsonl(tmp_path / "r.jsonl", [RECORD])
    with (tmp_path / "r.jsonl").open("a") as file:
        file.write(line + "\n")
    with pytest.raises(ValueError, match=r"r\.jsonl:2 is not a request record"):
        read_jsonl(tmp_path / "r.jsonl")
