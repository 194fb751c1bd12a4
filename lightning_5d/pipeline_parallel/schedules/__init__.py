"""Generators of pipeline schedules: pure functions of ranks, microbatches and options."""

from lightning_5d.pipeline_parallel.schedules.registry import SCHEDULES, Family, known_name, make_schedule

__all__ = ["SCHEDULES", "Family", "known_name", "make_schedule"]
