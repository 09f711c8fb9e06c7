"""Random faults against real processes, with an oracle that knows each answer: `make chaos`."""
