"""Pipeline parallelism: schedules as data, checked, timed and drawn before anything runs."""

from lightning_5d.pipeline_parallel.schedule import Action, Entry, Kind, Overlap, Row, Schedule
from lightning_5d.pipeline_parallel.schedules import SCHEDULES, make_schedule
from lightning_5d.pipeline_parallel.simulate import Durations, Simulation, peak_activations, simulate
from lightning_5d.pipeline_parallel.table import format_schedule, parse_schedule, read_schedule, write_schedule
from lightning_5d.pipeline_parallel.validate import check, validate

__all__ = [
    "SCHEDULES",
    "Action",
    "Durations",
    "Entry",
    "Kind",
    "Overlap",
    "Row",
    "Schedule",
    "Simulation",
    "check",
    "format_schedule",
    "make_schedule",
    "parse_schedule",
    "peak_activations",
    "read_schedule",
    "simulate",
    "validate",
    "write_schedule",
]
