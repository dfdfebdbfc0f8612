from bench.figures import FIGURES, GOODPUT, figures_of
from bench.measures import measure
from bench.records import RequestRecord


def test_every_figure_has_a_value_of_a_run() -> None:
    record = RequestRecord(
        index=0,
        offered_s=0.5,
        sent_s=0.5,
        num_input=10,
        num_output=3,
        chunks=((0.6, 1), (0.62, 1), (0.68, 1)),
        ended_s=0.7,
        queue_s=0.01,
        transfer_s=0.02,
        handoff_gap_s=0.03,
    )
    refused = RequestRecord(
        index=1, offered_s=0.0, sent_s=0.0, num_input=10, num_output=3, outcome="refused"
    )
    figures = figures_of(measure([record, refused], wall_s=2.0), attainment=0.5)
    rounded = {name: round(value or 0.0, 6) for name, value in figures.items()}
    assert set(figures) == {figure.name for figure in FIGURES} - {GOODPUT.name}
    assert None not in figures.values()
    assert (rounded["ttft_p50_ms"], rounded["tpot_p99_ms"]) == (100.0, 40.0)
    assert (rounded["itl_max_ms"], rounded["gaps_over_50ms"]) == (60.0, 1)
    assert (rounded["queue_p50_ms"], rounded["transfer_p50_ms"]) == (10.0, 20.0)
    assert (rounded["output_tok_s"], rounded["num_missed"]) == (1.5, 1)


def test_a_run_without_answers_has_no_latencies() -> None:
    figures = figures_of(measure([], wall_s=1.0), attainment=None)
    assert figures["ttft_p50_ms"] is None
    assert figures["output_tok_s"] == 0.0
