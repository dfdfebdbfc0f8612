"""Errors of predictions, and which of them count."""

from bench.plan.agreement import Agreement, Figure, error_table


def run(*errors: float, problems: tuple[str, ...] = ()) -> Agreement:
    return Agreement(
        deployment="1P1D",
        trace="t",
        rate_per_s=1.0,
        figures=tuple(
            Figure(name="TTFT p50", predicted=100.0 * (1 + error), measured=100.0)
            for error in errors
        ),
        problems=problems,
    )


def test_an_error_is_relative_to_what_was_measured():
    assert Figure(name="x", predicted=110.0, measured=100.0).error == 110 / 100 - 1
    assert Figure(name="x", predicted=None, measured=100.0).error is None
    assert Figure(name="x", predicted=1.0, measured=0.0).error is None


def test_runs_with_problems_are_not_counted():
    table = error_table([run(0.1), run(-0.3), run(0.2), run(5.0, problems=("late",))])
    assert [[cell.text for cell in row] for row in table.rows] == [
        ["TTFT p50", "20.0%", "30.0%", "3"],
        ["all", "20.0%", "30.0%", "3"],
    ]
