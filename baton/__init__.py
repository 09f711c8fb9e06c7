"""The face: what a user touches. Commands, the service they start and watch, tools on the KV event stream."""
