"""What answers must look like: grammars compiled for a vocabulary, and the tokens that they allow."""
