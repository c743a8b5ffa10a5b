"""`stronghold plan`: what fits, how fast, and what bounds it, before anything runs."""
