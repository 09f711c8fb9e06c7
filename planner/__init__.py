"""How many workers there are: observe, decide, write down, carry out."""
