"""Hashes of KV blocks, bit-exact with Dynamo's."""
