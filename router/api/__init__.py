"""What clients may ask, checked; the protocols they ask by."""
