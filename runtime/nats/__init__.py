"""NATS: the client, its subjects, direct reads."""
