"""A roll-out: what runs becomes what is wanted, one process after the other."""
