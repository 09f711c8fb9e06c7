"""Which tokens a grammar may name, and how it is written with them."""
