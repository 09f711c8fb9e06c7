"""The KV event stream from outside the cluster: watching, recording and replaying it, and feeding other engines' in."""
