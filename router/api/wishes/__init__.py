"""What a request asks, in no dialect, and its checks."""
