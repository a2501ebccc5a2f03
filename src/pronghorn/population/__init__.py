"""Decisions about many policies: who plays whom, who is stronger, who is copied. Numbers in, decisions out."""
