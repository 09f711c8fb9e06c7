"""What chance and the clock decide of an answer. All of it follows from one number, so the same answer can be made
again."""

import secrets
import string
import time
from collections.abc import Callable
from hashlib import blake2b
from itertools import count
from typing import Final

from msgspec import Struct

DICE_BYTES: Final = 12
CALL_ID_CHARS: Final = 9  # Mistral's chat templates take no other form than nine letters and digits
_SIGNS = string.ascii_letters + string.digits


class Draw(Struct, frozen=True):
    created_s: int  # Unix time
    dice: bytes  # DICE_BYTES, which nobody may guess

    @classmethod
    def fresh(cls) -> "Draw":
        return cls(int(time.time()), secrets.token_bytes(DICE_BYTES))

    def of_prompt(self, number: int) -> "Draw":
        """Of one of a call's many prompts."""
        return Draw(self.created_s, self._digest(f"prompt {number}", DICE_BYTES))

    def seed(self) -> int:
        """63 bits: what the sampling draws with where the caller gives no seed."""
        return int.from_bytes(self._digest("seed", 8)) >> 1

    def call_ids(self, choice: int) -> Callable[[], str]:
        """Returns what gives the ids of a choice's tool calls, one after another."""
        numbers = count()

        def next_id() -> str:
            signs = self._digest(f"call {choice}.{next(numbers)}", CALL_ID_CHARS)
            return "".join(_SIGNS[sign % len(_SIGNS)] for sign in signs)

        return next_id

    def secret(self, of: str) -> str:
        """32 hexadecimal digits, which nobody guesses who does not know the dice."""
        return self._digest(of, 16).hex()

    def _digest(self, of: str, num_bytes: int) -> bytes:
        return blake2b(of.encode(), key=self.dice, digest_size=num_bytes).digest()
