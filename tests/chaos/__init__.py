"""Random faults against real processes, with an oracle that knows each answer: `python -m tests.chaos --seed 1 --minutes 5`."""
