"""How the server's app marks its lines in a run's log, so that `nestling submit` knows them from Flower's."""

LINE, RESULT, ERROR = "nestling: ", "nestling-result: ", "nestling-error: "
"""What lines of ours begin with; after the last two, one of which ends a log, JSON follows."""
