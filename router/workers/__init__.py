"""The workers as this router knows them."""
