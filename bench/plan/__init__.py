"""The planner: a workload through real decision objects in simulated time.

workload --> simulate(cluster) --> records, like those of a live run --> goodput, splits, advice
"""
