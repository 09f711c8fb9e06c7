"""How calmly the planner acts. Because nobody outside can set these numbers well, they are constants."""

STALE_S = 15.0  # three of its intervals: nothing is changed while routers, workers or discovery are silent for longer

# Guards. A worker takes a minute to start, so a role that shrank half a minute ago has not shown yet what it costs.
DOWN_COOLDOWN_S = 30.0
REVERSAL_S = 60.0
REVERSALS_PER_HOUR = 2

# A start that took FAILED_STARTS times as long as expected has failed. The next one waits, and twice as long each time.
FAILED_STARTS = 5
RETRY_S = 30.0
RETRY_MAX_S = 600.0

# Deadlines of the other verbs. What must wait for answers has longer than an answer takes by default
# (router.request_timeout_s), half of it where the answers move or are few.
WAKE_DEADLINE_S = 60.0
SLEEP_DEADLINE_S = 300.0
FLIP_DEADLINE_S = 300.0
DRAIN_DEADLINE_S = 600.0
