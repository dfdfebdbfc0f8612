import pytest

from bench.generator_check import Pace, added_ms, measure, pick_cores


def test_streams_share_the_tokens_per_second():
    pace = Pace(num_streams=64, tokens_per_s=2000, duration_s=8, together=False)
    assert pace.gap_s == 0.032
    assert pace.num_tokens == 250


def test_tokens_of_one_chunk_came_at_one_time():
    written = {0: [1.0, 1.25, 2.0], 1: [5.0]}
    chunks = {0: [(1.5, 2), (2.25, 1)], 1: [(5.125, 1)]}
    assert added_ms(written, chunks) == [500, 250, 250, 125]


def test_a_token_that_never_came_is_no_measurement():
    with pytest.raises(ValueError, match="longer"):
        added_ms({0: [1.0, 2.0]}, {0: [(1.5, 1)]})


@pytest.mark.parametrize("together", [False, True])
def test_every_token_of_a_paced_stub_is_seen_after_it_was_written(together):
    pace = Pace(num_streams=3, tokens_per_s=300, duration_s=0.1, together=together)
    added = measure(pace, core=pick_cores()[0])
    assert len(added.added_ms) == 30
    assert min(added.added_ms) > 0
