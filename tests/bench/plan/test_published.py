"""The planner against answers known without it: queueing theory, and a published example."""

import math
import statistics
from dataclasses import replace

from clusters import cluster, profile

from bench.lengths import Fixed
from bench.plan.cluster_model import NodeModel
from bench.plan.demand import MadeUp
from bench.plan.predict import predict
from bench.plan.simulate import simulate
from bench.slo import Slo

NUM_BATCHES = 25


def test_the_mean_wait_at_one_prefill_node_is_that_of_an_md1_queue():
    """16 tokens of 6.25 ms are 100 ms of service; a step of prompts alone may last four budgets of
    25 ms, so it takes one of them. At 5 requests/s the node is busy half of the time, and theory
    has rho / (2 * (1 - rho)) * 100 ms = 50 ms of waiting. The bound is four standard errors of
    the mean, from means of 25 stretches of the run."""
    node = NodeModel(profile=profile(token_ms=6.25), num_blocks=10_000, step_budget_ms=25.0)
    demand = MadeUp(num_input=Fixed(16), num_output=Fixed(1), num_requests=10_000)
    outcome = simulate(cluster(1, 1, prefill=node), demand.workload(rate_per_s=5.0, seed=1))
    waits_ms = [1e3 * record.ttft_s - 100.0 for record in outcome.records]
    size = len(waits_ms) // NUM_BATCHES
    batches = [statistics.fmean(waits_ms[i * size : (i + 1) * size]) for i in range(NUM_BATCHES)]
    standard_error = statistics.stdev(batches) / math.sqrt(NUM_BATCHES)
    assert standard_error < 4.0
    assert abs(statistics.fmean(waits_ms) - 50.0) < 4 * standard_error
    # Nobody is served faster than alone.
    assert min(waits_ms) > -1e-6
    prefill = outcome.nodes[0]
    assert prefill.num_steps == 10_000
    assert abs(prefill.busy_share - 0.5) < 0.02


# DistServe (OSDI 24): OPT-13B on one A100 each, 512 tokens in and 64 out, 90 % within a TTFT of
# 0.4 s and a TPOT of 0.04 s. Standalone it reports 5.6 requests/s for prefill, 10 for decode, 1.6
# for both on one GPU, and 2 prefill GPUs and 1 for decode at 10 / 3 = 3.3 per GPU.
DISTSERVE = Slo(ttft_ms=400.0, tpot_ms=40.0)
# 20 ms read 26 GB of weights at 1.3 TB/s; the others are chosen for the two standalone figures.
A100 = NodeModel(profile=profile(base_ms=20.0, row_ms=0.65, token_ms=0.187), num_blocks=4000)
# A prompt is 116 ms there, and a step of prompts four budgets: one at a time, as DistServe has it.
A100_PREFILL = replace(A100, step_budget_ms=30.0)
# What a standalone measurement leaves out.
INSTANT = NodeModel(profile=profile(token_ms=1e-6), num_blocks=100_000, max_running=1000)


def holds(deployment, rate_per_s, *, num_output=64):
    """90 % of the requests of two runs meet the SLO."""
    demand = MadeUp(num_input=Fixed(512), num_output=Fixed(num_output), num_requests=750)
    prediction = predict(deployment, demand, rate_per_s=rate_per_s, slo=DISTSERVE, seeds=(0, 1))
    return prediction.attainment >= 0.9


def test_the_profile_has_distserves_standalone_figures():
    """Within 10 %."""
    prefill_alone = cluster(1, 1, prefill=A100_PREFILL)
    assert holds(prefill_alone, 0.9 * 5.6, num_output=1)
    assert not holds(prefill_alone, 1.1 * 5.6, num_output=1)
    decode_alone = cluster(1, 1, prefill=INSTANT, decode=A100)
    assert holds(decode_alone, 0.9 * 10)
    assert not holds(decode_alone, 1.1 * 10)


def test_distserves_example_two_prefill_and_one_decode_serve_3_3_per_gpu():
    """Within 15 %, from the standalone figures alone; and colocated, one GPU serves less than two
    thirds of it."""
    split = cluster(2, 1, prefill=A100_PREFILL, decode=A100)
    assert holds(split, 0.85 * 10)
    assert not holds(split, 1.15 * 10)
    assert not holds(cluster(0, 1, prefill=A100), 2 / 3 * 10 / 3)
