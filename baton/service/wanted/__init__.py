"""What a service shall be: from what a person wrote to a configuration, and which change of it takes what."""
