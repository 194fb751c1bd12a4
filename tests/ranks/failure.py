"""How a failed call is told to the person who reads the test's output."""

from tests.ranks.call import Report

LOG_CHARACTERS = 4000


class RankError(Exception):
    """A call failed on at least one rank.

    Attributes:
        rank: the rank that failed first, or None when the time limit passed on ranks that merely wait.
        cause: that rank's exception, when it could be pickled.
        reports: what is known about every rank.
    """

    def __init__(self, message: str, rank: int | None, cause: BaseException | None, reports: list[Report]) -> None:
        super().__init__(message)
        self.rank = rank
        self.cause = cause
        self.reports = reports


def describe(reason: str, first: Report | None, reports: list[Report]) -> str:
    """The reason, all failures in full, the first before the others, one line for each rank, stacks of those that hung, and output."""
    parts = [reason]
    for report in sorted(reports, key=lambda report: report is not first):
        if report.outcome is not None and report.outcome.failure:
            parts.append(f"--- rank {report.rank}\n{report.outcome.failure.rstrip()}")
    parts.append("--- all ranks\n" + "\n".join(f"rank {report.rank}: {_line(report)}" for report in reports))
    parts += [f"--- rank {report.rank} was here\n{report.stacks.rstrip()}" for report in reports if report.stacks]
    parts += [
        f"--- rank {report.rank} printed\n{report.log[-LOG_CHARACTERS:].rstrip()}" for report in reports if report.log
    ]
    return "\n".join(parts)


def _line(report: Report) -> str:
    if report.signal_or_code is not None:
        return report.signal_or_code
    if report.outcome is None:
        return "did not answer and was killed"
    if report.outcome.failure is not None:
        return report.outcome.failure.strip().splitlines()[-1]
    if report.leftovers:
        return "returned, but left behind " + ", ".join(report.leftovers)
    return "returned"
