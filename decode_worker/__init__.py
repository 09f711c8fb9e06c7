"""The role that reserves memory for a prompt's KV, lets a prefill worker fill it, and writes the answer."""
