"""What the commands share: their options, how they reach a service, how they print, and how they end."""
