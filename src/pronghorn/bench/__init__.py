"""How fast this machine could train, how fast it does, and which settings are faster."""
